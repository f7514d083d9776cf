"""One handoff: a lane for every worker, what it did when and whom the others waited for; and the
bytes between the workers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.markers import CARETLEFT

from liver_hpc.layout.coordinates import ids_text
from liver_hpc.report.derive import ReconfigurationFigures
from liver_hpc.report.drawings.canvas import (
    Color,
    draw_bar,
    draw_point,
    name_rows,
    new_figure,
)
from liver_hpc.report.wording import bytes_text, layout_text, number_text
from liver_hpc.report.worlds import first_known
from liver_hpc.run.records import RunRecords, TrafficRecord, WorkerPhaseRecord

MOST_WORKERS = 48
MOST_GROUPS = 12
"""Workers of a larger handoff are put together in groups, so many a side of the table of bytes."""
ROW = 0.24  # inches
BESIDE: dict[str, dict[str, Any]] = {
    "boot": {"label": "boot", "color": Color.GRAY},
    "prepare": {"label": "prepare, alone", "color": Color.ORANGE},
    "connect": {
        "label": "connect, with the others",
        "color": Color.LIGHT_ORANGE,
        "edgecolor": Color.ORANGE,
    },
}
CROSSING: dict[str, dict[str, Any]] = {
    "transfer": {"label": "parameters", "color": Color.BLUE},
    "first step": {"label": "first step, optimizer state arriving", "color": Color.GREEN},
    "update": {"label": "update", "color": Color.RED},
    "release": {"label": "old world freed", "color": Color.LIGHT_PURPLE, "edgecolor": Color.PURPLE},
}
IDLE: dict[str, dict[str, Any]] = {
    "trains": {"color": Color.GREEN, "height": 0.1, "zorder": 0.9},
    "waits": {"color": Color.SOFT, "height": 0.06, "zorder": 0.9},
}
BARRIERS = ("connect", "transfer", "first step")
"""The phases after which everybody waits for the last."""
WAITED_SHARE = 0.04
"""A wait shorter than this part of a panel is not worth a mark."""


@dataclass(frozen=True)
class Lane:
    """One worker's part in a handoff, in seconds from the boundary."""

    name: str
    joins: bool
    phases: list[WorkerPhaseRecord]


@dataclass(frozen=True)
class Panel:
    """A part of the drawing with its own time: `styles` of the phases that it shows."""

    title: str
    styles: dict[str, dict[str, Any]]
    low_s: float
    high_s: float


def in_words(record: ReconfigurationFigures) -> str:
    """`2: tp2 dp2 to pp2 dp2, completed, lost 0.120 s`."""
    ends = f"{layout_text(record.source)} to {layout_text(record.target)}"
    lost = number_text(record.lost_s)
    return f"{record.generation}: {ends}, {record.outcome}, lost {lost} s"


def draw(record: ReconfigurationFigures, records: RunRecords) -> Figure | None:
    """Beside training on one scale, the crossing on a finer one, both in seconds from the boundary,
    or from the end of an attempt without one; below, the bytes. None where no worker's phases are
    known."""
    phases = [each for each in records.worker_phases if each.generation == record.generation]
    if not phases:
        return None
    prepared_s = _last_end_s([phase for phase in phases if phase.phase in BESIDE])
    zero_s = first_known(record.source_last_step_ended_s, prepared_s, record.notice_s)
    lanes = _lanes(record, phases, zero_s)
    panels = _panels(record, lanes, zero_s)
    moved = [each for each in records.traffic if each.generation == record.generation]
    names, table = _bytes(moved if record.completed else [])
    heights = [ROW * (len(lanes) + 2), ROW * (len(names) + 2)][: 1 + bool(names)]
    told = ", ".join(f"{each.title} {number_text(each.high_s - each.low_s)} s" for each in panels)
    figure = new_figure(
        sum(heights) + 0.4,
        f"Handoff {in_words(record)}",
        f"{len(lanes)} lanes; {told}; {bytes_text(sum(map(sum, table)))} between workers",
    )
    titles = [panel.title for panel in panels]
    rows: list[Any] = [titles, ["bytes"] * len(titles)]
    places = figure.subplot_mosaic(rows[: len(heights)], height_ratios=heights)
    for panel in panels:
        _panel(places[panel.title], panel, lanes)
    if names:
        _table(places["bytes"], names, table)
    return figure


# ---- lanes


def _lanes(
    record: ReconfigurationFigures, phases: Sequence[WorkerPhaseRecord], zero_s: float
) -> list[Lane]:
    """By worker; of very many those that took part the longest."""
    source, target = record.source_workers.split(","), record.target_workers.split(",")
    has_many_nodes = len({phase.node for phase in phases if phase.node}) > 1
    own: dict[int, list[WorkerPhaseRecord]] = {}
    for each in phases:
        began_s, ended_s = each.started_s - zero_s, each.ended_s - zero_s
        phase = replace(each, started_s=began_s, ended_s=ended_s)
        own.setdefault(phase.worker, []).append(phase)
    longest = sorted(own, key=lambda worker: _last_end_s(own[worker]), reverse=True)
    lanes = []
    for worker in sorted(longest[:MOST_WORKERS]):
        joins = str(worker) not in source
        leaves = record.target_workers and str(worker) not in target
        role = " joins" if joins else " leaves" if leaves else ""
        node = f" \u00b7 {own[worker][0].node}" if has_many_nodes else ""
        lanes.append(Lane(f"worker {worker}{role}{node}", joins, own[worker]))
    return lanes


def _last_end_s(phases: Sequence[WorkerPhaseRecord]) -> float:
    """Of all but the release."""
    ends_s = [phase.ended_s for phase in phases if phase.phase != "release"]
    return max(filter(math.isfinite, ends_s), default=-math.inf)


def _panels(record: ReconfigurationFigures, lanes: Sequence[Lane], zero_s: float) -> list[Panel]:
    phases = [phase for lane in lanes for phase in lane.phases]
    starts_s = [phase.started_s for phase in phases if phase.phase in BESIDE]
    starts_s.append(record.boot_ended_s - record.phases.boot_s - zero_s)
    begin_s = min(filter(math.isfinite, starts_s), default=-1.0)
    beside = Panel("beside training", BESIDE, begin_s, max(0.0, begin_s + 1e-3))
    crossing = [phase for phase in phases if phase.phase in CROSSING]
    if not crossing:
        return [beside]
    low_s = min(phase.started_s for phase in crossing)
    end_s = max(_last_end_s(crossing), 0.0)
    spare_s = 0.02 * (end_s - low_s) or 1e-3
    released_s = record.released_s - zero_s if math.isfinite(record.released_s) else end_s
    high_s = min(released_s, end_s + 0.25 * (end_s - low_s)) + spare_s
    return [beside, Panel("the crossing", CROSSING, low_s - 3 * spare_s, high_s)]


# ---- one panel


def _panel(axes: Axes, panel: Panel, lanes: Sequence[Lane]) -> None:
    axes.set_title(f"{panel.title}: {number_text(panel.high_s - panel.low_s)} s")
    axes.set_xlim(panel.low_s, panel.high_s)
    axes.set_xlabel("seconds from the boundary")
    axes.grid(visible=False, axis="y")
    name_rows(axes, [lane.name for lane in lanes])
    if panel.styles is CROSSING:
        axes.set_yticklabels([])
    for row, lane in enumerate(lanes):
        for phase in lane.phases:
            if phase.phase in panel.styles:
                _phase(axes, panel, row, phase)
        for begin_s, end_s, kind in _idle(lane, panel):
            if end_s > begin_s:
                worker, took = lane.phases[0].worker, number_text(end_s - begin_s)
                told = f"worker {worker} {kind} {took} s"
                draw_bar(axes, row, begin_s, end_s, told, **IDLE[kind], label=kind)
    _last_ones(axes, panel, lanes)


def _phase(axes: Axes, panel: Panel, row: int, phase: WorkerPhaseRecord) -> None:
    """A phase that never ended is open at the right edge."""
    style, end_s = panel.styles[phase.phase], phase.ended_s
    took = f"{number_text(end_s - phase.started_s)} s"
    if not math.isfinite(end_s):
        style = style | {"edgecolor": Color.BAD, "linestyle": "--", "label": "never ended"}
        end_s, took = panel.high_s, "never ended"
    told = f"worker {phase.worker}, {phase.phase}: {took}"
    draw_bar(axes, row, phase.started_s, end_s, told, **style)


def _idle(lane: Lane, panel: Panel) -> Iterator[tuple[float, float, str]]:
    """What lies between a worker's phases: it trains, or it waits for others."""
    shown = [p for p in lane.phases if p.phase in panel.styles and math.isfinite(p.ended_s)]
    starts_s = [phase.started_s for phase in shown[1:]]
    if panel.styles is BESIDE:
        if not lane.joins:  # PREPARE is a thread beside the one that trains
            yield panel.low_s, panel.high_s, "trains"
            return
        starts_s.append(panel.high_s)
    elif shown:
        yield panel.low_s, shown[0].started_s, "waits" if lane.joins else "trains"
        for update in (p for p in shown if p.phase == "update"):
            yield update.ended_s, panel.high_s, "trains"
    for phase, start_s in zip(shown, starts_s, strict=False):
        yield phase.ended_s, start_s, "waits"


def _last_ones(axes: Axes, panel: Panel, lanes: Sequence[Lane]) -> None:
    """Points at whoever the others waited for."""
    for name in [each for each in BARRIERS if each in panel.styles]:
        ends = sorted(
            (phase.ended_s, row)
            for row, lane in enumerate(lanes)
            for phase in lane.phases
            if phase.phase == name and math.isfinite(phase.ended_s)
        )
        if len(ends) < 2:
            continue
        (first_s, _), (end_s, row) = ends[0], ends[-1]
        if end_s - first_s > WAITED_SHARE * (panel.high_s - panel.low_s):
            worker, waited = lanes[row].phases[0].worker, number_text(end_s - first_s)
            told = f"worker {worker} was the last, {waited} s after the first ({name})"
            style = {"marker": CARETLEFT, "color": Color.INK}
            draw_point(axes, end_s, row, told, label="the others waited for this one", **style)


# ---- bytes


def _bytes(traffic: Sequence[TrafficRecord]) -> tuple[list[str], list[list[int]]]:
    """The names of the workers that send or receive, or of groups of them, and the bytes from each
    row to each column."""
    workers = sorted({worker for row in traffic for worker in (row.sender, row.receiver)})
    size = -(-len(workers) // MOST_GROUPS) or 1
    groups = [workers[i : i + size] for i in range(0, len(workers), size)]
    index = {worker: number for number, group in enumerate(groups) for worker in group}
    table = [[0] * len(groups) for _ in groups]
    for row in traffic:
        table[index[row.sender]][index[row.receiver]] += row.bytes
    return [*map(ids_text, groups)], table


def _table(axes: Axes, names: Sequence[str], table: Sequence[Sequence[int]]) -> None:
    """The darker, the more."""
    most = max(map(max, table))
    axes.set_title("bytes from worker (row) to worker (column)")
    axes.set_xlim(-0.5, MOST_GROUPS + 0.5)
    name_rows(axes, names)
    axes.set_xticks(range(len(names) + 1), [*names, "sent"])
    axes.tick_params(labeltop=True, labelbottom=False, length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    for row, cells in enumerate(table):
        for column, count in enumerate([*cells, sum(cells)]):
            is_sum = column == len(names)
            if count and not is_sum:
                told = f"from {names[row]} to {names[column]}: {bytes_text(count)}"
                style = {"height": 0.92, "color": (Color.BLUE, 0.1 + 0.4 * count / most)}
                draw_bar(axes, row, column - 0.48, column + 0.48, told, **style)
            axes.text(
                column, row, bytes_text(count) if count else "\u00b7", fontsize=8,
                color=Color.SOFT if is_sum else Color.INK, ha="center", va="center_baseline",
            )  # fmt: skip
