"""Loss and tokens a second over the run's time, with every handoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from liver_hpc.report.page.series import Handoff, StepPoint, Story, not_finite, thinned
from liver_hpc.report.page.svg import (
    Form,
    Scale,
    add,
    drawing,
    label,
    number,
    path,
    rect,
    tick_text,
    ticks,
    time_text,
    time_ticks,
)
from liver_hpc.report.wording import duration_text, layout_text, number_text

LEFT, RIGHT = 46.0, 14.0
MARKS = 30.0
"""Room above the panels for the handoffs' numbers."""
RADIUS = 9.0
STRIP = 22.0
AXIS = 24.0


@dataclass(frozen=True)
class Panel:
    """One curve's place in the drawing, from its top edge to its bottom edge."""

    name: str
    unit: str
    top: float
    bottom: float


def training(story: Story, form: Form) -> Element:
    """Loss, tokens/s and the layout over time; handoffs as numbered marks with their phases."""
    loss_height, rate_height = (130.0, 100.0) if form.is_narrow else (180.0, 120.0)
    loss = Panel("loss", "loss", MARKS + 18, MARKS + 18 + loss_height)
    rate = Panel("rate", "tokens/s", loss.bottom + 34, loss.bottom + 34 + rate_height)
    strip = rate.bottom + 10
    height = strip + STRIP + AXIS
    svg = drawing(
        form,
        height,
        "Loss and tokens per second over time",
        f"{len(story.points)} steps in {duration_text(story.end_s)}, "
        f"{len(story.handoffs)} handoffs marked; the tables below hold the figures",
    )
    svg.set("data-left", str(LEFT))
    svg.set("data-right", str(form.width - RIGHT))
    svg.set("data-seconds", repr(story.end_s))
    time = Scale(0.0, story.end_s, LEFT, form.width - RIGHT)
    _phases(svg, story.handoffs, time, loss.top, strip + STRIP)
    _curve(svg, form, time, loss, [(p.ended_s, p.loss) for p in _loss_points(story.points)])
    _not_finite(svg, story.points, time, loss)
    _curve(svg, form, time, rate, _rate_corners(story.points))
    _layouts(svg, form, story, time, strip)
    time_axis(svg, form, time, strip + STRIP, story.end_s)
    _marks(svg, story.handoffs, time, strip + STRIP)
    add(svg, "line", "cursor", x1=LEFT, x2=LEFT, y1=loss.top, y2=strip + STRIP)
    return svg


def time_axis(svg: Element, form: Form, time: Scale, top: float, end_s: float) -> None:
    """Ticks of the run's time below a drawing."""
    values = time_ticks(end_s, 5 if form.is_narrow else 10)
    for value in values:
        x = time(value)
        add(svg, "line", "tick", x1=x, x2=x, y1=top, y2=top + 4)
        text = time_text(value, values)
        near_end = x + form.text_width(text) / 2 > form.width
        label(svg, x, top + 17, text, "axis", "end" if near_end else "middle")


# ---- curves


def _loss_points(points: Sequence[StepPoint]) -> list[StepPoint]:
    return thinned(points, lambda point: point.loss)


def _rate_corners(points: Sequence[StepPoint]) -> list[tuple[float, float]]:
    """Two corners a step: its area is its tokens. Broken between two starts of a run."""
    corners: list[tuple[float, float]] = []
    kept = thinned(points, lambda point: point.tokens_per_s)
    all_kept = len(kept) == len(points)
    for point in kept:
        if all_kept and corners and point.began_s > corners[-1][0] + 1e-9:
            corners.append((point.began_s, math.nan))
        if all_kept:
            corners.append((point.began_s, point.tokens_per_s))
        corners.append((point.ended_s, point.tokens_per_s))
    return corners


def _curve(
    svg: Element, form: Form, time: Scale, panel: Panel, points: Sequence[tuple[float, float]]
) -> None:
    values = [value for _, value in points if math.isfinite(value)]
    high = max(values, default=1.0)
    low = 0.0 if panel.name == "rate" else min(values, default=0.0)
    spare = 0.04 * (high - low) or 0.5
    bottom = low if panel.name == "rate" else low - spare
    scale = Scale(bottom, high + spare, panel.bottom, panel.top)
    for value in ticks(scale.low, scale.high, 3 if form.is_narrow else 4):
        y = scale(value)
        add(svg, "line", "grid", x1=LEFT, x2=form.width - RIGHT, y1=y, y2=y)
        label(svg, LEFT - 6, y + 4, tick_text(value), "axis", "end")
    label(svg, LEFT, panel.top - 7, panel.unit, f"name {panel.name}-text")
    path(svg, [(time(at_s), scale(value)) for at_s, value in points], f"curve {panel.name}")


def _not_finite(svg: Element, points: Sequence[StepPoint], time: Scale, panel: Panel) -> None:
    """A bar along the panel's top where the loss or the gradient norm is not finite."""
    for first, last in not_finite(points):
        steps = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
        x, end = time(first.began_s), time(last.ended_s)
        title = f"{steps}: the loss or the gradient norm is not finite"
        rect(svg, "not-finite", (x, panel.top, max(end - x, 1.5), 5), title)


# ---- handoffs


def _phases(
    svg: Element, handoffs: Sequence[Handoff], time: Scale, top: float, bottom: float
) -> None:
    for handoff in handoffs:
        for name, begin_s, end_s in handoff.spans_s:
            x, end = time(begin_s), time(end_s)
            title = f"handoff {handoff.number}, {name}: {duration_text(end_s - begin_s)}"
            rect(svg, f"band {name}", (x, top, max(end - x, 1.5), bottom - top), title)


def _marks(svg: Element, handoffs: Sequence[Handoff], time: Scale, bottom: float) -> None:
    """Numbered, round for a completed handoff and square for another; near ones share a mark."""
    groups: list[list[Handoff]] = []
    for handoff in sorted(handoffs, key=lambda each: each.at_s):
        if groups and time(handoff.at_s) - time(groups[-1][-1].at_s) < 2 * RADIUS + 3:
            groups[-1].append(handoff)
        else:
            groups.append([handoff])
    for group in groups:
        for handoff in group:
            x = time(handoff.at_s)
            kind = "completed" if handoff.completed else "not-completed"
            add(svg, "line", f"mark {kind}", x1=x, x2=x, y1=MARKS - 6, y2=bottom)
        numbers = [handoff.number for handoff in group]
        words = f"{numbers[0]}\u2013{numbers[-1]}" if len(group) > 1 else str(numbers[0])
        middle = (time(group[0].at_s) + time(group[-1].at_s)) / 2
        done = all(handoff.completed for handoff in group)
        half = RADIUS if len(words) < 3 else 4.0 * len(words)
        kind, radius = ("completed", RADIUS) if done else ("not-completed", 2.0)
        place = (middle - half, MARKS - 6 - 2 * RADIUS, 2 * half, 2 * RADIUS)
        badge = rect(svg, f"badge {kind}", place, "; ".join(map(handoff_text, group)))
        badge.set("rx", number(radius))
        badge.set("tabindex", "0")
        label(svg, middle, MARKS - 6 - RADIUS + 4, words, "badge-text", "middle")


def handoff_text(handoff: Handoff) -> str:
    """`2: tp2 dp2 to pp2 dp2, completed, lost 0.120 s`."""
    record = handoff.figures
    ends = f"{layout_text(record.source)} to {layout_text(record.target)}"
    lost = number_text(record.lost_s)
    return f"{handoff.number}: {ends}, {record.outcome}, lost {lost} s"


def _layouts(svg: Element, form: Form, story: Story, time: Scale, top: float) -> None:
    """Which layout trained when, by name where there is room."""
    for index, (world, begin_s, end_s) in enumerate(story.worlds):
        x, end = time(begin_s), time(end_s)
        name = layout_text(world.layout)
        title = f"generation {world.generation}: {name}, {world.steps} steps"
        rect(svg, f"world w{index % 2}", (x, top, max(end - x - 1, 0.5), STRIP), title)
        short = name.replace(" ", "\u2009")
        if form.text_width(name) + 6 < end - x:
            label(svg, (x + end) / 2, top + 15, short, "world-text", "middle")
