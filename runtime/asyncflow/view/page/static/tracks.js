// The timeline: one row for each process, with its main spans as bars and the background spans as thin lines below.

const ROW = 20, BAR = 13, AXIS = 22;
/** Timeout of a request for spans. Reading 100,000 spans takes half a second of one core, and longer on a busy machine. */
const READ_MS = 60000;
const KIND_COLOURS = { generate: 0, prefill: 6, forward: 2, backward: 8, compute: 2, optimizer: 9, swap: 3, receive: 3, stage: 10,
  publish: 10, reward: 4, evaluation: 5, checkpoint: 7, claim: 11, fetch: 11, dispatch: 11, advantage: 4, starting: 12, idle: 13 };
const CAUSE_COLOURS = { starved: 1, tail: 4, sync: 3, "back-pressure": 5, reward: 7, "data plane": 11, evaluation: 10, starting: 12, lost: 14, "": 13 };
const ORDER = ["trainer", "rollout", "driver", "controller", "storage", "reference"];
/** Roles that serve requests, which are normally idle. */
const SERVERS = ["driver", "controller", "storage", "holder", "master"];
/** For each mode that colours by a number, the column of that number. */
const NUMBERS = { version: "v", step: "s" };
const KIND_WORDS = { compute: "computes", claim: "claims", fetch: "fetches" };

class Tracks {
  constructor(place, ask) {
    this.place = place;
    this.ask = ask;
    this.changed = () => {};
    this.timeline = null;
    this.detail = null;
    this.mode = "kind";
    this.seen = true;
    this.asked = 0;
    this.names = el("div", { class: "names", "aria-hidden": "true" });
    this.canvas = el("canvas", { tabindex: "0", role: "img" });
    this.readout = el("p", { class: "readout quiet" });
    this.key = el("div", { class: "legend" });
    const button = (words, label, act) => el("button", { type: "button", "aria-label": label, title: label, onClick: act }, words);
    byId("timeline-tools").append(
      choice("mode", "Colours", [["kind", "activity"], ["cause", "cause of idleness"], ["version", "version"], ["step", "step"]], "kind", (mode) => { this.mode = mode; this.draw(); }),
      el("span", { class: "steps" }, button("−", "Show a longer time", () => this.zoom(2)), button("+", "Show a shorter time", () => this.zoom(0.5)), button("all", "Show the whole run", () => this.show(null))));
    this.canvas.addEventListener("pointermove", (event) => this.move(event));
    this.canvas.addEventListener("pointerdown", (event) => { this.held = { x: event.clientX, window: this.window }; this.canvas.setPointerCapture(event.pointerId); });
    this.canvas.addEventListener("pointerup", () => { this.held = null; });
    this.canvas.addEventListener("pointerleave", () => { this.point(null); });
    this.canvas.addEventListener("dblclick", (event) => this.zoom(0.4, this.timeAt(event)));
    this.canvas.addEventListener("wheel", (event) => {
      if (!event.ctrlKey && !event.metaKey) return;
      event.preventDefault();
      this.zoom(Math.exp(event.deltaY / 300), this.timeAt(event));
    }, { passive: false });
    this.canvas.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(place);
    new IntersectionObserver((entries) => { this.seen = entries.at(-1).isIntersecting; }, { rootMargin: "600px" }).observe(place);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    place.replaceChildren(empty("reading the timeline …"));
  }

  /** Request the new part of the timeline every few seconds, while the run is active and the timeline is visible. */
  async follow(run) {
    this.run = run;
    const live = run.status && !run.end;
    const known = this.timeline, due = !known ? 2000 : known.tracks.length === 0 ? (live ? 3000 : 15000) : !known.explained ? 0 : live ? 3000 : 15000;
    if (Date.now() - this.asked < due || (known && !this.seen)) return;
    this.asked = Date.now();
    try {
      if (!known?.explained || (known.end - known.begin) / known.width > 4000) this.timeline = await this.get();
      else this.join(await this.get({ begin: known.end - 60, width: known.width }));
      this.failure = "";
    } catch (error) {
      this.failure = error.message;
    }
    this.asked = Date.now();
    this.draw();
    this.changed();
    if (this.timeline?.tracks.length && !this.timeline.explained && !EMBEDDED) setTimeout(() => this.follow(run), 200);
  }

  async get(window = {}) {
    const query = new URLSearchParams(Object.entries(window)).toString();
    const answer = await this.ask(`/v1/page/timeline${query ? `?${query}` : ""}`, READ_MS);
    for (const track of answer.tracks) {
      const { main, background } = track;
      for (const part of [main, background]) part.t = part.t.map((t) => t + answer.zero);
      track.begin = main.t[0] ?? 0;
      track.end = main.t.length ? main.t.at(-1) + main.d.at(-1) : 0;
      track.versions = [...new Set(main.v.filter((v, i) => v >= 0 && answer.kinds[main.k[i]] === "generate"))].sort((a, b) => a - b);
    }
    return answer;
  }

  /** Replace the known spans from `newer.from` on by the newest part. */
  join(newer) {
    const known = this.timeline, cut = newer.from;
    const tracks = new Map(known.tracks.map((track) => [nameOf(track), track]));
    for (const track of newer.tracks) {
      const old = tracks.get(nameOf(track));
      if (!old) { tracks.set(nameOf(track), track); continue; }
      for (const part of ["main", "background"]) old[part] = joined(old[part], track[part], cut);
      old.versions = [...new Set([...old.versions, ...track.versions])].sort((a, b) => a - b);
      Object.assign(old, { end: track.end || old.end, killed: track.killed });
    }
    this.timeline = { ...newer, begin: newer.begin, width: known.width, tracks: [...tracks.values()] };
  }

  get whole() { return { begin: this.timeline.begin, end: Math.max(this.timeline.end, this.timeline.begin + 1) }; }
  get window() { return this.chosen ?? this.whole; }

  /** Show a window of time; null for the whole run. */
  show(window) {
    const { begin, end } = this.whole;
    if (window) {
      const length = Math.max(0.02, Math.min(window.end - window.begin, end - begin));
      const from = Math.max(begin, Math.min(window.begin, end - length));
      window = length >= (end - begin) * 0.999 ? null : { begin: from, end: from + length };
    }
    this.chosen = window;
    this.draw();
    clearTimeout(this.waiting);
    if (window && !EMBEDDED && this.timeline.width > (window.end - window.begin) / 800) this.waiting = setTimeout(() => this.look(window), 150);
  }

  /** Request the window in detail. */
  async look(window) {
    const margin = (window.end - window.begin) / 2;
    try {
      const found = await this.get({ begin: window.begin - margin, end: window.end + margin });
      this.detail = { ...found, shown: { begin: window.begin - margin, end: window.end + margin } };
      this.draw();
    } catch { /* keep the current drawing */ }
  }

  zoom(by, about) {
    if (!this.timeline?.tracks.length) return;
    const { begin, end } = this.window, at = about ?? (begin + end) / 2;
    this.show({ begin: at - (at - begin) * by, end: at + (end - at) * by });
  }

  pan(part) {
    const { begin, end } = this.window, by = part * (end - begin);
    this.show({ begin: begin + by, end: end + by });
  }

  press(event) {
    const act = { "+": () => this.zoom(0.5), "=": () => this.zoom(0.5), "-": () => this.zoom(2), 0: () => this.show(null), Escape: () => this.show(null),
      ArrowLeft: () => this.pan(-0.2), ArrowRight: () => this.pan(0.2) }[event.key];
    if (!act || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act();
    const { begin, end } = this.window;
    say(byId("said"), `from ${seconds(begin - this.whole.begin)} to ${seconds(end - this.whole.begin)}`);
  }

  timeAt(event) {
    const box = this.canvas.getBoundingClientRect(), { begin, end } = this.window;
    return begin + ((event.clientX - box.left) / box.width) * (end - begin);
  }

  move(event) {
    if (this.held && this.chosen) {
      const width = this.canvas.getBoundingClientRect().width, { begin, end } = this.held.window;
      const by = ((this.held.x - event.clientX) / width) * (end - begin);
      this.show({ begin: begin + by, end: end + by });
    } else this.point(event);
  }

  /** Describe the span or mark under the pointer. */
  point(event) {
    if (!event || !this.rows) { say(this.readout, this.hint ?? ""); return; }
    const box = this.canvas.getBoundingClientRect(), at = this.timeAt(event), y = event.clientY - box.top - AXIS;
    const row = this.rows[Math.floor(y / ROW)];
    const { begin, end } = this.window, near = ((end - begin) / box.width) * 4;
    const mark = (this.timeline.marks ?? []).find((m) => Math.abs(m.at - at) < near && (y < 0 || m.of === row?.name));
    if (mark) { say(this.readout, this.describeMark(mark)); return; }
    if (!row) { say(this.readout, seconds(at - this.whole.begin)); return; }
    const source = this.source;
    for (const track of row.lives) {
      const part = y % ROW > BAR + 2 ? "background" : "main";
      const i = found(track[part], at, part === "main");
      if (i >= 0) { say(this.readout, this.words(source, track, track[part], i)); return; }
    }
    say(this.readout, `${row.name}: not running`);
  }

  /** Return a mark as text: an event of a process, or an event of the run. */
  describeMark(mark) {
    const process = this.rows.some((row) => row.name === mark.of);
    const words = process ? `${mark.of} ${mark.what}` : [mark.what, mark.of].filter(Boolean).join(", ");
    return `${visible(words)}, at ${seconds(mark.at - this.whole.begin)}`;
  }

  words(source, track, spans, i) {
    const kind = source.kinds[spans.k[i]], cause = source.causes[spans.c[i]], by = source.bys[spans.b[i]];
    const what = kind === "idle" ? `idle${cause ? `, ${cause}${by ? ` by ${visible(by)}` : ""}` : ""}` : KIND_WORDS[kind] ?? kind;
    const of = [spans.v[i] >= 0 ? `θ${subscript(spans.v[i])}` : "", spans.s[i] >= 0 ? `step ${spans.s[i]}` : ""].filter(Boolean).join(", ");
    return `${nameOf(track)}: ${what} ${seconds(spans.d[i])}${of ? ` (${of})` : ""}, at ${seconds(spans.t[i] - this.whole.begin)}${spans.n[i] > 1 ? `; most of ${spans.n[i]} short spans` : ""}`;
  }

  /** The answer with the best resolution for the window. */
  get source() {
    const { detail, timeline, chosen } = this;
    return chosen && detail && detail.shown.begin <= chosen.begin && detail.shown.end >= Math.min(chosen.end, timeline.end) ? detail : timeline;
  }

  draw() {
    const { timeline, place } = this;
    if (!timeline) {
      if (this.failure) place.replaceChildren(empty(`The timeline is not available: ${visible(this.failure)}`));
      return;
    }
    if (timeline.tracks.length === 0) {
      place.replaceChildren(empty("No spans are recorded in the folder of this run. On Kubernetes they are in the pods of the roles, unless all pods mount a common volume claim."));
      return;
    }
    if (this.canvas.parentNode === null) place.replaceChildren(el("div", { class: "rows" }, this.names, this.canvas), this.readout, this.key);
    const source = this.source;
    this.rows = rowsOf(source);
    const width = this.canvas.clientWidth, height = AXIS + this.rows.length * ROW + 4, scale = devicePixelRatio || 1;
    if (!width) return;
    this.names.replaceChildren(...this.rows.map((row) => el("span", {}, row.name)));
    this.canvas.style.height = `${height}px`;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const palette = colours();
    this.axis(pen, width, height, palette);
    this.rows.forEach((row, n) => row.lives.forEach((track) => this.bars(pen, source, track, AXIS + n * ROW, width, palette)));
    this.marks(pen, width, height, palette);
    this.legend(source, palette);
    const { begin, end } = this.window;
    this.hint = this.chosen ? `${seconds(end - begin)} of ${seconds(this.whole.end - this.whole.begin)}; drag, or ← and →, to move`
      : "Point at a span to read it; to zoom, press + and −, double-click, or scroll with Ctrl";
    if (!this.readout.matches(":empty") && this.readout.textContent !== this.was) this.was = this.hint;
    else { this.was = this.hint; say(this.readout, this.hint); }
    this.canvas.setAttribute("aria-label", `Timeline of ${plural(this.rows.length, "process", "processes")} over ${seconds(this.whole.end - this.whole.begin)}. + and − zoom, arrow keys move. The section "Where the time goes" below has a summary as text.`);
  }

  axis(pen, width, height, palette) {
    const { begin, end } = this.window, zero = this.whole.begin, length = end - begin;
    const x = this.x = (at) => ((at - begin) / length) * width;
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const count = Math.max(2, Math.floor(width / 90));
    const at = length > 20 ? timeTicks(end - zero, count * Math.max(1, (end - zero) / length)).filter((t) => t >= begin - zero) : ticks(begin - zero, end - zero, count);
    for (const tick of at) {
      const place = x(zero + tick);
      pen.fillStyle = palette.grid;
      pen.fillRect(Math.round(place), AXIS - 4, 1, height - AXIS + 4);
      pen.fillStyle = palette.quiet;
      const words = length > 20 ? tickTime(tick) : `${Number(tick.toPrecision(6))} s`;
      const wide = pen.measureText(words).width;
      if (place + wide < width) pen.fillText(words, place + 3, AXIS / 2);
    }
  }

  bars(pen, source, track, top, width, palette) {
    const { main, background } = track, { begin, end } = this.window, x = this.x;
    for (let i = Math.max(0, found(main, begin, true)); i < main.t.length && main.t[i] < end; i++) {
      const from = Math.max(0, x(main.t[i])), to = Math.min(width, x(main.t[i] + main.d[i]));
      const kind = source.kinds[main.k[i]], idle = kind === "idle";
      pen.fillStyle = this.colour(source, main, i, palette);
      if (idle && (this.mode !== "cause" || SERVERS.includes(track.role))) pen.fillRect(from, top + BAR / 2, to - from, 2);
      else pen.fillRect(from, top + 1, Math.max(0.5, to - from - (to - from > 4 ? 0.75 : 0)), BAR);
      const number = NUMBERS[this.mode] ? main[NUMBERS[this.mode]][i] : -1;
      if (!idle && number >= 0 && to - from > 22) {
        pen.fillStyle = palette.on;
        pen.fillText(String(number), from + 3, top + 1 + BAR / 2, to - from - 4);
      }
    }
    for (let i = 0; i < background.t.length; i++) {
      const from = x(background.t[i]), to = x(background.t[i] + background.d[i]);
      if (to < 0 || from > width) continue;
      pen.fillStyle = this.colour(source, background, i, palette);
      pen.fillRect(from, top + BAR + 2.5, Math.max(1, to - from), 2.5);
    }
    if (track.killed) {
      pen.strokeStyle = palette.bad;
      pen.lineWidth = 1.5;
      const at = x(track.end), middle = top + 1 + BAR / 2;
      pen.beginPath();
      pen.moveTo(at - 4, middle - 4); pen.lineTo(at + 4, middle + 4); pen.moveTo(at + 4, middle - 4); pen.lineTo(at - 4, middle + 4);
      pen.stroke();
    }
  }

  colour(source, spans, i, palette) {
    const kind = source.kinds[spans.k[i]];
    if (kind === "idle") return this.mode === "cause" ? palette.list[CAUSE_COLOURS[source.causes[spans.c[i]]] ?? 13] : palette.list[13];
    if (this.mode === "cause") return palette.work;
    if (NUMBERS[this.mode]) {
      const number = spans[NUMBERS[this.mode]][i];
      return number >= 0 ? `hsl(${(number * 47 + 215) % 360} ${palette.tone})` : palette.list[12];
    }
    return palette.list[KIND_COLOURS[kind] ?? 2];
  }

  marks(pen, width, height, palette) {
    for (const mark of this.timeline.marks ?? []) {
      const at = this.x(mark.at);
      if (at < 0 || at > width) continue;
      pen.fillStyle = palette.mark;
      pen.globalAlpha = 0.25;
      pen.fillRect(Math.round(at), AXIS - 3, 1, height - AXIS);
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.moveTo(at - 4, AXIS - 8); pen.lineTo(at + 4, AXIS - 8); pen.lineTo(at, AXIS - 2);
      pen.fill();
    }
  }

  /** Show the meaning of the colours on the canvas. */
  legend(source) {
    const { mode } = this, used = new Set();
    for (const track of source.tracks) {
      for (const part of [track.main, track.background]) {
        part.k.forEach((k, i) => {
          const kind = source.kinds[k];
          if (mode === "cause") used.add(kind === "idle" ? source.causes[part.c[i]] || "not known" : "at work");
          else if (mode === "kind") used.add(kind);
        });
      }
    }
    const dots = mode === "cause" ? [...used].map((name) => [name === "at work" ? "work" : `c${CAUSE_COLOURS[name] ?? 13}`, name])
      : mode === "kind" ? [...used].map((name) => [`c${KIND_COLOURS[name] ?? 2}`, name]) : [];
    const order = mode === "cause" ? ["at work", ...Object.keys(CAUSE_COLOURS)] : Object.keys(KIND_COLOURS);
    dots.sort((a, b) => order.indexOf(a[1]) - order.indexOf(b[1]));
    const key = mode + JSON.stringify(dots);
    if (key === this.legendKey) return;
    this.legendKey = key;
    this.key.replaceChildren(...dots.map(([colour, name]) => entry(colour, name)),
      NUMBERS[mode] ? el("span", { class: "quiet" }, `each ${mode} has a colour of its own, and shows its number if there is room`) : "");
  }
}

/** Return the position of a role among the rows: roles of users' tasks come after the rollouts. */
const placeOf = (role) => (ORDER.includes(role) ? ORDER.indexOf(role) : 1.5);

const nameOf = (track) => `${track.role}-${track.index}${track.attempt ? `.${track.attempt}` : ""}`;

/** Return one row for each process, with the tracks of all its attempts. */
function rowsOf(timeline) {
  const rows = new Map();
  for (const track of timeline.tracks) {
    const name = `${track.role}-${track.index}`;
    if (!rows.has(name)) rows.set(name, { name, role: track.role, index: track.index, lives: [] });
    rows.get(name).lives.push(track);
  }
  return [...rows.values()].sort((a, b) => placeOf(a.role) - placeOf(b.role) || a.role.localeCompare(b.role) || a.index - b.index);
}

/** Return the index of the span at a time, -1 for none. ordered: whether the spans do not overlap. */
function found(spans, at, ordered) {
  if (!ordered) return spans.t.findIndex((t, i) => t <= at && at < t + spans.d[i]);
  let low = 0, high = spans.t.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (spans.t[middle] <= at) low = middle; else high = middle - 1;
  }
  return spans.t.length && spans.t[low] <= at && at < spans.t[low] + spans.d[low] ? low : -1;
}

/** Return the old spans before `cut` and the newer ones after it; a span that the cut divides is joined again. */
function joined(old, newer, cut) {
  const names = Object.keys(old), keep = old.t.map((t) => t < cut - 1e-6), out = {};
  for (const name of names) out[name] = old[name].filter((_, i) => keep[i]);
  const last = out.t.length - 1;
  if (last >= 0) out.d[last] = Math.min(out.d[last], cut - out.t[last]);
  let from = 0;
  if (last >= 0 && newer.t.length && newer.t[0] <= cut + 1e-6 && ["k", "v", "s", "c", "b"].every((name) => newer[name][0] === out[name][last])) {
    out.d[last] += newer.d[0];
    from = 1;
  }
  for (const name of names) out[name].push(...newer[name].slice(from));
  return out;
}

/** Return the colours of the style sheet, for the canvas. */
function colours() {
  const style = getComputedStyle(document.documentElement), get = (name) => style.getPropertyValue(name).trim();
  return { list: Array.from({ length: 15 }, (_, i) => get(`--c${i}`)), grid: get("--grid"), quiet: get("--quiet"), bad: get("--bad"),
    mark: get("--mark"), work: get("--work"), on: get("--on"), tone: get("--tone") };
}
