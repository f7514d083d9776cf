// ---- the handoff that is in progress, or else the last one; and those before

function drawHandoff() {
  const [live, last] = [told.handoff, told.handoffs[0]];
  byId("handoff").hidden = !live && !last;
  byId("handoff").classList.toggle("live", Boolean(live));
  byId("handoff-title").textContent = live ? "Handoff in progress" : "The last handoff";
  const handoff = live || last;
  if (!handoff) return;
  if (live) liveLine(live);
  else byId("handoff-line").innerHTML = last.line;
  byId("handoff-facts").textContent = live ? liveFacts(live) : last.facts;
  byId("handoff-phases").replaceChildren(...phaseItems(handoff, Boolean(live)));
  drawLanes(byId("lanes"), handoff, Boolean(live));
}

function liveLine(live) {
  const line = document.createElement("div");
  const words = { number: String(live.generation), "": `${live.source} \u2192 ${live.target}` };
  for (const [kind, text] of Object.entries({ ...words, cost: live.notice })) {
    const element = document.createElement(kind ? "span" : "h3");
    if (kind) element.className = kind;
    element.textContent = text;
    line.append(element);
  }
  byId("handoff-line").replaceChildren(line);
}

function liveFacts(live) {
  const [done, total] = live.bytes;
  const facts = [total ? `${bytesText(done)} of ${bytesText(total)} in place` : "nothing moved yet"];
  if (live.waits) facts.push(`waits for workers ${live.waits}`);
  return facts.join(" \u00b7 ");
}

const drawnHandoffs = new Map();

function drawEarlier() {
  const earlier = told.handoffs.slice(told.handoff ? 0 : 1);
  byId("handoffs-section").hidden = !earlier.length;
  const elements = earlier.map((handoff) => {
    const words = JSON.stringify(handoff);
    const before = drawnHandoffs.get(handoff.generation);
    if (before?.words === words) return before.details;
    const details = document.createElement("details");
    details.open = before?.details.open ?? false;
    const summary = document.createElement("summary");
    summary.innerHTML = handoff.line;
    const [facts, phases] = ["p", "ol"].map((tag) => document.createElement(tag));
    facts.className = "note";
    facts.textContent = handoff.facts;
    phases.className = "phases";
    phases.replaceChildren(...phaseItems(handoff, false));
    const lanes = document.createElement("div");
    lanes.className = "scroll";
    details.append(summary, facts, phases, lanes);
    drawLanes(lanes, handoff, false);
    drawnHandoffs.set(handoff.generation, { words, details });
    return details;
  });
  byId("handoffs").replaceChildren(...elements);
}

// ---- the rest

const STATES = { training: "training", finished: "training", "handing over": "handing" };
Object.assign(STATES, { recovering: "bad", failed: "bad" });

function drawHead() {
  const run = told.run;
  document.title = `${run.name || "run"}: ${run.state}`;
  byId("name").textContent = run.name || "run";
  byId("state").textContent = isConnected ? run.state : "the dashboard does not answer";
  byId("state").className = `state ${isConnected ? STATES[run.state] || "" : "bad"}`;
  byId("heard").textContent = [
    run.host,
    run.read < 1 ? `reading its journal: ${Math.round(100 * run.read)} %` : "",
    run.ended ? run.reason : `last heard of ${durationText(Math.max(0, now() - run.last))} ago`,
  ].filter(Boolean).join(" \u00b7 ");
  byId("problem").textContent = told.problem || "";
}

function drawTerms(place, terms) {
  place.replaceChildren(...terms.map(([name, meaning]) => {
    const [pair, term, words] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
    [term.textContent, words.textContent] = [name, meaning];
    pair.append(term, words);
    return pair;
  }));
}

const DRAWN = {
  facts: () => drawTerms(byId("facts"), Object.entries(told.facts)),
  verdict: () => { byId("verdict").innerHTML = told.verdict; },
  tables: () => { byId("tables").innerHTML = told.tables; },
  notes: () => drawTerms(byId("notes"),
    told.notes.map(([at, text]) => [durationText(at), text]).reverse()),
};

function draw(changed) {
  drawHead();
  for (const name of changed.filter((each) => each in DRAWN)) DRAWN[name]();
  const has = (...names) => changed.some((each) => names.includes(each));
  const moves = Boolean(told.handoff);
  if (moves || has("curve", "evaluations", "worlds", "marks", "handoff")) drawCurve();
  if (moves || has("nodes", "curve", "run")) drawNodes();
  if (moves || has("handoff", "handoffs")) drawHandoff();
  if (has("handoff", "handoffs")) drawEarlier();
}

// ---- what is told

Object.assign(told, { marks: [], handoffs: [], evaluations: [], worlds: [], nodes: [] });

function take(event) {
  const news = JSON.parse(event.data);
  isConnected = true;
  clockOffset = news.now - performance.now() / 1000;
  if (news.curve) told.points.splice(news.curve.from, Infinity, ...news.curve.points);
  delete news.now;
  const changed = Object.keys(news);
  delete news.curve;
  Object.assign(told, news);
  if (told.run) draw(changed);
}

const stream = new EventSource(`events${location.search}`);
stream.onmessage = take;
stream.onerror = () => {
  isConnected = false;
  if (told.run) drawHead();
};
setInterval(() => told.handoff && draw([]), 200);
setInterval(() => told.run && drawHead(), 1000);
