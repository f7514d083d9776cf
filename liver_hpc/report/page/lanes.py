"""A lane for every worker of a handoff: what it did when, and whom the others waited for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.page.series import Handoff
from liver_hpc.report.page.svg import (
    Form,
    Scale,
    add,
    drawing,
    label,
    rect,
    time_text,
    time_ticks,
)
from liver_hpc.report.wording import duration_text, number_text
from liver_hpc.run.records import WorkerPhaseRecord

MOST_WORKERS = 48
ROW, BAR = 20.0, 12.0
HEAD, AXIS = 34.0, 24.0
GAP = 30.0
BESIDE = ("boot", "prepare", "connect")
CROSSING = ("transfer", "first step", "update", "release")
BARRIERS = ("connect", "transfer", "first step")
"""The phases after which everybody waits for the last."""
WAITED_SHARE = 0.04
"""A wait shorter than this part of a panel is not worth a mark."""


@dataclass(frozen=True)
class Lane:
    """One worker's part in a handoff. role: "stays", "joins" or "leaves"."""

    worker: int
    node: str
    role: str
    phases: tuple[WorkerPhaseRecord, ...]

    def last_end_s(self, names: Sequence[str]) -> float:
        ends_s = [p.ended_s for p in self.phases if p.phase in names and math.isfinite(p.ended_s)]
        return max(ends_s, default=-math.inf)


@dataclass(frozen=True)
class Panel:
    """A part of the drawing with its own time: `names` of the phases that it shows."""

    title: str
    names: tuple[str, ...]
    time: Scale
    top: float

    @property
    def span_s(self) -> float:
        return self.time.high - self.time.low


def lanes_of(handoff: Handoff, phases: Sequence[WorkerPhaseRecord]) -> list[Lane]:
    """The lanes of a handoff, by worker; of very many those that took part the longest."""
    record = handoff.figures
    source, target = _ids(record.source_workers), _ids(record.target_workers)
    own: dict[int, list[WorkerPhaseRecord]] = {}
    for phase in phases:
        if phase.generation == record.generation:
            own.setdefault(phase.worker, []).append(phase)
    lanes = []
    for worker, found in own.items():
        role = "stays" if worker in source else "joins"
        if worker in source and target and worker not in target:
            role = "leaves"
        lanes.append(Lane(worker, found[0].node, role, tuple(found)))
    if len(lanes) > MOST_WORKERS:
        lanes.sort(key=lambda lane: -lane.last_end_s((*BESIDE, *CROSSING[:3])))
        lanes = lanes[:MOST_WORKERS]
    return sorted(lanes, key=lambda lane: lane.worker)


def draw(handoff: Handoff, lanes: Sequence[Lane], form: Form) -> Element:
    """Beside training on one scale, the crossing on a finer one."""
    room = form.width * (0.4 if form.is_narrow else 0.25)
    names = [form.fitting(_name(lane, lanes), room) for lane in lanes]
    left = max(form.text_width(name) for name in names) + 12
    rows = ROW * len(lanes)
    panels = _panels(handoff, lanes, form, left)
    height = max(panel.top for panel in panels) + rows + AXIS
    title = f"Workers in handoff {handoff.number}"
    told = ", ".join(f"{panel.title} {duration_text(panel.span_s)}" for panel in panels)
    svg = drawing(form, height, title, f"{len(lanes)} lanes; {told}")
    _patterns(svg, f"{form.name}-{handoff.number}")
    for panel in {panel.top: panel for panel in panels}.values():
        for index, name in enumerate(names):
            label(svg, left - 12, panel.top + ROW * index + ROW / 2 + 4, name, "axis", "end")
    for panel in panels:
        _panel(svg, form, panel, lanes, f"{form.name}-{handoff.number}")
    return svg


def _panels(handoff: Handoff, lanes: Sequence[Lane], form: Form, left: float) -> list[Panel]:
    record = handoff.figures
    crosses = any(p.phase in CROSSING for lane in lanes for p in lane.phases)
    begin_s, boundary_s, end_s = _bounds(handoff, lanes)
    whole = form.width - left - 8
    half = whole if form.is_narrow or not crosses else 0.46 * whole - GAP / 2
    right = left + half
    beside = Panel("beside training", BESIDE, Scale(begin_s, boundary_s, left, right), HEAD)
    if not crosses:
        return [beside]
    top, start = HEAD, right + GAP
    if form.is_narrow:
        top, start = HEAD + ROW * len(lanes) + AXIS + HEAD, left
    low_s = min(p.started_s for lane in lanes for p in lane.phases if p.phase in CROSSING)
    spare_s = 0.02 * (end_s - low_s) or 1e-3
    released_s = record.released_s if math.isfinite(record.released_s) else end_s
    high_s = min(released_s, end_s + 0.25 * (end_s - low_s)) + spare_s
    time = Scale(low_s - 3 * spare_s, high_s, start, form.width - 8)
    return [beside, Panel("the crossing", CROSSING, time, top)]


def _bounds(handoff: Handoff, lanes: Sequence[Lane]) -> tuple[float, float, float]:
    """Of what is drawn: its begin, the boundary (or the end of the attempt), its end."""
    record = handoff.figures
    phases = [phase for lane in lanes for phase in lane.phases]
    starts_s = [phase.started_s for phase in phases if phase.phase in BESIDE]
    begun_s = record.boot_ended_s - record.phases.boot_s
    begin_s = min(filter(math.isfinite, [*starts_s, begun_s]), default=record.notice_s)
    ends_s = [p.ended_s for p in phases if p.phase in BESIDE and math.isfinite(p.ended_s)]
    boundary_s = record.source_last_step_ended_s
    if math.isnan(boundary_s):
        boundary_s = max(ends_s, default=begin_s + 1.0)
    crossing_s = [p.ended_s for p in phases if p.phase in CROSSING and p.phase != "release"]
    end_s = max(filter(math.isfinite, crossing_s), default=boundary_s)
    return begin_s, max(boundary_s, begin_s + 1e-3), end_s


# ---- one panel


def _panel(svg: Element, form: Form, panel: Panel, lanes: Sequence[Lane], key: str) -> None:
    time = panel.time
    bottom = panel.top + ROW * len(lanes)
    words = f"{panel.title}: {number_text(panel.span_s)} s"
    label(svg, time.start, panel.top - 14, words, "name")
    values = time_ticks(panel.span_s, 4 if form.is_narrow else 5)
    for value in values:
        x = time(time.low + value)
        add(svg, "line", "grid", x1=x, x2=x, y1=panel.top - 4, y2=bottom + 4)
        anchor = "end" if x + 20 > form.width else "middle"
        label(svg, x, bottom + 17, time_text(value, values), "axis", anchor)
    for index, lane in enumerate(lanes):
        middle = panel.top + ROW * index + ROW / 2
        for begin_s, end_s, kind in _idle(lane, panel):
            if end_s > begin_s:
                title = f"worker {lane.worker} {kind} {number_text(end_s - begin_s)} s"
                x, end = time(begin_s), time(end_s)
                add(svg, "line", kind.rstrip("s"), title, x1=x, x2=end, y1=middle, y2=middle)
        for phase in lane.phases:
            if phase.phase in panel.names and phase.started_s < time.high:
                _bar(svg, time, middle, phase, key)
    _last_ones(svg, panel, lanes)


def _bar(svg: Element, time: Scale, y: float, phase: WorkerPhaseRecord, key: str) -> None:
    """A phase that never ended is open at the right edge."""
    ended = math.isfinite(phase.ended_s)
    end_s = phase.ended_s if ended else time.high
    took = f"{number_text(phase.ended_s - phase.started_s)} s" if ended else "never ended"
    name = phase.phase.replace(" ", "-")
    x = time(phase.started_s)
    place = (x, y - BAR / 2, max(time(end_s) - x, 1.0), BAR)
    classes = f"phase {name}{'' if ended else ' open'}"
    bar = rect(svg, classes, place, f"worker {phase.worker}, {phase.phase}: {took}")
    if name in ("connect", "release"):
        bar.set("style", f"fill:url(#{name}-{key})")


def _idle(lane: Lane, panel: Panel) -> Iterator[tuple[float, float, str]]:
    """What lies between a worker's phases: it trains, or it waits for others."""
    shown = [p for p in lane.phases if p.phase in panel.names and math.isfinite(p.ended_s)]
    joins, starts_s = lane.role == "joins", [p.started_s for p in shown[1:]]
    if panel.names is BESIDE:
        if not joins:  # PREPARE is a thread beside the one that trains
            yield panel.time.low, panel.time.high, "trains"
            return
        starts_s.append(panel.time.high)
    elif shown:
        yield panel.time.low, shown[0].started_s, "waits" if joins else "trains"
        for update in (p for p in shown if p.phase == "update"):
            yield update.ended_s, panel.time.high, "trains"
    for phase, start_s in zip(shown, starts_s, strict=False):
        yield phase.ended_s, start_s, "waits"


def _last_ones(svg: Element, panel: Panel, lanes: Sequence[Lane]) -> None:
    """Points at whoever the others waited for."""
    for name in set(BARRIERS) & set(panel.names):
        ends = sorted(
            (phase.ended_s, index)
            for index, lane in enumerate(lanes)
            for phase in lane.phases
            if phase.phase == name and math.isfinite(phase.ended_s)
        )
        took = [late - early for (early, _), (late, _) in pairwise(ends)]
        if not took or sum(took) < WAITED_SHARE * panel.span_s:
            continue
        (end_s, index), (first_s, _) = ends[-1], ends[0]
        y = panel.top + ROW * index + ROW / 2
        x = panel.time(end_s) + 2
        title = f"worker {lanes[index].worker} was the last, {number_text(end_s - first_s)} s"
        mark = add(svg, "path", "last", f"{title} after the first ({name})")
        mark.set("d", f"M{x:.2f} {y:.2f}l7 -5v10z")


# ---- words and patterns


def _name(lane: Lane, lanes: Sequence[Lane]) -> str:
    role = "" if lane.role == "stays" else f" {lane.role}"
    nodes = {each.node for each in lanes if each.node}
    node = f" \u00b7 {lane.node}" if len(nodes) > 1 else ""
    return f"worker {lane.worker}{role}{node}"


def _patterns(svg: Element, key: str) -> None:
    """Hatches, so that the two phases of waiting and freeing are told apart without colour."""
    defs = Element("defs")
    svg.insert(0, defs)
    for name, line in (("connect", "M-1 5L5 -1M3 9L9 3"), ("release", "M0 4H8")):
        size = {"width": "8", "height": "8", "patternUnits": "userSpaceOnUse"}
        pattern = SubElement(defs, "pattern", {"id": f"{name}-{key}", **size})
        add(pattern, "rect", "ground page", width=8, height=8)
        add(pattern, "rect", f"ground {name}", width=8, height=8)
        add(pattern, "path", "hatch").set("d", line)


def _ids(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part.strip().isdecimal()}
