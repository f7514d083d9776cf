// ---- loss and tokens per second

const [LOSS_TOP, LOSS_END, RATE_TOP, RATE_END, STRIP_END] = [28, 226, 242, 372, 398];
const BANDS = { BOOT: "gray", PREPARE: "orange", BOUNDARY: "orange", TRANSFER: "ink" };
Object.assign(BANDS, { COMMIT: "ink", RELEASE: "purple", ABORT: "orange" });
const NEAR = 25; // nearer marks share a badge
let curve = null; // the chart as the cursor wants it

function drawCurve() {
  const svg = drawing(byId("curve"), STRIP_END + 24);
  const points = told.points;
  const low = points.length ? points[0][0] : 0;
  const reached = told.handoff ? now() : 0;
  const high = Math.max(points.length ? points.at(-1)[1] : told.run.last, reached, low + 1e-3);
  const x = scale(low, high, LEFT, RIGHT);
  curve = { svg, left: LEFT, right: RIGHT, low, high };
  timeAxis(svg, x, low, high, LOSS_TOP, STRIP_END);
  for (const [at, end, words, kind] of bands()) {
    const [from, until] = [Math.max(at, low), Math.max(end ?? now(), low)];
    for (const [top, bottom] of [[LOSS_TOP, LOSS_END], [RATE_TOP, RATE_END]])
      bar(svg, x, from, until, top, bottom - top, `band ${kind}`, words);
  }
  const losses = points.flatMap((p) => [p[4], p[5]]).concat(told.evaluations.map((e) => e[2]));
  const known = losses.filter((value) => typeof value === "number");
  const [least, most] = [Math.min(...known, Infinity), Math.max(...known, -Infinity)];
  if (known.length) {
    const spare = 0.05 * (most - least) || 0.1;
    const y = scale(least - spare, most + spare, LOSS_END, LOSS_TOP);
    valueAxis(svg, y, least - spare, most + spare, "loss", "blue");
    add(svg, "path", { d: lossPath(points, x, y), class: "curve blue" });
    const dots = told.evaluations.filter((e) => typeof e[2] === "number");
    const line = dots.map(([at, , loss], i) => `${i ? "L" : "M"}${x(at)} ${y(loss)}`).join("");
    if (line) add(svg, "path", { d: line, class: "curve green" });
    for (const [at, step, loss] of dots) {
      const dot = add(svg, "circle", { cx: x(at), cy: y(loss), r: 2.5, class: "green" });
      add(dot, "title", {}, `validation loss ${loss.toFixed(4)} after ${step} steps`);
    }
  } else {
    add(svg, "text", { x: LEFT + 8, y: LOSS_TOP + 18 }, "No step was recorded yet.");
  }
  for (const point of points.filter((p) => !p[7]))
    bar(svg, x, point[0], point[1], LOSS_TOP, 6, "bad", `step ${point[2]}: not finite`);
  const top = 1.05 * Math.max(...points.map((p) => p[6] || 0), 1);
  const y = scale(0, top, RATE_END, RATE_TOP);
  valueAxis(svg, y, 0, top, "tokens/s", "red");
  add(svg, "path", { d: ratePath(points, x, y), class: "curve red" });
  drawWorlds(svg, x, low, high);
  drawMarks(svg, x, low);
}

function lossPath(points, x, y) {
  let path = "";
  let pen = "M";
  for (const [began, ended, , , first, second] of points) {
    if (first === null) {
      pen = "M";
      continue;
    }
    if (first !== second) {
      path += `${pen}${x((began + ended) / 2)} ${y(first)}`;
      pen = "L";
    }
    path += `${pen}${x(ended)} ${y(second)}`;
    pen = "L";
  }
  return path;
}

// The ends of steps of constant rate: each step's area is its tokens.
function ratePath(points, x, y) {
  let path = "";
  let end = -Infinity;
  for (const [began, ended, , , , , rate] of points) {
    if (rate === null) continue;
    path += `${began > end + 0.002 ? "M" : "L"}${x(began)} ${y(rate)}H${x(ended)}`;
    end = ended;
  }
  return path;
}

function bands() {
  return [...told.marks, told.handoff].filter(Boolean).flatMap(({ generation, phases }) =>
    phases.map(([name, at, end]) => {
      const words = `handoff ${generation}, ${name}: ${durationText(spanEnd(end) - at)}`;
      return [at, end, words, BANDS[name]];
    }));
}

function drawWorlds(svg, x, low, high) {
  told.worlds.forEach(([generation, layout, workers, at, end], index) => {
    const [from, until] = [Math.max(at, low), Math.min(end ?? high, high)];
    if (until <= from) return;
    const words = `generation ${generation}: ${layout}, ${workers} workers`;
    const kind = index % 2 ? "strip-2" : "strip";
    const width = bar(svg, x, from, until, RATE_END + 6, STRIP_END - RATE_END - 6, kind, words);
    const middle = { x: x((from + until) / 2), y: STRIP_END - 6, class: "mid ink" };
    if (width > 7 * layout.length) add(svg, "text", middle, layout);
  });
}

function drawMarks(svg, x, low) {
  const groups = [];
  for (const mark of told.marks.filter((each) => each.at !== null)) {
    const at = x(Math.max(mark.at, low));
    const kind = mark.completed ? "mark" : "mark off";
    add(svg, "path", { d: `M${at} ${LOSS_TOP}V${RATE_END}`, class: kind });
    const last = groups.at(-1);
    if (last && at - last.at < NEAR) last.marks.push(mark);
    else groups.push({ at, marks: [mark] });
  }
  for (const { at, marks } of groups) {
    const [first, last] = [marks[0].generation, marks.at(-1).generation];
    const words = first === last ? String(first) : `${first}\u2013${last}`;
    const off = marks.every((mark) => mark.completed) ? "" : " off";
    const width = 10 + 7 * words.length;
    const box = { x: at - width / 2, y: 5, width, height: 17, rx: off ? 2 : 8.5 };
    add(svg, "rect", { ...box, class: `badge${off}` });
    add(svg, "text", { x: at, y: 17.5, class: `badge-text${off}` }, words);
  }
}

const rowOf = ([, ended, step, generation, , loss, rate]) =>
  [ended, step, generation, loss?.toFixed(4), rate === null ? null : numberText(rate)];
showSteps(byId("curve"), () => ({ ...curve, rows: told.points.map(rowOf) }));
