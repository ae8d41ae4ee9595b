// The state of the run, built from the answers in order, and the charts for its figures.

const OVER = ["Succeeded", "Failed", "Suspended"];

class Run {
  constructor() {
    this.forget();
    this.job = {};
    this.status = null;
    this.summary = null;
    this.texts = true;
    this.kept = { train: [], eval: [] };
    this.depths = [];
  }

  forget() {
    this.lines = [];
    this.events = [];
    this.evaluations = [];
    this.every = 1;
  }

  /** Add an answer of /v1/page/changes. Return whether figures or events have changed. */
  take(answer) {
    if (answer.anew) this.forget();
    const names = Object.keys(answer.steps);
    const count = names.length ? answer.steps.step.length : 0;
    for (let row = 0; row < count; row++) {
      const line = {};
      for (const name of names) {
        if (answer.steps[name][row] !== null) line[name] = answer.steps[name][row];
      }
      // A trainer that resumed from a checkpoint repeats steps: the later line counts.
      while (this.lines.length && this.lines.at(-1).step >= line.step) this.lines.pop();
      this.lines.push(line);
    }
    for (const event of answer.events) {
      this.events.push(event);
      if (event.event === "step made again") this.evaluations = this.evaluations.filter((e) => e.step < event.step);
      if (event.event === "evaluation") {
        this.evaluations = this.evaluations.filter((e) => e.step !== event.step);
        this.evaluations.push(event);
        this.evaluations.sort((a, b) => a.step - b.step);
      }
    }
    this.every = Math.max(this.every, answer.every);
    this.job = answer.job;
    this.summary = answer.summary;
    this.status = answer.status ?? null;
    this.texts = answer.texts;
    this.kept = answer.samples ?? this.kept;
    this.read = answer.now;
    if (this.status) this.depths = [...this.depths.slice(-599), { at: answer.now, ...this.status.queue }];
    return answer.anew || count > 0 || answer.events.length > 0;
  }

  get last() { return this.lines.at(-1) ?? {}; }
  get began() { return this.events[0]?.at ?? this.lines[0]?.at ?? 0; }
  get seen() { return Math.max(this.events.at(-1)?.at ?? 0, this.lines.at(-1)?.at ?? 0); }
  get steps() { return this.status?.steps || this.job.steps || this.last.step || 0; }
  get step() { return this.status?.step ?? this.last.step ?? 0; }

  /** How the run ended, "" if it is active or its end is unknown. */
  get end() {
    if (this.status) return OVER.includes(this.status.phase) ? this.status.phase : "";
    const last = this.events.findLast((e) => e.event === "driver started" || OVER.includes(e.event));
    return last && OVER.includes(last.event) ? last.event : "";
  }

  /** Return the time at which a step was done, in seconds after the start of the run. */
  timeOf(step) {
    const line = this.lines.find((l) => l.step >= step);
    return (step === 0 ? this.evaluations[0]?.at ?? this.began : line?.at ?? this.seen) - this.began;
  }
}

const share = (part, whole) => (part === undefined || !whole ? undefined : part / whole);
const field = (name) => (line) => line[name];

/** The charts. lines: figures of steps; points: figures of evaluations; shown: whether it is shown unless the user chose. */
const CHARTS = [
  { id: "reward", title: "Reward and evaluation", wide: true, shown: true, zero: true,
    lines: [["reward", field("reward"), 0]],
    points: [["accuracy, held out", field("accuracy"), 1], ["greedy", field("greedy"), 2]],
    means: "mean reward of a step's samples; share of correct held-out answers, sampled and greedy" },
  { id: "components", title: "Components of the reward", shown: true, components: true, lines: [],
    means: "means over a step's samples" },
  { id: "passes", title: "pass@k, held out", shown: true, passes: true, lines: [], points: [], unit: "share",
    means: "share of held-out prompts with at least one correct answer of k" },
  { id: "loss", title: "Loss", shown: true, lines: [["loss", field("loss"), 0]], means: "policy loss" },
  { id: "entropy", title: "Entropy", shown: true, zero: true, unit: "nat",
    lines: [["entropy", field("entropy"), 0], ["surprise", field("surprise"), 3]],
    means: "mean entropy, and mean negative log-prob of a trained token" },
  { id: "kl", title: "KL divergence", shown: true, zero: true, unit: "nat",
    lines: [["from the reference", field("kl"), 0], ["from the sampler", field("approx_kl"), 1]],
    means: "divergence of the trainer's weights from the reference, and from the weights that sampled" },
  { id: "clip", title: "Clipped tokens", shown: true, zero: true, unit: "share",
    lines: [["above", field("clip_high"), 0], ["below", field("clip_low"), 1], ["dual", field("clip_dual"), 3]],
    means: "share of tokens whose ratio was clipped" },
  { id: "grad", title: "Gradient norm", shown: true, zero: true, lines: [["norm", field("grad_norm"), 0]],
    means: "gradient norm before clipping" },
  { id: "gap", title: "Log-prob gap", shown: true, zero: true, unit: "nat",
    lines: [["mean", field("logprob_gap"), 0], ["99th percentile", field("logprob_gap_p99"), 1]],
    means: "difference between the engine's and the trainer's log-probs under the same weights" },
  { id: "staleness", title: "Staleness", shown: true, zero: true, unit: "versions",
    lines: [["oldest token", field("staleness_start_max"), 1], ["newest", field("staleness_end_max"), 2],
      ["mean", field("staleness_token_mean"), 0]],
    means: "versions between the weights that made a sample and the weights that it trains" },
  { id: "seconds", title: "Time of a step", shown: true, zero: true, stacked: true, unit: "s",
    lines: [["wait for samples", field("wait_s"), 4], ["compute", field("compute_s"), 2],
      ["optimizer", field("optimizer_s"), 0], ["publication", field("publish_s"), 3], ["checkpoint", field("checkpoint_s"), 1]],
    means: "the trainer's seconds by activity, stacked" },
  { id: "speed", title: "Tokens trained", shown: true, zero: true, unit: "tokens/s",
    lines: [["per second", (l) => share(l.tokens, l.wall_s), 0]], means: "tokens of prompts and responses, divided by the time of a step" },
  { id: "length", title: "Response length", shown: true, zero: true, unit: "tokens",
    lines: [["mean", (l) => share(l.response_tokens, l.samples), 0]], means: "tokens of a response" },
  { id: "silent", title: "Samples with advantage 0", zero: true, unit: "share",
    lines: [["share", (l) => share(l.silent_samples, l.samples), 0]], means: "samples that give no policy gradient" },
  { id: "ratio", title: "Ratio to the old policy",
    lines: [["mean", field("ratio"), 0], ["largest", field("ratio_max"), 1]],
    means: "probability of a token under the trainer's weights, divided by its probability under the old policy" },
  { id: "rate", title: "Learning rate", zero: true,
    lines: [["policy", field("learning_rate"), 0], ["critic", field("critic_learning_rate"), 1]], means: "" },
  { id: "correction", title: "Importance weights", zero: true,
    lines: [["effective share", field("correction_ess"), 0], ["mean", field("correction_mean"), 2],
      ["largest", field("correction_max"), 1]],
    means: "importance weights of samples that another policy than the old one made" },
  { id: "critic", title: "Critic", lines: [["value loss", field("value_loss"), 0],
    ["explained variance", field("explained_variance"), 2]], means: "" },
  { id: "pairs", title: "Pairs", lines: [["accuracy", field("pair_accuracy"), 0], ["margin", field("pair_margin"), 1]],
    means: "accuracy and margin over pairs of chosen and rejected samples" },
];

const KNOWN = ["at", "started", "ended", "attempt", "ranks", "step", "samples", "tokens", "wall_s", "busy_s", "skipped",
  "reward", "entropy", "surprise", "kl", "approx_kl", "loss"];

/** Return the charts for which the run has figures, including figures that are specific to its backend. */
function chartsOf(run) {
  const first = run.lines[0] ?? {}, last = run.last;
  const drawn = CHARTS.map((chart) => filled(chart, run)).filter((chart) => chart !== null);
  const used = CHARTS.flatMap((chart) => chart.lines.map((line) => String(line[1](new Proxy({}, { get: (_, name) => name })))));
  const others = Object.keys({ ...first, ...last })
    .filter((name) => !KNOWN.includes(name) && !used.includes(name) && !name.startsWith("component "))
    .map((name) => ({ id: `own ${name}`, title: name, lines: [[name, field(name), 0]], means: "", own: true }));
  return [...drawn, ...others];
}

/** Return a chart with the lines for which the run has figures; null if it has none. */
function filled(chart, run) {
  const exists = (get, of) => of.some((line) => Number.isFinite(get(line)));
  let { lines, points = [] } = chart;
  if (chart.components) {
    const names = [...new Set(run.lines.flatMap((l) => Object.keys(l).filter((n) => n.startsWith("component "))))];
    lines = names.map((name, i) => [name.slice(10), field(name), i % 6]);
  }
  if (chart.passes) {
    const ks = [...new Set(run.evaluations.flatMap((e) => Object.keys(e.pass_at ?? {})))];
    points = ks.map((k, i) => [`pass@${k}`, (e) => e.pass_at?.[k], i % 6]);
  }
  if (chart.id === "reward") {
    const sets = [...new Set(run.evaluations.flatMap((e) => Object.keys(e.sets ?? {})))];
    points = [...points, ...sets.map((name, i) => [name, (e) => e.sets?.[name]?.accuracy, (3 + i) % 6])];
  }
  lines = lines.filter(([, get]) => exists(get, run.lines));
  points = points.filter(([, get]) => exists(get, run.evaluations));
  const zeros = lines.length > 0 && points.length === 0 && lines.every(([, get]) => run.lines.every((l) => !get(l)));
  return lines.length || points.length ? { ...chart, lines, points, idle: zeros } : null;
}
