// Samples of a step with their rewards. Texts of models are inserted as text nodes only.

const FIRST = 8;
const LONG = 1200;

class Samples {
  /** ask: requests the samples of a purpose and a step. */
  constructor(run, ask) {
    this.run = run;
    this.ask = ask;
    this.purpose = "train";
    this.step = null;
    this.order = "best";
    this.most = FIRST;
    this.key = "";
    this.back = el("button", { type: "button", "aria-label": "Samples of the previous step", onClick: () => this.turn(-1) }, "‹");
    this.on = el("button", { type: "button", "aria-label": "Samples of the next step", onClick: () => this.turn(1) }, "›");
    this.steps = el("select", { "aria-label": "Step", onChange: () => this.choose(this.steps.value === "newest" ? null : Number(this.steps.value)) });
    this.orders = el("select", { "aria-label": "Order", onChange: () => { this.order = this.orders.value; this.draw(); } },
      el("option", { value: "best" }, "best first"), el("option", { value: "worst" }, "worst first"), el("option", { value: "prompt" }, "by prompt"));
    byId("samples-tools").append(
      choice("purpose", "Of", [["train", "training"], ["eval", "evaluation"]], "train", (value) => { this.purpose = value; this.choose(null); }),
      el("span", { class: "steps" }, this.back, this.steps, this.on), this.orders);
  }

  get kept() { return this.run.kept[this.purpose] ?? []; }
  get shown() { return this.step ?? this.kept.at(-1) ?? null; }

  turn(by) {
    const next = this.kept[this.kept.indexOf(this.shown) + by];
    if (next !== undefined) this.choose(next === this.kept.at(-1) ? null : next);
  }

  choose(step) {
    this.step = step;
    this.most = FIRST;
    this.update();
  }

  /** Request the selected samples, if the selection has changed. */
  async update() {
    const { kept, shown, purpose } = this;
    this.back.disabled = kept.indexOf(shown) <= 0;
    this.on.disabled = shown === kept.at(-1);
    const options = `${purpose} ${kept.join()}`;
    if (options !== this.options) {
      this.options = options;
      const name = (step) => (purpose === "eval" ? `θ${subscript(step)}` : `step ${step}`);
      this.steps.replaceChildren(el("option", { value: "newest" }, kept.length ? `newest, ${name(kept.at(-1))}` : "none"),
        ...kept.slice(0, -1).reverse().map((step) => el("option", { value: step }, name(step))));
    }
    this.steps.value = this.step === null ? "newest" : String(this.step);
    const key = `${purpose} ${shown}`;
    if (key === this.key) return;
    this.key = key;
    if (shown === null) {
      this.found = [];
      this.draw();
      return;
    }
    try {
      const found = await this.ask(purpose, shown);
      if (this.key !== key) return;
      this.found = found;
      this.draw();
    } catch (error) {
      if (this.key !== key) return;
      this.key = "";
      byId("sample-list").replaceChildren(empty(`These samples are not available: ${visible(error.message)}`));
    }
  }

  draw() {
    const place = byId("sample-list"), { found = [], order, purpose } = this;
    if (found.length === 0) {
      place.replaceChildren(empty(this.kept.length ? "No samples are kept of this step."
        : purpose === "eval" ? "No samples of an evaluation are kept: none is complete, or storage.samples.perEvaluation is 0."
          : "No samples are kept: the first step is not done, or storage.samples.perStep is 0."));
      return;
    }
    const sign = order === "best" ? -1 : 1;
    const unscored = (sample) => sample.reward === null || sample.reward === undefined;
    const sorted = order === "prompt" ? found : [...found].sort((a, b) => unscored(a) - unscored(b) || sign * (a.reward - b.reward));
    const rewards = found.map((sample) => sample.reward).filter(Number.isFinite);
    const range = extent(rewards);
    const more = sorted.length - this.most;
    put(place, strip(found, range),
      ...(this.run.texts ? [] : [el("p", { class: "quiet" }, "This page shows no texts, because it has no access control. ",
        el("code", {}, "asyncflow ui DIR"), " shows them to users who can read the folder of the run.")]),
      ...sorted.slice(0, this.most).map((sample) => this.card(sample, range)),
      more > 0 ? el("button", { type: "button", class: "more", onClick: () => { this.most += 2 * FIRST; this.draw(); } }, `Show ${Math.min(more, 2 * FIRST)} more of ${more}`) : null);
  }

  card(sample, range) {
    const made = sample.version_min === sample.version_max ? `θ${subscript(sample.version_min)}` : `θ${subscript(sample.version_min)} to θ${subscript(sample.version_max)}`;
    const facts = [`prompt ${sample.serial}${sample.set ? ` of ${visible(sample.set)}` : ""}, sample ${sample.sample}`, `made by ${made}`,
      `${number(sample.prompt_tokens)} + ${number(sample.response_tokens)} tokens`, visible(sample.finish)];
    if (Number.isFinite(sample.advantage)) facts.splice(1, 0, `advantage ${signed(sample.advantage)}`);
    if (!sample.drawn) facts.push("kept for its reward");
    const scored = Number.isFinite(sample.reward);
    const part = scored ? (range[1] > range[0] ? (sample.reward - range[0]) / (range[1] - range[0]) : sample.reward > 0 ? 1 : 0) : 0;
    const head = el("div", { class: "head" }, el("b", { class: scored ? "reward" : "reward none" }, scored ? `reward ${number(sample.reward)}` : `no reward: ${visible(sample.failure || "not scored")}`),
      meter(part, "small"), el("span", { class: "quiet" }, facts.join("  ·  ")));
    const texts = sample.prompt === undefined ? [] : [el("div", { class: "texts" }, this.text("Prompt", sample.prompt), this.text("Response", sample.response),
      ...(sample.answer ? [this.text("Answer of the data", sample.answer, "small")] : []))];
    const details = Object.entries(sample.details ?? {});
    const parts = details.length ? [el("dl", { class: "details" }, ...details.map(([name, value]) => el("div", {}, el("dt", {}, visible(name)),
      el("dd", {}, typeof value === "number" ? number(value) : visible(typeof value === "string" ? value : JSON.stringify(value))))))] : [];
    return el("article", { class: "card sample" }, head, ...texts, ...parts);
  }

  /** Return the element of a text; a long text is shortened, with a button that shows all of it. */
  text(name, text, kind = "") {
    const shown = visible(text), body = el("pre", { dir: "auto" }, shown.length > LONG ? `${shown.slice(0, LONG)} …` : shown || "(empty)");
    const made = el("div", { class: `text ${kind}` }, el("h4", {}, name), body);
    if (shown.length > LONG) {
      const all = el("button", { type: "button", onClick: () => { body.textContent = shown; all.remove(); } }, `Show all ${number(shown.length)} characters`);
      made.append(all);
    }
    return made;
  }
}

const signed = (value) => `${value > 0 ? "+" : value < 0 ? "−" : ""}${Math.abs(value).toFixed(2)}`;

/** Return a histogram of the rewards of a step's kept samples. */
function strip(found, range) {
  const bins = 24, counts = Array(bins).fill(0);
  const scored = found.filter((sample) => Number.isFinite(sample.reward));
  for (const { reward } of scored) counts[range[1] > range[0] ? Math.min(bins - 1, Math.floor(((reward - range[0]) / (range[1] - range[0])) * bins)) : 0]++;
  const failed = found.length - scored.length, most = Math.max(1, ...counts);
  const drawing = svg("svg", { class: "strip", viewBox: `0 0 ${bins * 10} 34`, preserveAspectRatio: "none", role: "img",
    "aria-label": `Rewards of ${scored.length} samples, from ${number(range[0])} to ${number(range[1])}` });
  counts.forEach((count, i) => drawing.append(svg("rect", { x: i * 10 + 1, width: 8, y: 34 - Math.max(count ? 3 : 1, (count / most) * 32), height: Math.max(count ? 3 : 1, (count / most) * 32), class: count ? "f0" : "hollow" })));
  return el("div", { class: "card rewards" }, drawing, el("div", { class: "ends" }, el("span", {}, number(range[0])),
    el("span", { class: "quiet" }, `rewards of the ${plural(scored.length, "kept sample")}${failed ? `; ${failed} without a reward` : ""}`), el("span", {}, number(range[1]))));
}
