"""Loss and tokens a second over the run's time, with every handoff and the layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.drawings.canvas import (
    Color,
    draw_bar,
    new_figure,
    run_time,
    tell,
)
from liver_hpc.report.drawings.handoff import in_words
from liver_hpc.report.wording import duration_text, layout_text
from liver_hpc.report.worlds import built_anew, first_known
from liver_hpc.run.records import RunRecords

POINTS = 700
"""More steps than this are drawn by the extremes of neighbours."""
MOST_POINTS = 60
"""More evaluations than this are a line without points."""
NEAR = 0.024
"""Handoffs that are nearer than this part of the run share a mark."""
BANDS: dict[str, dict[str, Any]] = {
    "boot": {"label": "joiners boot", "color": Color.GRAY, "alpha": 0.16},
    "prepare": {"label": "target prepared beside training", "color": Color.ORANGE, "alpha": 0.28},
    "crossing": {"label": "crossing: last step of the old to the first of the new",
                 "color": Color.INK, "alpha": 0.45},
    "release": {"label": "old world freed", "color": Color.PURPLE, "alpha": 0.28},
}  # fmt: skip
LED_TO = "handoff, by the generation that it led to"
NOT_FINITE = "the loss or the gradient norm is not finite"
DONE = {"boxstyle": "round,rounding_size=0.8", "facecolor": Color.INK, "edgecolor": Color.INK}
NOT_DONE = {"boxstyle": "square", "facecolor": Color.PAGE, "edgecolor": Color.BAD}

Indices = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Timeline:
    """The steps in the run's own time, one value a step.

    start_s: the epoch time that all others are counted from. end_s: of the last step or handoff.
    began_s: the end of the step before it, so that a pause counts as this one's, or that of the
    evaluation between them; of the first of a start where it began itself. loss: NaN where it is
    not finite. is_finite: of the loss and the gradient norm. evaluated_s, validation_loss: one
    value an evaluation.
    """

    start_s: float
    end_s: float
    step: Indices
    generation: Indices
    began_s: Floats
    ended_s: Floats
    loss: Floats
    is_finite: npt.NDArray[np.bool_]
    tokens_per_s: Floats
    evaluated_s: Floats
    validation_loss: Floats


def timeline(records: RunRecords, attempts: Sequence[ReconfigurationFigures]) -> Timeline:
    def column(name: str, kind: type = float) -> Any:
        return np.array([getattr(step, name) for step in records.steps], kind)

    notices_s = [*(each.notice_s for each in attempts), *(each.at_s for each in records.notices)]
    start_s = min(filter(math.isfinite, [*column("started_s")] or notices_s), default=0.0)
    step, loss = column("step", int), column("loss")
    began_s, ended_s = column("started_s") - start_s, column("ended_s") - start_s
    generation = column("generation", int)
    is_live = np.isin(generation, _live(records))
    is_live[1:] |= np.diff(generation) == 0
    follows = np.flatnonzero((np.diff(step) == 1) & is_live[1:])
    began_s[follows + 1] = ended_s[follows]
    evaluated_s = np.array([each.ended_s - start_s for each in records.evaluations])
    _begin_behind(evaluated_s, began_s, ended_s)
    validation_loss = np.array([each.loss for each in records.evaluations])
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = column("tokens") / (ended_s - began_s)
    ends_s = [*ended_s, *(end_s - start_s for each in attempts for _, _, end_s in _spans(each))]
    return Timeline(
        start_s,
        max([1e-3, *filter(math.isfinite, ends_s)]),
        step,
        generation,
        began_s,
        ended_s,
        np.where(np.isfinite(loss), loss, np.nan),
        column("is_finite", bool),
        np.where(np.isfinite(rates) & (rates >= 0), rates, np.nan),
        evaluated_s,
        np.where(np.isfinite(validation_loss), validation_loss, np.nan),
    )


def _spans(record: ReconfigurationFigures) -> list[tuple[str, float, float]]:
    """Begin and end of each of BANDS that the attempt has reached, in epoch time."""
    boundary_s = record.source_last_step_ended_s
    # PREPARE ends with the wait for the boundary, as far as the attempt has come.
    prepared_s = first_known(boundary_s, record.armed_s, record.prepare_ended_s)
    edges = (
        ("boot", record.boot_ended_s - record.phases.boot_s, record.boot_ended_s),
        ("prepare", record.prepare_started_s, prepared_s),
        ("crossing", boundary_s, record.first_step_ended_s),
        ("release", record.first_step_ended_s, record.released_s),
    )
    return [edge for edge in edges if edge[2] >= edge[1]]  # false where either is NaN


def _live(records: RunRecords) -> list[int]:
    """The generations that came of another without a start between them."""
    live = [*(attempt.generation for attempt in records.reconfigurations), *built_anew(records)]
    return live + [recovery.generation for recovery in records.recoveries]


def _begin_behind(evaluated_s: Floats, began_s: Floats, ended_s: Floats) -> None:
    """Has each step begin with the end of the evaluation before it."""
    if len(evaluated_s) and len(ended_s):
        following = np.searchsorted(ended_s, evaluated_s)
        for index, at_s in zip(following, evaluated_s, strict=True):
            if index < len(began_s):
                began_s[index] = max(began_s[index], at_s)


def thinned(values: Floats) -> Indices:
    """Which to draw: all, or the least and the greatest of each group of neighbours; of a group
    without a finite value its first, so that a line has a gap there."""
    if len(values) <= POINTS:
        return np.arange(len(values))
    kept: list[int] = []
    for group in np.array_split(np.arange(len(values)), POINTS // 2):
        finite = group[np.isfinite(values[group])]
        if len(finite):
            kept += sorted({finite[values[finite].argmin()], finite[values[finite].argmax()]})
        else:
            kept.append(group[0])
    return np.array(kept)


def step_rows(times: Timeline) -> list[list[float]]:
    """What a page's cursor shows: end, step, generation, loss and tokens/s of what is drawn."""
    figures = times.loss.round(4), times.tokens_per_s.round()
    rows = np.column_stack([times.ended_s.round(3), times.step, times.generation, *figures])
    return [*rows[thinned(times.loss)].tolist()]


def draw(figures: RunFigures, times: Timeline) -> Figure:
    attempts = figures.reconfigurations
    figure = new_figure(
        5.2,
        "Loss and tokens per second over time",
        f"{len(times.step)} steps in {duration_text(times.end_s)}, "
        f"{len(attempts)} handoffs marked; the tables hold the figures",
    )
    loss, rate, layouts = figure.subplots(3, 1, sharex=True, height_ratios=(10, 7, 1))
    run_time(layouts, times.end_s)
    for record in attempts:
        for name, *ends_s in _spans(record):
            begin_s, end_s = (each_s - times.start_s for each_s in ends_s)
            told = f"handoff {record.generation}, {name}: {duration_text(end_s - begin_s)}"
            for axes in (loss, rate):
                style = BANDS[name] | {"height": 1, "transform": axes.get_xaxis_transform()}
                draw_bar(axes, 0.5, begin_s, end_s, told, **style)
    _curve(loss, times.ended_s, times.loss, "loss", Color.BLUE)
    if len(times.evaluated_s):
        _validation(loss, times)
    _curve(rate, *_rate_corners(times), "tokens/s", Color.RED, drawstyle="steps-pre")
    if not len(times.step):
        loss.set_title("No step was recorded.")
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter(EngFormatter(sep=""))
    _not_finite(loss, times)
    _layouts(layouts, figures, times)
    _marks((loss, rate), attempts, times)
    return figure


# ---- curves


def _curve(axes: Axes, at_s: Floats, values: Floats, name: str, color: str, **style: Any) -> None:
    kept = thinned(values)
    (line,) = axes.plot(at_s[kept], values[kept], color=color, linewidth=1.2, **style)
    tell(line, name)
    axes.set_ylabel(name, color=color)


def _validation(axes: Axes, times: Timeline) -> None:
    """The loss of every evaluation, as a line beside that of training."""
    kept = thinned(times.validation_loss)
    at_s, values = times.evaluated_s[kept], times.validation_loss[kept]
    size = 3.5 if len(kept) <= MOST_POINTS else 0
    style: dict[str, Any] = {"linewidth": 1.4, "marker": "o", "markersize": size}
    (line,) = axes.plot(at_s, values, color=Color.GREEN, label="validation loss", **style)
    last = times.validation_loss[-1]
    tell(line, f"validation loss, {last:.4f} at last")


def _rate_corners(times: Timeline) -> tuple[Floats, Floats]:
    """The ends of steps of constant rate: each step's area is its tokens. Broken between two starts
    of a run."""
    starts = np.flatnonzero(times.began_s > np.append(-np.inf, times.ended_s[:-1]) + 1e-9)
    at_s = np.insert(times.ended_s, starts, times.began_s[starts])
    return at_s, np.insert(times.tokens_per_s, starts, np.nan)


def _not_finite(axes: Axes, times: Timeline) -> None:
    """Along the top, for neighbours whose loss or gradient norm is not finite."""
    marked = np.flatnonzero(~times.is_finite)
    for group in np.split(marked, np.flatnonzero(np.diff(marked) > 1) + 1) if len(marked) else ():
        first, last = group[0], group[-1]
        words = f"step {times.step[first]}"
        if last != first:
            words = f"steps {times.step[first]} to {times.step[last]}"
        draw_bar(
            axes, 0.985, times.began_s[first], times.ended_s[last], f"{words}: {NOT_FINITE}",
            height=0.03, color=Color.BAD, label=NOT_FINITE, transform=axes.get_xaxis_transform(),
        )  # fmt: skip


# ---- handoffs


def _marks(
    panels: Sequence[Axes], attempts: Sequence[ReconfigurationFigures], times: Timeline
) -> None:
    """Numbered, round for a completed handoff and square for another; near ones share a mark."""
    groups: list[list[tuple[float, ReconfigurationFigures]]] = []
    marked = [
        first_known(each.source_last_step_ended_s, each.prepare_started_s, each.notice_s)
        for each in attempts
    ]
    for epoch_s, record in sorted(zip(marked, attempts, strict=True), key=itemgetter(0)):
        at_s = first_known(epoch_s, times.start_s) - times.start_s
        for axes in panels:
            line, words = ("-", LED_TO) if record.completed else (":", "not completed")
            axes.axvline(at_s, color=Color.INK, linewidth=0.8, linestyle=line, label=words)
        if not groups or at_s - groups[-1][-1][0] > NEAR * times.end_s:
            groups.append([])
        groups[-1].append((at_s, record))
    for group in groups:
        (first_s, first), (last_s, last) = group[0], group[-1]
        words = str(first.generation)
        if last is not first:
            words += f"\u2013{last.generation}"
        done = all(record.completed for _, record in group)
        kind = DONE if done else NOT_DONE
        badge = panels[0].annotate(
            words, ((first_s + last_s) / 2, 1), (0, 8), ha="center", weight="bold", fontsize=8.5,
            xycoords=("data", "axes fraction"), textcoords="offset points",
            color=Color.PAGE if done else Color.BAD, bbox=kind,
        )  # fmt: skip
        tell(badge, "; ".join(in_words(record) for _, record in group))


def _layouts(axes: Axes, figures: RunFigures, times: Timeline) -> None:
    """Which layout trained when, by name where there is room."""
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.5)
    axes.grid(visible=False)
    for index, world in enumerate(figures.generations):
        own = np.flatnonzero(times.generation == world.generation)
        begin_s, end_s = times.began_s[own[0]], min(times.ended_s[own[-1]], times.end_s)
        name = layout_text(world.layout)
        told = f"generation {world.generation}: {name}, {world.steps} steps"
        color = Color.STRIP_2 if index % 2 else Color.STRIP
        draw_bar(axes, 0, begin_s, end_s, told, height=1, color=color)
        if end_s - begin_s > 0.008 * (len(name) + 1) * times.end_s:
            middle_s = (begin_s + end_s) / 2
            axes.text(middle_s, 0, name, ha="center", va="center_baseline", fontsize=8.5)
