"""The nodes' notices over the run's time: a row a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.derive import NoticeFigures
from liver_hpc.report.page.series import Story
from liver_hpc.report.page.svg import Form, Scale, add, drawing, label, rect
from liver_hpc.report.page.timeline import LEFT, RIGHT, time_axis
from liver_hpc.report.wording import duration_text

TOP, ROW, AXIS = 8.0, 28.0, 26.0
MOST_NODES = 40


def draw(story: Story, notices: Sequence[NoticeFigures], form: Form) -> Element:
    """When each node came, when it had to be left, until when, and when it was left."""
    by_node: dict[str, list[NoticeFigures]] = {}
    for notice in notices:
        by_node.setdefault(notice.record.node, []).append(notice)
    shown = dict(list(by_node.items())[:MOST_NODES])
    left = min(max([LEFT, *(form.text_width(node) + 12 for node in shown)]), form.width / 3)
    times_s = [notice.record.at_s for notice in notices if math.isfinite(notice.record.at_s)]
    end_s = max([story.start_s + story.end_s, *times_s])
    bottom = TOP + ROW * len(shown)
    words = f"{len(notices)} notices of {len(by_node)} nodes; the table holds the figures"
    svg = drawing(form, bottom + AXIS, "Nodes over time", words)
    time = Scale(story.start_s, end_s, left, form.width - RIGHT)
    for index, (node, own) in enumerate(shown.items()):
        y = TOP + ROW * (index + 0.5)
        label(svg, left - 8, y + 4, form.fitting(node, left - 12), "axis", "end")
        add(svg, "line", "grid", x1=left, x2=form.width - RIGHT, y1=y, y2=y)
        nexts_s = [*(notice.record.at_s for notice in own[1:]), end_s]
        for notice, next_s in zip(own, nexts_s, strict=True):
            _notice(svg, time, y, notice, next_s)
    in_run = Scale(0.0, end_s - story.start_s, left, form.width - RIGHT)
    time_axis(svg, form, in_run, bottom, end_s - story.start_s)
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
    if granted and answered:
        add(
            svg, "line", "train", f"{record.node} trained",
            x1=time(busy_s), x2=time(next_s), y1=y, y2=y,
        )  # fmt: skip
    if math.isfinite(record.deadline_s) and record.deadline_s > busy_s:
        until = time(min(record.deadline_s, next_s))
        window = f"{record.node}: a window of {duration_text(notice.window_s)}"
        add(svg, "line", "wait", window, x1=time(busy_s), x2=until, y1=y, y2=y)
        if record.deadline_s <= next_s:
            add(svg, "line", "deadline", x1=until, x2=until, y1=y - 7, y2=y + 7)
    title = f"{record.node} {record.kind}: {record.outcome}; {record.action}"
    rect(svg, f"answer {kind}", (x, y - 5, max(time(busy_s) - x, 1.0), 10), title)
    tip, base = (y - 10, y + 4) if granted else (y + 10, y - 4)
    points = f"{x:.2f},{tip:.2f} {x - 7:.2f},{base:.2f} {x + 7:.2f},{base:.2f}"
    shape = SubElement(svg, "polygon", {"class": f"notice {kind}", "points": points})
    SubElement(shape, "title").text = title
