"""The nodes' notices over the run's time: a row a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element

from liver_hpc.report.derive import NoticeFigures
from liver_hpc.report.page.series import Story
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
from liver_hpc.report.page.timeline import LEFT, RIGHT
from liver_hpc.report.wording import duration_text

TOP, ROW, AXIS = 8.0, 28.0, 26.0
MOST_NODES = 40


def draw(story: Story, notices: Sequence[NoticeFigures]) -> Element:
    """When each node came, when it had to be left, until when, and when it was left."""
    by_node: dict[str, list[NoticeFigures]] = {}
    for notice in notices:
        by_node.setdefault(notice.record.node, []).append(notice)
    shown = dict(list(by_node.items())[:MOST_NODES])
    left = min(max([LEFT, *(text_width(node) + 12 for node in shown)]), WIDTH / 3)
    times_s = [notice.record.at_s for notice in notices if math.isfinite(notice.record.at_s)]
    end_s = max([story.start_s + story.end_s, *times_s])
    bottom = TOP + ROW * len(shown)
    words = f"{len(notices)} notices of {len(by_node)} nodes; the table holds the figures"
    svg = drawing(bottom + AXIS, "Nodes over time", words)
    time = Scale(story.start_s, end_s, left, RIGHT)
    for index, (node, own) in enumerate(shown.items()):
        y = TOP + ROW * (index + 0.5)
        label(svg, left - 8, y + 4, fitting(node, left - 12), "axis", "end")
        add(svg, "line", "grid", x1=left, x2=RIGHT, y1=y, y2=y)
        nexts_s = [*(notice.record.at_s for notice in own[1:]), end_s]
        for notice, next_s in zip(own, nexts_s, strict=True):
            _notice(svg, time, y, notice, next_s)
    time_axis(svg, time, bottom, bottom + 4)
    return svg


def _notice(svg: Element, time: Scale, y: float, notice: NoticeFigures, next_s: float) -> None:
    """A triangle where it came, up for granted; a bar until a granted node first trained, or until
    one to be left was left; the rest of its window in dashes with a tick at the end; a line while
    the node trained. next_s: the node's next notice, or the end."""
    record, x = notice.record, time(notice.record.at_s)
    granted = record.kind == "granted"
    kind = "granted" if granted else "leave"
    answered = math.isfinite(notice.left_s)
    busy_s = min(record.at_s + notice.left_s, next_s) if answered else next_s
    busy, until = time(busy_s), time(next_s)
    if granted and answered:
        add(svg, "line", "train", f"{record.node} trained", x1=busy, x2=until, y1=y, y2=y)
    if math.isfinite(record.deadline_s) and record.deadline_s > busy_s:
        end = time(min(record.deadline_s, next_s))
        window = f"{record.node}: a window of {duration_text(notice.window_s)}"
        add(svg, "line", "wait", window, x1=busy, x2=end, y1=y, y2=y)
        if record.deadline_s <= next_s:
            add(svg, "line", "deadline", x1=end, x2=end, y1=y - 7, y2=y + 7)
    title = f"{record.node} {record.kind}: {record.outcome}; {record.action}"
    bar(svg, f"answer {kind}", time, (record.at_s, busy_s), (y - 5, 10), title)
    tip, base = (y - 10, y + 4) if granted else (y + 10, y - 4)
    shape = add(svg, "path", f"notice {kind}", title)
    shape.set("d", f"M{x:.2f} {tip:.2f}L{x - 7:.2f} {base:.2f}H{x + 7:.2f}z")
