"""Loss and tokens a second over the run's time, with every handoff."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from liver_hpc.report.page.series import Handoff, StepPoint, Story, not_finite, thinned
from liver_hpc.report.page.svg import (
    Scale,
    add,
    bar,
    drawing,
    label,
    path,
    text_width,
    tick_text,
    ticks,
    time_axis,
)
from liver_hpc.report.wording import duration_text, layout_text


@dataclass(frozen=True)
class Panel:
    """One curve's place in the drawing, from its top edge to its bottom edge."""

    name: str
    unit: str
    top: float
    bottom: float


LEFT, RIGHT = 46.0, 946.0
BADGES, RADIUS = 24.0, 9.0
"""Where the handoffs' numbers end, above the panels."""
LOSS = Panel("loss", "loss", 48.0, 228.0)
RATE = Panel("rate", "tokens/s", 262.0, 382.0)
STRIP, BOTTOM = 392.0, 414.0
"""The layouts' names, below the panels."""
AXIS = 24.0


def training(story: Story) -> Element:
    """Loss, tokens/s and the layout over time; handoffs as numbered marks with their phases."""
    svg = drawing(
        BOTTOM + AXIS,
        "Loss and tokens per second over time",
        f"{len(story.points)} steps in {duration_text(story.end_s)}, "
        f"{len(story.handoffs)} handoffs marked; the tables below hold the figures",
    )
    svg.set("data-left", str(LEFT))
    svg.set("data-right", str(RIGHT))
    svg.set("data-seconds", repr(story.end_s))
    time = Scale(0.0, story.end_s, LEFT, RIGHT)
    _phases(svg, story.handoffs, time)
    losses = thinned(story.points, lambda point: point.loss)
    _curve(svg, time, LOSS, [(point.ended_s, point.loss) for point in losses])
    _not_finite(svg, story.points, time)
    _curve(svg, time, RATE, _rate_corners(story.points))
    _layouts(svg, story, time)
    time_axis(svg, time, BOTTOM, BOTTOM + 4)
    _marks(svg, story.handoffs, time)
    add(svg, "line", "cursor", x1=LEFT, x2=LEFT, y1=LOSS.top, y2=BOTTOM)
    return svg


# ---- curves


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


def _curve(svg: Element, time: Scale, panel: Panel, points: Sequence[tuple[float, float]]) -> None:
    values = [value for _, value in points if math.isfinite(value)]
    high = max(values, default=1.0)
    low = 0.0 if panel is RATE else min(values, default=0.0)
    spare = 0.04 * (high - low) or 0.5
    bottom = low if panel is RATE else low - spare
    scale = Scale(bottom, high + spare, panel.bottom, panel.top)
    for value in ticks(scale.low, scale.high, 4):
        y = scale(value)
        add(svg, "line", "grid", x1=LEFT, x2=RIGHT, y1=y, y2=y)
        label(svg, LEFT - 6, y + 4, tick_text(value), "axis", "end")
    label(svg, LEFT, panel.top - 7, panel.unit, f"name {panel.name}-text")
    path(svg, [(time(at_s), scale(value)) for at_s, value in points], f"curve {panel.name}")


def _not_finite(svg: Element, points: Sequence[StepPoint], time: Scale) -> None:
    """A bar along the panel's top where the loss or the gradient norm is not finite."""
    for first, last in not_finite(points):
        steps = f"step {first.step}" if first is last else f"steps {first.step} to {last.step}"
        title = f"{steps}: the loss or the gradient norm is not finite"
        bar(svg, "not-finite", time, (first.began_s, last.ended_s), (LOSS.top, 5), title)


# ---- handoffs


def _phases(svg: Element, handoffs: Sequence[Handoff], time: Scale) -> None:
    for handoff in handoffs:
        for name, begin_s, end_s in handoff.spans_s:
            title = (
                f"handoff {handoff.figures.generation}, {name}: {duration_text(end_s - begin_s)}"
            )
            place = (LOSS.top, BOTTOM - LOSS.top)
            bar(svg, f"band {name}", time, (begin_s, end_s), place, title)


def _marks(svg: Element, handoffs: Sequence[Handoff], time: Scale) -> None:
    """Numbered, round for a completed handoff and square for another; near ones share a mark."""
    groups: list[list[Handoff]] = []
    for handoff in sorted(handoffs, key=lambda each: each.at_s):
        kind = "completed" if handoff.figures.completed else "not-completed"
        x = time(handoff.at_s)
        add(svg, "line", f"mark {kind}", x1=x, x2=x, y1=BADGES, y2=BOTTOM)
        if groups and x - time(groups[-1][-1].at_s) < 2 * RADIUS + 3:
            groups[-1].append(handoff)
        else:
            groups.append([handoff])
    for group in groups:
        first, last = group[0], group[-1]
        words = str(first.figures.generation)
        if last is not first:
            words += f"\u2013{last.figures.generation}"
        middle = (time(first.at_s) + time(last.at_s)) / 2
        half = RADIUS if len(words) < 3 else 4.0 * len(words)
        done = all(handoff.figures.completed for handoff in group)
        kind, radius = ("completed", RADIUS) if done else ("not-completed", 2.0)
        title = "; ".join(map(str, group))
        places = {"x": middle - half, "y": BADGES - 2 * RADIUS, "rx": radius}
        badge = add(
            svg, "rect", f"badge {kind}", title, **places, width=2 * half, height=2 * RADIUS
        )
        badge.set("tabindex", "0")
        label(svg, middle, BADGES - RADIUS + 4, words, "badge-text", "middle")


def _layouts(svg: Element, story: Story, time: Scale) -> None:
    """Which layout trained when, by name where there is room."""
    for index, (world, begin_s, end_s) in enumerate(story.worlds):
        name = layout_text(world.layout)
        title = f"generation {world.generation}: {name}, {world.steps} steps"
        place = (STRIP, BOTTOM - STRIP)
        bar(svg, f"world w{index % 2}", time, (begin_s, end_s), place, title)
        x, end = time(begin_s), time(end_s)
        if text_width(name) + 6 < end - x:
            label(svg, (x + end) / 2, STRIP + 15, name, "world-text", "middle")
