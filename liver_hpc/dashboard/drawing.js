// The page of a run that goes on. One stream of events tells each part of `told` anew when it has
// changed, and of the curve the points from an index on. Times are seconds since the run began.

const told = { points: [] };
let clockOffset = 0;
let isConnected = false;
const byId = (id) => document.getElementById(id);
const now = () => clockOffset + performance.now() / 1000;
const spanEnd = (end) => end ?? now();

// ---- words

// `0:15`, `4:05` (minutes) or `1:02:03` (hours).
function clockText(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor(seconds / 60) % 60];
  const [padded, rest] = [minutes, Math.floor(seconds) % 60].map((n) => String(n).padStart(2, "0"));
  return hours ? `${hours}:${padded}:${rest}` : `${minutes}:${rest}`;
}

function durationText(seconds) {
  if (seconds < 9.95) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  return seconds < 59.5 ? `${Math.round(seconds)} s` : clockText(Math.round(seconds));
}

function bytesText(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  while (count >= 1024 && units.length > 1) {
    count /= 1024;
    units.shift();
  }
  return `${units[0] === "B" ? count : count.toFixed(1)} ${units[0]}`;
}

const numberText = (value) =>
  Math.abs(value) >= 10000 ? `${+(value / 1000).toPrecision(3)}k` : String(+value.toPrecision(4));

// A text of so many characters at the most.
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}\u2026` : text);

// ---- drawing

const [WIDTH, LEFT, RIGHT] = [1040, 62, 1030];
const NAME_END = 150; // of the names of rows
const SVG = "http://www.w3.org/2000/svg";

function add(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

function drawing(place, height) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", place.getAttribute("aria-label") || "Workers in the handoff");
  place.replaceChildren(svg);
  return svg;
}

// From value to place; both ends of either.
const scale = (low, high, from, to) => (value) =>
  from + ((value - low) / (high - low || 1)) * (to - from);

function bar(svg, x, from, until, y, height, kind, words) {
  const [left, right] = [x(from), x(until)];
  const box = { x: left, y, width: Math.max(right - left, 1), height, class: kind };
  add(add(svg, "rect", box), "title", {}, words);
  return right - left;
}

function niceTicks(low, high, most) {
  const rough = (high - low || 1) / most;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((each) => each * power >= rough) * power;
  const ticks = [];
  for (let at = Math.ceil(low / step); at * step <= high; at++) ticks.push(at * step);
  return ticks;
}

// Under its place; what would be cut off at the right, a little before it.
function tick(svg, x, y, words) {
  add(svg, "text", { x: Math.min(x, WIDTH - 4 - 3.6 * words.length), y, class: "mid" }, words);
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200];

function timeAxis(svg, x, low, high, top, bottom) {
  const day = 86400 * Math.ceil((high - low) / 864000);
  const step = TIME_STEPS.find((each) => high - low <= 10 * each) || day;
  for (let at = Math.ceil(low / step) * step; at <= high; at += step) {
    add(svg, "path", { d: `M${x(at)} ${top}V${bottom}`, class: "grid" });
    tick(svg, x(at), bottom + 15, high < 60 ? `${+at.toPrecision(6)} s` : clockText(at));
  }
}

function valueAxis(svg, y, low, high, name, kind) {
  const [bottom, top] = [y(low), y(high)];
  for (const value of niceTicks(low, high, 5)) {
    add(svg, "path", { d: `M${LEFT} ${y(value)}H${RIGHT}`, class: "grid" });
    add(svg, "text", { x: LEFT - 6, y: y(value) + 4, class: "end" }, numberText(value));
  }
  const middle = (bottom + top) / 2;
  const turned = { transform: `rotate(-90 12 ${middle})`, x: 12, y: middle, class: `mid ${kind}` };
  add(svg, "text", turned, name);
}

function legend(svg, x, y, kinds) {
  for (const [kind, words] of kinds) {
    add(svg, "rect", { x, y, width: 12, height: 10, class: kind });
    add(svg, "text", { x: x + 17, y: y + 9 }, words);
    x += 34 + 5.7 * words.length;
  }
}
