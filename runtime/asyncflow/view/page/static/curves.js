// Curves over steps or time: one card for each chart, a crosshair shared by all charts, and values in the legend.

const EDGE = { left: 46, right: 10, top: 8, bottom: 20 };
const HEIGHT = 150;

/** Return about `count` round values between low and high. */
function ticks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999) ?? rough;
  const found = [];
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) found.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return found;
}

/** Return ticks of a time axis at whole seconds, minutes or hours. */
function timeTicks(high, count) {
  const steps = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800];
  const step = steps.find((s) => high / s <= count) ?? Math.ceil(high / count / 86400) * 86400;
  return Array.from({ length: Math.floor(high / step) + 1 }, (_, i) => i * step);
}

function tickTime(value) {
  if (value === 0) return "0";
  if (value % 86400 === 0) return `${value / 86400} d`;
  if (value % 3600 === 0) return `${value / 3600} h`;
  return value % 60 === 0 ? `${value / 60} min` : value < 60 ? `${value} s` : `${Math.floor(value / 60)}:${String(value % 60).padStart(2, "0")}`;
}

/** Return a path through points; for many points on one pixel, through the lowest and the highest of them. */
function through(xs, ys, x, y) {
  let path = "", open = false, column = -1, low = 0, high = 0, last = 0;
  const flush = () => {
    if (column >= 0 && high !== low) path += `V${y(low).toFixed(1)}V${y(high).toFixed(1)}V${y(last).toFixed(1)}`;
  };
  for (let i = 0; i < xs.length; i++) {
    const value = ys[i];
    if (!Number.isFinite(value)) { flush(); open = false; column = -1; continue; }
    const at = x(xs[i]), pixel = Math.round(at);
    if (open && pixel === column) {
      low = Math.min(low, value); high = Math.max(high, value); last = value;
      continue;
    }
    flush();
    path += `${open ? "L" : "M"}${at.toFixed(1)},${y(value).toFixed(1)}`;
    open = true; column = pixel; low = high = last = value;
  }
  flush();
  return path;
}

/** Return moving averages over the last `width` values, for noisy curves. */
function smoothed(ys, width) {
  const out = [];
  let sum = 0, count = 0;
  for (let i = 0; i < ys.length; i++) {
    if (Number.isFinite(ys[i])) { sum += ys[i]; count++; }
    if (i >= width && Number.isFinite(ys[i - width])) { sum -= ys[i - width]; count--; }
    out.push(count ? sum / count : NaN);
  }
  return out;
}

class Chart {
  /** board: the board of all charts, with the run, the chosen axis and the position of the crosshair. */
  constructor(board, chart) {
    this.board = board;
    this.legend = el("div", { class: "legend" });
    this.drawing = svg("svg", { class: "curve", height: HEIGHT, tabindex: "0", role: "img" });
    this.card = el("figure", { class: chart.wide ? "card chart wide" : "card chart" },
      el("figcaption", {}, el("h3", { title: chart.means }, visible(chart.title)), this.legend), this.drawing);
    this.drawing.addEventListener("pointermove", (event) => this.point(event));
    this.drawing.addEventListener("pointerleave", () => board.aim(null));
    this.drawing.addEventListener("keydown", (event) => this.key(event));
    this.drawing.addEventListener("blur", () => board.aim(null));
    this.update(chart);
  }

  update(chart) {
    const { run, over } = this.board;
    this.chart = chart;
    const xOf = over === "time" ? (line) => line.at - run.began : (line) => line.step;
    this.series = [
      ...chart.lines.map(([name, get, colour]) => ({ name, colour, of: run.lines, get, dots: false })),
      ...(chart.points ?? []).map(([name, get, colour]) => ({ name, colour, of: run.evaluations, get, dots: true })),
    ].map((s) => {
      const lines = s.dots ? s.of.filter((line) => Number.isFinite(s.get(line))) : s.of;
      return { ...s, steps: lines.map((line) => line.step), xs: lines.map(xOf), ys: lines.map((line) => s.get(line) ?? NaN) };
    });
    this.entries = this.series.map((s) => {
      const value = el("b", {});
      return [entry(`c${s.colour}`, `${visible(s.name)} `, value), value];
    });
    this.legend.replaceChildren(...this.entries.map(([shown]) => shown));
    this.draw();
  }

  draw() {
    const width = Math.max(160, this.drawing.clientWidth || this.card.clientWidth - 24 || 300);
    const { board, chart, series } = this;
    const tops = chart.stacked ? stack(series) : series.map((s) => s.ys);
    const values = tops.flat().filter(Number.isFinite);
    let low = chart.zero ? Math.min(0, ...extent(values)) : extent(values)[0], high = extent(values)[1];
    if (!(high > low)) { high = low + (Math.abs(low) || 1); low = chart.zero ? Math.min(0, low) : low - (Math.abs(low) || 1); }
    const x = this.x = (value) => EDGE.left + ((value - board.low) / (board.high - board.low || 1)) * (width - EDGE.left - EDGE.right);
    const y = this.y = (value) => HEIGHT - EDGE.bottom - ((value - low) / (high - low)) * (HEIGHT - EDGE.top - EDGE.bottom);
    const grid = svg("g", { class: "grid" });
    for (const at of ticks(low, high, 3)) {
      grid.append(svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(at), y2: y(at) }),
        svg("text", { x: EDGE.left - 6, y: y(at) + 3.5, "text-anchor": "end" }, axisLabel(at, chart.unit)));
    }
    const room = Math.max(2, Math.floor(width / 90));
    for (const at of board.over === "time" ? timeTicks(board.high, room) : ticks(board.low, board.high, room).filter(Number.isInteger)) {
      grid.append(svg("text", { x: x(at), y: HEIGHT - 5, "text-anchor": at === board.low ? "start" : x(at) > width - 24 ? "end" : "middle" },
        board.over === "time" ? tickTime(at) : grouped.format(at)));
    }
    const marks = svg("g", {});
    series.forEach((s, i) => {
      if (s.xs.length === 0) return;
      if (chart.stacked) {
        const under = i ? tops[i - 1] : s.ys.map(() => 0);
        const back = through([...s.xs].reverse(), [...under].reverse(), x, y).replace("M", "L");
        marks.append(svg("path", { class: `area f${s.colour}`, d: `${through(s.xs, tops[i], x, y)}${back}Z` }));
        return;
      }
      const noisy = !s.dots && s.ys.length >= 24;
      marks.append(svg("path", { class: `line s${s.colour}${noisy ? " faint" : ""}`, d: through(s.xs, s.ys, x, y) }));
      if (noisy) marks.append(svg("path", { class: `line s${s.colour}`, d: through(s.xs, smoothed(s.ys, Math.ceil(s.ys.length / 24)), x, y) }));
      if (s.dots && s.xs.length < width / 8) for (let n = 0; n < s.xs.length; n++) marks.append(svg("circle", { class: `f${s.colour}`, cx: x(s.xs[n]), cy: y(s.ys[n]), r: 2.6 }));
      if (!s.dots && s.xs.length === 1) marks.append(svg("circle", { class: `f${s.colour}`, cx: x(s.xs[0]), cy: y(s.ys[0]), r: 2.6 }));
    });
    this.cross = svg("g", { class: "cross" });
    this.drawing.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.drawing.replaceChildren(grid, marks, this.cross);
    this.aim(board.aimed);
    const last = series.map((s) => `${s.name} ${measured(s.ys.findLast(Number.isFinite), chart.unit)}`).join(", ");
    this.drawing.setAttribute("aria-label", `${chart.title}: ${last}. Arrow keys move through the steps.`);
  }

  /** Show the values at a step in the legend; without a step, the last values. */
  aim(step) {
    const { chart, series } = this;
    this.cross?.replaceChildren();
    let where = null;
    const tops = chart.stacked ? stack(series) : null;
    series.forEach((s, i) => {
      const n = step === null ? s.ys.findLastIndex(Number.isFinite) : nearest(s.steps, step);
      say(this.entries[i][1], n < 0 ? ABSENT : measured(s.ys[n], chart.unit));
      if (step === null || n < 0 || !Number.isFinite(s.ys[n])) return;
      where ??= this.x(s.xs[n]);
      this.cross.append(svg("circle", { class: `f${s.colour}`, cx: this.x(s.xs[n]), cy: this.y(tops ? tops[i][n] : s.ys[n]), r: 3.4 }));
    });
    if (where !== null) this.cross.prepend(svg("line", { x1: where, x2: where, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
  }

  point(event) {
    const box = this.drawing.getBoundingClientRect();
    const part = (event.clientX - box.left - EDGE.left) / (box.width - EDGE.left - EDGE.right);
    this.board.aim(this.board.stepAt(part));
  }

  key(event) {
    const { board } = this;
    const move = { ArrowRight: 1, ArrowLeft: -1, PageUp: 10, PageDown: -10, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") board.aim(null);
    if (move === undefined) return;
    event.preventDefault();
    board.move(move);
    say(byId("said"), `step ${board.aimed}: ${this.entries.map(([shown]) => shown.textContent).join(", ")}`);
  }
}

const extent = (values) => values.reduce(([low, high], v) => [Math.min(low, v), Math.max(high, v)], values.length ? [Infinity, -Infinity] : [0, 1]);

function stack(series) {
  const sums = [];
  return series.map((s) => s.ys.map((value, n) => (sums[n] = (sums[n] ?? 0) + (value || 0))));
}

function axisLabel(value, unit) {
  if (unit === "share") return `${Number((100 * value).toPrecision(3))} %`;
  if (unit === "s") return value === 0 ? "0" : value < 1 ? `${Number((1000 * value).toPrecision(3))} ms` : value < 120 ? `${Number(value.toPrecision(3))} s` : `${Number((value / 60).toPrecision(3))} min`;
  const size = Math.abs(value);
  if (size >= 1e9) return `${Number((value / 1e9).toPrecision(3))} G`;
  if (size >= 1e6) return `${Number((value / 1e6).toPrecision(3))} M`;
  if (size >= 1e4) return `${Number((value / 1e3).toPrecision(3))} k`;
  return size !== 0 && size < 1e-3 ? value.toExponential(0).replace("e-", "e−") : String(Number(value.toPrecision(3)));
}

/** Return the index of the nearest step in an ascending list; -1 for an empty one. */
function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  if (high < 0) return -1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle + 1; else high = middle;
  }
  return low > 0 && step - steps[low - 1] <= steps[low] - step ? low - 1 : low;
}

/** All charts of the run, with the selection of charts, the axis, and the position of the crosshair. */
class Board {
  constructor(run) {
    this.run = run;
    this.over = "step";
    this.aimed = null;
    this.charts = new Map();
    this.picked = remembered("charts") ?? {};
    new ResizeObserver(() => this.redraw()).observe(byId("curves"));
    for (const input of document.querySelectorAll("input[name=over]")) {
      input.addEventListener("change", () => { this.over = input.value; this.update(); });
    }
    byId("figures").addEventListener("toggle", () => this.table());
  }

  update() {
    const { run } = this;
    const steps = [...run.lines.map((l) => l.step), ...run.evaluations.map((e) => e.step)];
    this.low = 0;
    this.high = this.over === "time" ? Math.max(1, run.seen - run.began) : Math.max(1, extent(steps)[1]);
    const all = chartsOf(run);
    const shown = all.filter((chart) => this.picked[chart.id] ?? (chart.shown && !chart.idle));
    const place = byId("curves");
    if (all.length === 0) {
      place.replaceChildren(empty("There are no figures yet: the first ones appear after the first step or evaluation."));
      this.charts.clear();
      return;
    }
    for (const id of [...this.charts.keys()]) if (!shown.some((chart) => chart.id === id)) this.charts.delete(id);
    const cards = shown.map((chart) => {
      const known = this.charts.get(chart.id);
      if (known) { known.update(chart); return known.card; }
      const made = new Chart(this, chart);
      this.charts.set(chart.id, made);
      return made.card;
    });
    if (cards.length !== place.children.length || cards.some((card, i) => place.children[i] !== card)) {
      place.replaceChildren(...cards);
      this.redraw();
    }
    this.pick(all, shown);
    say(byId("thinned"), run.every > 1 ? `long run: one of every ${run.every} steps is drawn` : "");
    this.table();
  }

  redraw() {
    for (const chart of this.charts.values()) chart.draw();
  }

  /** Update the checkboxes of the charts; existing ones are kept, so the keyboard focus is kept, too. */
  pick(all, shown) {
    const key = JSON.stringify(all.map((chart) => [chart.id, chart.idle]));
    if (key !== this.pickerKey) {
      this.pickerKey = key;
      this.boxes = new Map(all.map((chart) => [chart.id, el("input", { type: "checkbox", onChange: (event) => {
        this.picked[chart.id] = event.target.checked;
        remember("charts", this.picked);
        this.update();
      } })]));
      byId("picker").replaceChildren(...all.map((chart) => el("label", {}, this.boxes.get(chart.id), visible(chart.title),
        chart.idle ? el("span", { class: "quiet" }, " all 0") : null)));
    }
    for (const chart of all) this.boxes.get(chart.id).checked = shown.includes(chart);
  }

  aim(step) {
    if (step === this.aimed) return;
    this.aimed = step;
    for (const chart of this.charts.values()) chart.aim(step);
  }

  /** Return the step at a relative position of the axis, from 0 to 1. */
  stepAt(part) {
    const { run } = this, at = this.low + Math.max(0, Math.min(1, part)) * (this.high - this.low);
    const xs = this.over === "time" ? run.lines.map((l) => l.at - run.began) : run.lines.map((l) => l.step);
    const found = nearest(xs, at);
    if (found < 0) return null;
    return at < run.lines[0].step / 2 && this.over === "step" ? 0 : run.lines[found].step;
  }

  move(by) {
    const steps = this.run.lines.map((l) => l.step);
    if (steps.length === 0) return;
    const now = this.aimed === null ? steps.length : nearest(steps, this.aimed);
    this.aim(steps[Math.max(0, Math.min(steps.length - 1, now + by))]);
  }

  /** Show the newest steps as a table, for exact numbers and for screen readers. */
  table() {
    const { run } = this;
    if (!byId("figures").open) return;
    const names = [...new Set(run.lines.slice(-100).flatMap(Object.keys))].filter((name) => !["at", "started", "ended"].includes(name));
    const ordered = ["step", ...names.filter((name) => name !== "step")];
    byId("figures").querySelector(".scroll").replaceChildren(el("table", {},
      el("caption", { class: "visually-hidden" }, "Figures of the newest 100 steps, the newest first"),
      el("thead", {}, el("tr", {}, ...ordered.map((name) => el("th", { scope: "col" }, visible(name))))),
      el("tbody", {}, ...run.lines.slice(-100).reverse().map((line) => el("tr", {}, ...ordered.map((name) => el("td", {}, number(line[name]))))))));
  }
}

/** Return a choice of the user that is stored in the browser, if storage is allowed. */
function remembered(name) {
  try { return JSON.parse(localStorage.getItem(`asyncflow ${name}`)); } catch { return null; }
}

function remember(name, value) {
  try { localStorage.setItem(`asyncflow ${name}`, JSON.stringify(value)); } catch { /* without storage, the user must choose again */ }
}
