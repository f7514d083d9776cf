"""The report's drawings as PNG files, by matplotlib: for a paper or a slide."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.style as mpl_style
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from liver_hpc.report.compare import Comparison, Costs, of_run
from liver_hpc.report.derive import run_figures
from liver_hpc.report.page.lanes import BESIDE, CROSSING, Lane, bounds, lanes_of
from liver_hpc.report.page.series import Handoff, Story, story
from liver_hpc.report.page.traffic import matrix
from liver_hpc.report.wording import bytes_text
from liver_hpc.run.records import RunRecords

# Okabe and Ito's palette, which the colour-blind tell apart.
BLUE, ORANGE, GREEN, RED, GRAY = "#0072b2", "#e69f00", "#009e73", "#d55e00", "#8a939c"
BANDS: dict[str, Any] = {
    "boot": {"color": GRAY, "alpha": 0.2, "linewidth": 0},
    "prepare": {"color": ORANGE, "alpha": 0.3, "linewidth": 0},
    "crossing": {"color": "black", "alpha": 0.5, "linewidth": 0},
}
PHASES = {
    "boot": GRAY,
    "prepare": ORANGE,
    "connect": "#f7e0ac",
    "transfer": BLUE,
    "first step": GREEN,
    "update": RED,
    "release": "#eed0e2",
}
STYLE = ("seaborn-v0_8-whitegrid", {"font.size": 9})
DPI = 160


def write_plots(
    records: RunRecords, comparisons: Sequence[Comparison], directory: Path
) -> list[Path]:
    """Writes training.png, a handoff-N.png for each generation N that workers' phases are known of,
    and baselines.png where there is something to compare; returns their paths."""
    derived = run_figures(records)
    told, comparisons = story(records, derived), comparisons or of_run(derived, records)
    with mpl_style.context(STYLE):
        figures = {"training.png": _training(told)}
        for handoff in told.handoffs:
            name = f"handoff-{handoff.figures.generation}.png"
            if lanes := lanes_of(handoff, records.worker_phases):
                figures[name] = _handoff(handoff, lanes, records)
        if comparisons:
            figures["baselines.png"] = _baselines(comparisons)
        for name, figure in figures.items():
            figure.savefig(directory / name, dpi=DPI)
    return [directory / name for name in figures]


def _training(told: Story) -> Figure:
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    loss, rate = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    ends_s = [point.ended_s for point in told.points]
    loss.plot(ends_s, [point.loss for point in told.points], color=BLUE, linewidth=1.2)
    marked_s = [point.ended_s for point in told.points if not point.is_finite]
    if marked_s:
        loss.plot(
            marked_s, [0.97] * len(marked_s), "x", color=RED, markersize=4,
            transform=loss.get_xaxis_transform(), label="loss or gradient norm not finite",
        )  # fmt: skip
        loss.legend()
    rates = [point.tokens_per_s for point in told.points]
    edges_s = [*(point.began_s for point in told.points), *ends_s[-1:]]
    if rates:
        rate.stairs(rates, edges_s, color=RED, baseline=None)
    loss.set_ylabel("loss", color=BLUE)
    rate.set_ylabel("tokens/s", color=RED)
    rate.set_ylim(bottom=0)
    rate.set_xlabel("seconds")
    for handoff in told.handoffs:
        for name, begin_s, end_s in handoff.spans_s:
            for axes in (loss, rate) if name in BANDS else ():
                axes.axvspan(begin_s, end_s, **BANDS[name])
        style = "-" if handoff.figures.completed else ":"
        loss.axvline(handoff.at_s, color="black", linewidth=0.6, linestyle=style)
        loss.annotate(
            str(handoff.figures.generation), (handoff.at_s, 1.02), ha="center", weight="bold",
            xycoords=("data", "axes fraction"),
        )  # fmt: skip
    entries = [Patch(label=name, **style) for name, style in BANDS.items()]
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries))
    return figure


def _handoff(handoff: Handoff, lanes: Sequence[Lane], records: RunRecords) -> Figure:
    own = matrix(records.traffic, handoff.figures.generation)
    height = 1.4 + 0.28 * max(len(lanes), 5)
    figure = Figure(figsize=(11, height), layout="constrained")
    figure.suptitle(f"generation {handoff}", fontsize=10)
    beside, crossing, sent = figure.subplots(1, 3, width_ratios=(5, 6, 4))
    _, zero_s, _ = bounds(handoff, lanes)
    _bars(beside, lanes, BESIDE, zero_s)
    _bars(crossing, lanes, CROSSING, zero_s)
    beside.set_title("beside training")
    crossing.set_title("the crossing")
    crossing.set_yticklabels([])
    _bytes(sent, own.num_bytes, own.names)
    return figure


def _bars(axes: Any, lanes: Sequence[Lane], names: Sequence[str], zero_s: float) -> None:
    for index, lane in enumerate(lanes):
        for phase in lane.phases:
            if phase.phase in names and math.isfinite(phase.ended_s):
                axes.barh(
                    index, phase.ended_s - phase.started_s, left=phase.started_s - zero_s,
                    height=0.62, color=PHASES[phase.phase],
                )  # fmt: skip
    axes.set_yticks(range(len(lanes)), [f"worker {lane.worker}" for lane in lanes])
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the boundary")
    entries = [Patch(color=PHASES[name], label=name) for name in names]
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.28)}
    axes.legend(handles=entries, ncols=len(names), fontsize=8, **place)


def _bytes(axes: Any, num_bytes: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    axes.set_title("bytes from row to column")
    axes.grid(visible=False)
    if not names:
        axes.set_axis_off()
        return
    axes.imshow(num_bytes, cmap="Blues", vmin=0, vmax=1.6 * max(map(max, num_bytes)) or 1)
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks(range(len(names)), names)
    for row, cells in enumerate(num_bytes):
        for column, cell in enumerate(cells):
            if cell:
                axes.text(column, row, bytes_text(cell), ha="center", va="center", fontsize=6)


def _baselines(comparisons: Sequence[Comparison]) -> Figure:
    """A row for each change's name, then one for each of its methods."""
    rows: list[str | Costs] = []
    for each in comparisons:
        rows += [each.change, *each.costs]
    figure = Figure(figsize=(9, 0.8 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        if isinstance(row, str):
            axes.text(0, place, row, weight="bold", va="center")
            continue
        low, high = row.median_s - min(row.lost_s), max(row.lost_s) - row.median_s
        axes.barh(
            place, row.median_s, xerr=[[low], [high]], height=0.7, capsize=2,
            color=BLUE if row.is_live else ORANGE, error_kw={"linewidth": 0.9},
        )  # fmt: skip
    names = ["" if isinstance(row, str) else row.method for row in rows]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlabel("lost time in seconds: median, least and greatest")
    axes.set_xlim(left=0)
    axes.margins(y=0.01)
    return figure
