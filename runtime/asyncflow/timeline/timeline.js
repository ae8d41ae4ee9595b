// Draws a timeline, as asyncflow.timeline.gantt.drawing gives it (its docstring states the shape of the data):
//   const view = drawTimeline(canvas, data)   view.update(data) shows newer data, following its end while that is shown;
//                                             view.show(from, to) in seconds; view.colour("version" | "step")
//   legendOf(element, data), tableOfShares(element, data) fill an element beneath it.
// Wheel: zoom; drag: pan; double click: everything; arrows, + and -: the same by keyboard. Nothing is loaded.
"use strict";

const COLOURS = {
  starting: "#d9d9d9", swap: "#6a3d9a", receive: "#b28fd0", stage: "#8d5fb8", claim: "#c9c9c9", fetch: "#9ecae1",
  forward: "", backward: "", compute: "", generate: "", prefill: "", optimizer: "#253858", publish: "#e6550d",
  reward: "#f2c14e", evaluation: "#74c476", checkpoint: "#8c6d31", dispatch: "#9ecae1", advantage: "#fdae6b",
};
const CAUSES = {
  starved: "#d62728", tail: "#ff7f0e", sync: "#9467bd", "back-pressure": "#8c564b", reward: "#bcbd22",
  "data plane": "#1f77b4", evaluation: "#2ca02c", starting: "#7f7f7f", lost: "#000000", "": "#aaaaaa",
};
const ROW = 30, LANE = 5, HEAD = 34, NAME = 96;

function versionColour(number, light) {
  if (number < 0) return "#bdbdbd";
  return `hsl(${Math.round((205 + number * 137.508) % 360)} 62% ${light}%)`;
}

function seconds(value) {
  return value >= 100 ? `${value.toFixed(0)} s` : value >= 1 ? `${value.toFixed(2)} s` : `${(1000 * value).toFixed(1)} ms`;
}

function drawTimeline(canvas, given) {
  let data = given, by = "version", from = 0, to = 1, hover = null, waiting = false, drag = null;
  const pen = canvas.getContext("2d"), hatches = new Map();
  const tip = document.createElement("div");
  tip.style.cssText = "position:fixed;pointer-events:none;display:none;max-width:26rem;padding:4px 8px;font:12px sans-serif;"
    + "background:#222;color:#fff;border-radius:4px;z-index:10;white-space:pre-line";
  document.body.append(tip);
  canvas.tabIndex = 0;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", "Timeline: one row for each process");
  canvas.style.touchAction = "pan-y";

  function extent() {
    let low = data.begin, high = data.end;
    for (const row of data.rows) {
      if (row.main.length) {
        low = Math.min(low, row.main[0] * data.unit);
        high = Math.max(high, row.main[row.main.length - 5] * data.unit);
      }
    }
    return [low, high];
  }

  function everything() { const pad = (data.end - data.begin) * 0.01 || 0.01; show(data.begin - pad, data.end + pad); }

  function show(low, high) {
    const [first, last] = extent(), span = Math.min(Math.max(high - low, 0.002), (last - first) * 1.1 + 0.01);
    from = Math.max(first - span * 0.05, Math.min(low, last + span * 0.05 - span));
    to = from + span;
    request();
  }

  function hatch(cause) {
    if (!hatches.has(cause)) {
      const tile = document.createElement("canvas"), ink = tile.getContext("2d");
      tile.width = tile.height = 8;
      ink.fillStyle = "#f7f7f7";
      ink.fillRect(0, 0, 8, 8);
      ink.strokeStyle = CAUSES[cause] || CAUSES[""];
      ink.lineWidth = 1.6;
      ink.beginPath();
      for (const shift of [-8, 0, 8]) { ink.moveTo(shift, 8); ink.lineTo(shift + 8, 0); }
      ink.stroke();
      hatches.set(cause, pen.createPattern(tile, "repeat"));
    }
    return hatches.get(cause);
  }

  function paint(kind, step, version, why) {
    if (kind === "idle") return hatch(data.whys[why][0]);
    const fixed = COLOURS[kind];
    if (fixed) return fixed;
    const light = kind === "backward" ? 42 : kind === "forward" ? 62 : kind === "prefill" ? 40 : 52;
    return versionColour(by === "step" ? step : version, light);
  }

  const x = (time) => NAME + (time - from) / (to - from) * (canvas.clientWidth - NAME);
  const timeAt = (place) => from + (place - NAME) / (canvas.clientWidth - NAME) * (to - from);
  const top = (row) => HEAD + row * ROW;

  function firstEnding(spans, time) {
    let low = 0, high = spans.length / 6;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (spans[6 * middle + 1] * data.unit < time) low = middle + 1; else high = middle;
    }
    return low;
  }

  function draw() {
    waiting = false;
    const ratio = window.devicePixelRatio || 1, width = canvas.clientWidth;
    const height = HEAD + data.rows.length * ROW + 6;
    canvas.style.height = `${height}px`;
    if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
    }
    const ink = getComputedStyle(canvas).color;
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    axis(ink, width, height);
    pen.save();
    pen.beginPath();
    pen.rect(NAME, 0, width - NAME, height);
    pen.clip();
    data.rows.forEach(drawRow);
    for (const mark of data.marks) drawMark(mark, height);
    pen.restore();
    pen.font = "12px sans-serif";
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillStyle = ink;
    data.rows.forEach((row, index) => pen.fillText(row.name, NAME - 8, top(index) + 11, NAME - 10));
  }

  function axis(ink, width, height) {
    const room = (to - from) / Math.max(2, (width - NAME) / 90);
    const power = 10 ** Math.floor(Math.log10(room));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= room);
    pen.font = "11px sans-serif";
    pen.textAlign = "center";
    pen.textBaseline = "alphabetic";
    for (let told = Math.ceil((from - data.begin) / step) * step; told <= to - data.begin; told += step) {
      const place = x(told + data.begin);
      if (place < NAME) continue;
      pen.fillStyle = "#8883";
      pen.fillRect(Math.round(place), HEAD - 6, 1, height);
      pen.fillStyle = ink;
      pen.fillText(`${+told.toFixed(6)} s`, place, HEAD - 22);
    }
  }

  function drawRow(row, index) {
    const spans = row.main, y = top(index), tall = ROW - LANE - 5;
    let painted = -1;
    for (let at = firstEnding(spans, from); 6 * at < spans.length; at++) {
      const left = spans[6 * at] * data.unit;
      if (left > to) break;
      const begin = Math.max(x(left), NAME), end = x(spans[6 * at + 1] * data.unit);
      if (end - begin < 1 && Math.floor(begin) === painted) continue;
      painted = Math.floor(begin);
      pen.fillStyle = paint(data.kinds[spans[6 * at + 2]], spans[6 * at + 3], spans[6 * at + 4], spans[6 * at + 5]);
      pen.fillRect(begin, y, Math.max(end - begin, 1), tall);
    }
    for (let at = 0; at < row.beside.length; at += 6) {
      const left = row.beside[at] * data.unit, right = row.beside[at + 1] * data.unit;
      if (right < from || left > to) continue;
      pen.fillStyle = paint(data.kinds[row.beside[at + 2]], row.beside[at + 3], row.beside[at + 4], row.beside[at + 5]);
      pen.fillRect(x(left), y + tall + 1, Math.max(x(right) - x(left), 1), LANE);
    }
  }

  function drawMark(mark, height) {
    const place = x(mark.at), row = data.rows.findIndex((each) => each.name === mark.of);
    if (place < NAME) return;
    const bad = mark.what === "killed", many = row < 0;
    pen.strokeStyle = pen.fillStyle = bad ? "#d00000" : many ? "#2ca02c" : "#0050d0";
    pen.lineWidth = 1;
    pen.setLineDash(many ? [4, 3] : []);
    pen.beginPath();
    pen.moveTo(place, many ? HEAD - 10 : top(row));
    pen.lineTo(place, many ? height : top(row) + ROW - 4);
    pen.stroke();
    pen.setLineDash([]);
    const y = many ? HEAD - 12 : top(row) + 10;
    pen.beginPath();
    if (bad) {
      pen.lineWidth = 3;
      pen.moveTo(place - 5, y - 5); pen.lineTo(place + 5, y + 5);
      pen.moveTo(place + 5, y - 5); pen.lineTo(place - 5, y + 5);
      pen.stroke();
    } else {
      pen.moveTo(place - 4, y - 5); pen.lineTo(place + 4, y - 5); pen.lineTo(place, y + 2);
      pen.fill();
    }
  }

  function words(left, right) {
    const time = timeAt(left), index = Math.floor((right - HEAD) / ROW), row = data.rows[index];
    const near = data.marks.filter((mark) => Math.abs(x(mark.at) - left) < 5
      && (!row || mark.of === row.name || !data.rows.some((each) => each.name === mark.of)));
    const lines = near.map((mark) => `${mark.what} ${mark.of} at ${(mark.at - data.begin).toFixed(2)} s`);
    if (row && left > NAME) {
      const low = (right - HEAD) % ROW > ROW - LANE - 5, spans = low ? row.beside : row.main;
      for (let at = low ? 0 : firstEnding(spans, time); 6 * at < spans.length; at++) {
        const begin = spans[6 * at] * data.unit, end = spans[6 * at + 1] * data.unit;
        if (!low && begin > time) break;
        if (begin > time || end < time) continue;
        const kind = data.kinds[spans[6 * at + 2]], [cause, who, waits] = data.whys[spans[6 * at + 5]];
        const what = kind === "idle" ? `idle: ${cause || "?"}${who ? ` by ${who}` : ""}` : kind;
        const of = (spans[6 * at + 3] >= 0 ? `, step ${spans[6 * at + 3]}` : "")
          + (spans[6 * at + 4] >= 0 ? `, θ${spans[6 * at + 4]}` : "");
        lines.unshift(`${row.name}: ${what}${of}\n${seconds(end - begin)} from ${(begin - data.begin).toFixed(3)} s`
          + (kind === "idle" && waits ? `, waits for ${waits}` : ""));
        if (!low) break;
      }
    }
    return lines.join("\n");
  }

  function request() { if (!waiting) { waiting = true; requestAnimationFrame(draw); } }

  function zoom(factor, place) {
    const time = timeAt(Math.max(place, NAME));
    show(time - (time - from) * factor, time + (to - time) * factor);
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = event.deltaX / canvas.clientWidth * (to - from);
      show(from + shift, to + shift);
    } else {
      zoom(Math.exp(event.deltaY * 0.002), event.offsetX);
    }
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    drag = { place: event.clientX, from, to };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (drag) {
      const shift = (drag.place - event.clientX) / (canvas.clientWidth - NAME) * (drag.to - drag.from);
      show(drag.from + shift, drag.to + shift);
    }
    const told = words(event.offsetX, event.offsetY);
    tip.textContent = told;
    tip.style.display = told ? "block" : "none";
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - 280)}px`;
    tip.style.top = `${event.clientY + 14}px`;
  });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { drag = null; });
  canvas.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  canvas.addEventListener("dblclick", everything);
  canvas.addEventListener("keydown", (event) => {
    const shift = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key], factor = { "+": 0.7, "-": 1.4 }[event.key];
    if (shift) show(from + shift * (to - from), to + shift * (to - from));
    if (factor) zoom(factor, (canvas.clientWidth + NAME) / 2);
    if (event.key === "Home") everything();
    if (shift || factor || event.key === "Home") event.preventDefault();
  });
  new ResizeObserver(request).observe(canvas);
  everything();

  return {
    show,
    words,
    colour(what) { by = what; request(); },
    update(newer) {
      const end = data.end, all = from <= data.begin && to >= end, width = to - from;
      data = newer;
      if (all) everything(); else if (to >= end) show(data.end + width * 0.01 - width, data.end + width * 0.01); else request();
    },
    get range() { return [from, to]; },
  };
}

function legendOf(element, data) {
  const kinds = new Set(), causes = new Set();
  for (const row of data.rows) {
    for (const spans of [row.main, row.beside]) {
      for (let at = 0; at < spans.length; at += 6) {
        const kind = data.kinds[spans[at + 2]];
        if (kind === "idle") causes.add(data.whys[spans[at + 5]][0]); else kinds.add(kind);
      }
    }
  }
  element.replaceChildren();
  const add = (text, background) => {
    const item = document.createElement("span"), swatch = document.createElement("i");
    swatch.style.cssText = `display:inline-block;width:1.6em;height:.9em;margin-right:.4em;background:${background}`;
    item.style.cssText = "display:inline-block;margin-right:1.2em;white-space:nowrap";
    item.append(swatch, text);
    element.append(item);
  };
  const many = `linear-gradient(90deg, ${[0, 1, 2, 3].map((number) => versionColour(number, 52)).join(",")})`;
  for (const kind of Object.keys(COLOURS)) if (kinds.has(kind)) add(kind, COLOURS[kind] || many);
  for (const cause of Object.keys(CAUSES)) {
    if (causes.has(cause)) {
      add(`idle: ${cause || "?"}`, `repeating-linear-gradient(135deg,#f7f7f7 0 3px,${CAUSES[cause]} 3px 5px)`);
    }
  }
}

function tableOfShares(element, data) {
  const table = document.createElement("table"), head = table.createTHead().insertRow();
  const kinds = data.kinds.filter((kind) => data.shares.some((share) => share.kinds[kind] > 0));
  const causes = Object.keys(CAUSES).filter((cause) => data.shares.some((share) => share.idle[cause]));
  for (const title of ["process", "seconds", ...kinds, ...causes.map((cause) => `idle: ${cause || "?"}`)]) {
    const cell = document.createElement("th");
    cell.textContent = title;
    head.append(cell);
  }
  const body = table.createTBody();
  for (const share of data.shares) {
    const row = body.insertRow();
    row.insertCell().textContent = share.name;
    row.insertCell().textContent = share.seconds.toFixed(1);
    const put = (spent, title) => {
      const cell = row.insertCell();
      cell.textContent = spent ? `${(100 * spent / share.seconds).toFixed(1)} %` : "";
      cell.title = title;
    };
    for (const kind of kinds) put(share.kinds[kind] || 0, kind);
    for (const cause of causes) {
      const whose = Object.entries(share.idle[cause] || {}).sort((one, other) => other[1] - one[1]);
      const spent = whose.reduce((sum, [, value]) => sum + value, 0);
      put(spent, whose.map(([who, value]) => `${who || "nobody named"}: ${seconds(value)}`).join("\n"));
    }
  }
  element.replaceChildren(table);
}
