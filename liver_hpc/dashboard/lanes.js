// ---- nodes

const NODE_ROW = 26;

function drawNodes() {
  byId("nodes-section").hidden = !told.nodes.length;
  const bottom = 8 + NODE_ROW * told.nodes.length;
  const svg = drawing(byId("nodes"), bottom + 40);
  const high = Math.max(told.run.last, told.run.ended ? 0 : now(), 1e-3);
  const x = scale(0, high, NAME_END, RIGHT);
  timeAxis(svg, x, 0, high, 4, bottom);
  told.nodes.forEach((node, row) => {
    const y = 8 + NODE_ROW * row;
    add(svg, "text", { x: NAME_END - 8, y: y + 13, class: "end ink" }, cut(node.name, 20));
    const end = (until) => (until === null && told.run.ended ? told.run.last : spanEnd(until));
    for (const [at, until] of node.held)
      bar(svg, x, at, end(until), y, 18, "strip-2", `${node.name} is held (${node.allocation})`);
    for (const [at, until, , workers] of node.used) {
      const words = `${workers} ${workers === 1 ? "worker" : "workers"}`;
      const width = bar(svg, x, at, end(until), y + 3, 12, "green", `${words} on ${node.name}`);
      const place = { x: x(at) + 6, y: y + 13, class: "on-bar" };
      if (width > 7 * words.length + 12) add(svg, "text", place, words);
    }
    for (const [at, until, deadline, , reason] of node.warned) {
      const last = Math.min(deadline ?? end(until), end(until));
      bar(svg, x, at, last, y + 18, 3, "orange", `to be left: ${reason}`);
      const tip = add(svg, "path", { d: triangle(x(at), y), class: "red" });
      add(tip, "title", {}, `${node.name} is to be left: ${reason}`);
    }
  });
  const kinds = [["strip-2", "held"], ["green", "workers train there"]];
  if (told.nodes.some((node) => node.warned.length)) kinds.push(["red", "to be left"]);
  legend(svg, NAME_END, bottom + 26, kinds);
}

const triangle = (x, y) => `M${x - 5} ${y - 3}h10l-5 9z`;

// ---- one handoff: its phases, and a lane for every worker

const PHASES = ["BOOT", "PREPARE", "BOUNDARY", "TRANSFER", "COMMIT", "RELEASE"];
const BESIDE = { boot: ["gray", "boot"], prepare: ["orange", "prepare, alone"] };
BESIDE.connect = ["light-orange", "connect, with the others"];
const CROSSING = { transfer: ["blue", "parameters"] };
CROSSING["first step"] = ["green", "first step, optimizer state arriving"];
CROSSING.update = ["red", "update"];
CROSSING.release = ["light-purple", "old world freed"];
const LANE = 24;

function phaseItems(handoff, isLive) {
  const reached = new Map(handoff.phases.map((phase) => [phase[0], phase]));
  const names = reached.has("ABORT") ? [...PHASES, "ABORT"] : PHASES;
  return names.map((name) => {
    const item = document.createElement("li");
    const phase = reached.get(name);
    item.textContent = name;
    if (!phase) return item;
    const [, at, end] = phase;
    item.className = end === null ? (name === "ABORT" ? "off" : "now") : "done";
    item.textContent += ` ${durationText(Math.max(0, spanEnd(end) - at))}`;
    if (isLive && name === "COMMIT" && end === null)
      item.textContent += `, ${handoff.votes.join(" of ")} votes`;
    return item;
  });
}

function drawLanes(place, handoff, isLive) {
  const [lanes, panels] = [handoff.lanes, lanePanels(handoff, isLive)];
  if (!panels.length) return place.replaceChildren();
  const bottom = 22 + LANE * lanes.length;
  const svg = drawing(place, bottom + 48);
  lanes.forEach((lane, row) => {
    const words = `worker ${lane.worker}${lane.role ? ` ${lane.role}` : ""}`;
    const name = lane.node ? `${words} \u00b7 ${lane.node}` : words;
    add(svg, "text", { x: NAME_END - 8, y: 37 + LANE * row, class: "end ink" }, cut(name, 22));
  });
  for (const panel of panels) {
    const x = scale(panel.low, panel.high, panel.from, panel.to);
    const title = `${panel.title}: ${durationText(panel.high - panel.low)}`;
    add(svg, "text", { x: panel.from, y: 12, class: "strong" }, title);
    for (const at of niceTicks(panel.low - panel.zero, panel.high - panel.zero, 6)) {
      const place = x(at + panel.zero);
      add(svg, "path", { d: `M${place} 18V${bottom}`, class: "grid" });
      tick(svg, place, bottom + 14, `${+at.toPrecision(3)} s`);
    }
    lanes.forEach((lane, row) => drawLane(svg, x, panel, lane, 22 + LANE * row, isLive));
  }
  const kinds = panels.flatMap((panel) => Object.values(panel.styles));
  legend(svg, NAME_END, bottom + 30, kinds);
}

// Beside training on one scale, the crossing on a finer one: seconds from the boundary, or from
// where the attempt began.
function lanePanels(handoff, isLive) {
  const spans = handoff.lanes.flatMap((lane) => lane.phases).filter((span) => span[1] !== null);
  const of = (styles) => spans.filter(([name]) => name in styles);
  const starts = [...of(BESIDE).map((span) => span[1]), ...handoff.phases.map((span) => span[1])];
  const low = Math.min(...starts, isLive ? now() : Infinity);
  if (!Number.isFinite(low)) return []; // it was called off before anything had begun
  const crossing = of(CROSSING);
  const known = handoff.phases.map((span) => span[2]).concat(of(BESIDE).map((span) => span[2]));
  const last = isLive ? now() : Math.max(...known.filter((end) => end !== null), low);
  const beside = { title: "beside training", styles: BESIDE, low, from: NAME_END };
  const boundary = handoff.boundary;
  if (!crossing.length || boundary === null)
    return [{ ...beside, zero: low, high: Math.max(last, low + 1e-3), to: RIGHT }];
  const first = Math.min(...crossing.map((span) => span[1]));
  const ends = (isRelease) => crossing.filter(([name]) => (name === "release") === isRelease)
    .map((span) => span[2] ?? (isLive ? now() : first));
  const end = Math.max(...ends(false), boundary);
  const spare = 0.02 * (end - first) || 1e-3;
  const released = Math.max(...ends(true), end);
  const high = Math.min(released, end + 0.25 * (end - first)) + spare;
  const right = { title: "the crossing", styles: CROSSING, low: first - 3 * spare, high };
  return [
    { ...beside, zero: boundary, high: Math.max(boundary, low + 1e-3), to: 545 },
    { ...right, zero: boundary, from: 575, to: RIGHT },
  ];
}

function drawLane(svg, x, panel, lane, y, isLive) {
  const within = (at) => Math.max(panel.low, Math.min(at, panel.high));
  const idle = (from, until, kind) => {
    if (within(until) > within(from))
      bar(svg, x, within(from), within(until), y + 9, 3, kind === "trains" ? "green" : "soft",
        `worker ${lane.worker} ${kind} ${durationText(until - from)}`);
  };
  const shown = lane.phases.filter(([name, at]) => name in panel.styles && at !== null);
  const isBeside = panel.styles === BESIDE;
  if (isBeside && lane.role !== "joins") idle(panel.low, panel.high, "trains");
  if (!isBeside && shown.length)
    idle(panel.low, shown[0][1], lane.role === "joins" ? "waits" : "trains");
  shown.forEach(([name, at, end], index) => {
    const until = end ?? (isLive ? now() : panel.high);
    const next = index + 1 < shown.length ? shown[index + 1][1] : isBeside ? panel.high : null;
    const waits = !isBeside || lane.role === "joins";
    if (end !== null && next !== null && waits) idle(end, next, "waits");
    if (name === "update" && end !== null) idle(end, panel.high, "trains");
    if (within(until) <= within(at) && until > at) return;
    const [kind, title] = panel.styles[name];
    const never = end === null && !isLive;
    const took = never ? "never ended" : durationText(Math.max(0, until - at));
    const words = `worker ${lane.worker}, ${title}: ${took}`;
    bar(svg, x, within(at), within(until), y + 3, 15, never ? `${kind} open` : kind, words);
  });
}
