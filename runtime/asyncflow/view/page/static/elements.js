// Elements and texts. Every text reaches the page as a text node, so text of a run is never interpreted as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** Create an element. attributes: `on` + Event adds a listener, null omits the attribute; children: elements or texts. */
function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2).toLowerCase(), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

/** Set a text only if it differs, so that screen readers announce only changes. */
function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

/** Return a text with its control characters escaped, including those that change the text direction. */
function visible(text) {
  return String(text).replace(CONTROL, (c) => {
    const code = c.charCodeAt(0);
    return code < 256 ? `\\x${code.toString(16).padStart(2, "0")}` : `\\u${code.toString(16).padStart(4, "0")}`;
  });
}

const ABSENT = "–";
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** Format a number with about four digits. */
function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${(value / 1e9).toPrecision(3)} G`;
  if (size >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (Number.isInteger(value) || size >= 1000) return grouped.format(value);
  if (size < 1e-3) return value.toExponential(1).replace("e-", " · 10⁻").replace(/\d+$/, superscript);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : size >= 1 ? value.toFixed(2) : value.toFixed(3);
}

const superscript = (digits) => [...digits].map((digit) => "⁰¹²³⁴⁵⁶⁷⁸⁹"[digit]).join("");

/** Format seconds: `85 ms`, `3.2 s`, `4 min 05 s`, `2 h 13 min`. */
function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  if (value === 0) return "0 s";
  if (Math.abs(value) < 0.0995) return `${(value * 1000).toPrecision(2).replace(/\.0$/, "")} ms`;
  if (Math.abs(value) < 9.95) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${String(whole % 60).padStart(2, "0")} s`;
  const minutes = Math.round(whole / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

function bytes(value) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024]]) {
    if (value >= size) return `${(value / size).toPrecision(3)} ${unit}`;
  }
  return `${value} B`;
}

const percent = (share) => (share === null || share === undefined || !Number.isFinite(share) ? ABSENT
  : share > 0 && share < 0.0005 ? "< 0.1 %" : `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)} %`);

/** Format a value with its unit; a share is shown in percent. */
function measured(value, unit = "") {
  if (unit === "share") return percent(value);
  if (unit === "s") return seconds(value);
  if (value === null || value === undefined || !Number.isFinite(value)) return ABSENT;
  return unit ? `${number(value)} ${value === 1 ? unit.replace(/s$/, "") : unit}` : number(value);
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

/** Replace the children of an element; null children are omitted. */
const put = (element, ...children) => element.replaceChildren(...children.filter((child) => child !== null));

/** Replace non-interactive children; unchanged nodes are kept, so selections and scroll positions are kept, too. */
function refresh(element, ...children) {
  const fresh = element.cloneNode(false);
  fresh.append(...children);
  patch(element, fresh);
}

function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, i) => (i < before.length ? patch(before[i], child) : old.append(child)));
  for (const child of before.slice(after.length)) child.remove();
}

/** Return the placeholder for an empty section; the text gives the reason. */
const empty = (...words) => el("p", { class: "empty" }, ...words);

/** Return a horizontal bar for a share between 0 and 1. */
function meter(share, kind = "") {
  const drawn = svg("svg", { class: `meter ${kind}`, viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" });
  drawn.append(svg("rect", { class: "all", width: 100, height: 8 }),
    svg("rect", { class: "part", width: Math.max(0, Math.min(100, 100 * share)), height: 8 }));
  return drawn;
}

/** Return a legend entry: a colour and its meaning. */
const entry = (colour, ...words) => el("span", { class: "entry" }, el("i", { class: `dot ${colour}` }), ...words);

/** Return a group of buttons with one selected, as a fieldset of radio buttons, for keyboard use. */
function choice(name, legend, options, chosen, changed) {
  const made = el("fieldset", { class: "choice" }, el("legend", {}, legend));
  for (const [value, words] of options) {
    const input = el("input", { type: "radio", name, value, checked: value === chosen, onChange: () => changed(value) });
    made.append(el("label", {}, input, el("span", {}, words)));
  }
  return made;
}
