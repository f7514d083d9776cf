"""A lane for every worker of a handoff: what it did when, and whom the others waited for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from liver_hpc.report.page.series import Handoff
from liver_hpc.report.page.svg import (
    WIDTH,
    Scale,
    add,
    bar,
    drawing,
    fitting,
    label,
    text_width,
    time_axis,
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


@dataclass(frozen=True)
class Panel:
    """A part of the drawing with its own time: `names` of the phases that it shows."""

    title: str
    names: tuple[str, ...]
    time: Scale

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
        lanes = sorted(lanes, key=_last_end_s, reverse=True)[:MOST_WORKERS]
    return sorted(lanes, key=lambda lane: lane.worker)


def _last_end_s(lane: Lane) -> float:
    """Of what it did but the release."""
    ends_s = [phase.ended_s for phase in lane.phases if phase.phase != "release"]
    return max(filter(math.isfinite, ends_s), default=-math.inf)


def draw(handoff: Handoff, lanes: Sequence[Lane]) -> Element:
    """Beside training on one scale, the crossing on a finer one."""
    names = [fitting(_name(lane, lanes), WIDTH / 4) for lane in lanes]
    left = max(map(text_width, names)) + 12
    panels = _panels(handoff, lanes, left)
    told = ", ".join(f"{panel.title} {duration_text(panel.span_s)}" for panel in panels)
    svg = drawing(
        HEAD + ROW * len(lanes) + AXIS,
        f"Workers in handoff {handoff.figures.generation}",
        f"{len(lanes)} lanes; {told}",
    )
    for index, name in enumerate(names):
        label(svg, left - 12, _middle(index) + 4, name, "axis", "end")
    for panel in panels:
        _panel(svg, panel, lanes)
    return svg


def _middle(index: int) -> float:
    """Of a lane, from the top."""
    return HEAD + ROW * (index + 0.5)


def _panels(handoff: Handoff, lanes: Sequence[Lane], left: float) -> list[Panel]:
    record = handoff.figures
    crossing_s = [p.started_s for lane in lanes for p in lane.phases if p.phase in CROSSING]
    begin_s, boundary_s, end_s = bounds(handoff, lanes)
    room = WIDTH - left - 8
    right = left + (0.46 * room - GAP / 2 if crossing_s else room)
    beside = Panel("beside training", BESIDE, Scale(begin_s, boundary_s, left, right))
    if not crossing_s:
        return [beside]
    low_s = min(crossing_s)
    spare_s = 0.02 * (end_s - low_s) or 1e-3
    released_s = record.released_s if math.isfinite(record.released_s) else end_s
    high_s = min(released_s, end_s + 0.25 * (end_s - low_s)) + spare_s
    time = Scale(low_s - 3 * spare_s, high_s, right + GAP, WIDTH - 8)
    return [beside, Panel("the crossing", CROSSING, time)]


def bounds(handoff: Handoff, lanes: Sequence[Lane]) -> tuple[float, float, float]:
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


def _panel(svg: Element, panel: Panel, lanes: Sequence[Lane]) -> None:
    time = panel.time
    words = f"{panel.title}: {number_text(panel.span_s)} s"
    label(svg, time.start, HEAD - 14, words, "name")
    time_axis(svg, time, HEAD - 4, HEAD + ROW * len(lanes) + 4, 5)
    for index, lane in enumerate(lanes):
        y = _middle(index)
        for begin_s, end_s, kind in _idle(lane, panel):
            if end_s > begin_s:
                title = f"worker {lane.worker} {kind} {number_text(end_s - begin_s)} s"
                x, end = time(begin_s), time(end_s)
                add(svg, "line", kind.rstrip("s"), title, x1=x, x2=end, y1=y, y2=y)
        for phase in lane.phases:
            if phase.phase in panel.names and phase.started_s < time.high:
                _phase(svg, time, y, phase)
    _last_ones(svg, panel, lanes)


def _phase(svg: Element, time: Scale, y: float, phase: WorkerPhaseRecord) -> None:
    """A phase that never ended is open at the right edge."""
    ended = math.isfinite(phase.ended_s)
    end_s = phase.ended_s if ended else time.high
    took = f"{number_text(phase.ended_s - phase.started_s)} s" if ended else "never ended"
    classes = f"phase {phase.phase.replace(' ', '-')}{'' if ended else ' open'}"
    title = f"worker {phase.worker}, {phase.phase}: {took}"
    bar(svg, classes, time, (phase.started_s, end_s), (y - BAR / 2, BAR), title)


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
        y = _middle(index)
        x = panel.time(end_s) + 2
        title = f"worker {lanes[index].worker} was the last, {number_text(end_s - first_s)} s"
        mark = add(svg, "path", "last", f"{title} after the first ({name})")
        mark.set("d", f"M{x:.2f} {y:.2f}l7 -5v10z")


def _name(lane: Lane, lanes: Sequence[Lane]) -> str:
    role = "" if lane.role == "stays" else f" {lane.role}"
    nodes = {each.node for each in lanes if each.node}
    node = f" \u00b7 {lane.node}" if len(nodes) > 1 else ""
    return f"worker {lane.worker}{role}{node}"


def _ids(text: str) -> set[int]:
    return {int(part) for part in text.split(",") if part.strip().isdecimal()}
