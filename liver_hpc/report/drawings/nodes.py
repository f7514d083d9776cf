"""The nodes' notices over the run's time: a row a node."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from liver_hpc.report.derive import NoticeFigures
from liver_hpc.report.drawings.canvas import (
    Color,
    draw_bar,
    draw_point,
    name_rows,
    new_figure,
    run_time,
)
from liver_hpc.report.drawings.training import Timeline
from liver_hpc.report.wording import duration_text

MOST_NODES = 40


def draw(notices: Sequence[NoticeFigures], times: Timeline) -> Figure:
    """When each node came, when it had to be left, until when, and when it was left."""
    by_node: dict[str, list[NoticeFigures]] = {}
    for notice in notices:
        by_node.setdefault(notice.record.node, []).append(notice)
    shown = dict(list(by_node.items())[:MOST_NODES])
    words = f"{len(notices)} notices of {len(by_node)} nodes; the table holds the figures"
    figure = new_figure(0.6 + 0.3 * len(shown), "Nodes over time", words)
    axes = figure.subplots()
    ends_s = [notice.record.at_s - times.start_s for notice in notices]
    end_s = max([times.end_s, *filter(math.isfinite, ends_s)])
    run_time(axes, end_s)
    name_rows(axes, shown)
    for row, own in enumerate(shown.values()):
        nexts_s = [*(notice.record.at_s - times.start_s for notice in own[1:]), end_s]
        for notice, next_s in zip(own, nexts_s, strict=True):
            _notice(axes, row, notice, times.start_s, next_s)
    return figure


def _notice(axes: Axes, row: int, notice: NoticeFigures, start_s: float, next_s: float) -> None:
    """A triangle where it came, up for granted; a bar until a granted node first trained, or until
    one to be left was left; the rest of its window thin, with a tick at the end; a line while the
    node trained. next_s: the node's next notice, or the end."""
    record = notice.record
    at_s, deadline_s = record.at_s - start_s, record.deadline_s - start_s
    granted, answered = record.kind == "granted", math.isfinite(notice.left_s)
    busy_s = min(at_s + notice.left_s, next_s) if answered else next_s
    if granted and answered:
        style = {"height": 0.08, "color": Color.GREEN, "label": "trains"}
        draw_bar(axes, row, busy_s, next_s, f"{record.node} trained", **style)
    if deadline_s > busy_s:
        told = f"{record.node}: a window of {duration_text(notice.window_s)}"
        style = {"height": 0.05, "color": Color.SOFT, "label": "what was over of a window"}
        draw_bar(axes, row, busy_s, min(deadline_s, next_s), told, **style)
        if deadline_s <= next_s:
            words = "end of the window"
            draw_point(axes, deadline_s, row, told, marker="|", color=Color.SOFT, label=words)
    told = f"{record.node} {record.kind}: {record.outcome}; {record.action}"
    color, words = (
        (Color.SKY, "until its first step") if granted else (Color.ORANGE, "until it was left")
    )
    draw_bar(axes, row, at_s, busy_s, told, height=0.36, color=color, label=words)
    marker, color, words = (
        ("^", Color.GREEN, "granted") if granted else ("v", Color.RED, "to be left")
    )
    draw_point(axes, at_s, row, told, marker=marker, color=color, label=words)
