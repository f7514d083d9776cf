"""The nodes' notices over the run's time: a row a node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.derive import NoticeFigures
from liver_hpc.report.page.series import Story
from liver_hpc.report.page.svg import Form, Scale, add, drawing, label
from liver_hpc.report.page.timeline import LEFT, RIGHT, time_axis
from liver_hpc.report.wording import duration_text
from liver_hpc.run.records import NoticeRecord

TOP, ROW, AXIS = 8.0, 28.0, 26.0
MOST_NODES = 40


@dataclass(frozen=True)
class Notice:
    """One notice in the run's time. answered_s: when a granted node first trained, or when one to
    be left was left. next_s: the node's next notice, or the end. NaN for what did not happen."""

    record: NoticeRecord
    at_s: float
    answered_s: float
    deadline_s: float
    next_s: float

    @property
    def granted(self) -> bool:
        return self.record.kind == "granted"


def draw(story: Story, rows: Sequence[tuple[NoticeRecord, NoticeFigures]], form: Form) -> Element:
    """When each node came, when it had to be left, until when, and when it was left."""
    by_node: dict[str, list[tuple[NoticeRecord, NoticeFigures]]] = {}
    for record, figures in rows:
        by_node.setdefault(record.node, []).append((record, figures))
    shown = dict(list(by_node.items())[:MOST_NODES])
    left = min(max([LEFT, *(form.text_width(node) + 12 for node in shown)]), form.width / 3)
    times_s = [record.at_s - story.start_s for record, _ in rows]
    end_s = max([story.end_s, *filter(math.isfinite, times_s)])
    bottom = TOP + ROW * len(shown)
    words = f"{len(rows)} notices of {len(by_node)} nodes; the table holds the figures"
    svg = drawing(form, bottom + AXIS, "Nodes over time", words)
    time = Scale(0.0, end_s, left, form.width - RIGHT)
    for index, (node, own) in enumerate(shown.items()):
        y = TOP + ROW * (index + 0.5)
        label(svg, left - 8, y + 4, form.fitting(node, left - 12), "axis", "end")
        add(svg, "line", "grid", x1=left, x2=form.width - RIGHT, y1=y, y2=y)
        for notice in _in_time(own, story.start_s, end_s):
            _notice(svg, time, y, notice)
    time_axis(svg, form, time, bottom, end_s)
    return svg


def _in_time(
    own: Sequence[tuple[NoticeRecord, NoticeFigures]], start_s: float, end_s: float
) -> list[Notice]:
    starts_s = [record.at_s - start_s for record, _ in own]
    return [
        Notice(
            record=record,
            at_s=at_s,
            answered_s=at_s + figures.left_s,
            deadline_s=record.deadline_s - start_s,
            next_s=next_s,
        )
        for (record, figures), at_s, next_s in zip(
            own, starts_s, [*starts_s[1:], end_s], strict=True
        )
    ]


def _notice(svg: Element, time: Scale, y: float, notice: Notice) -> None:
    """A triangle where it came, up for granted; a bar until it was answered; the rest of its window
    in dashes with a tick at the end; a line while the node trained."""
    record, x = notice.record, time(notice.at_s)
    kind = "granted" if notice.granted else "leave"
    answered = math.isfinite(notice.answered_s)
    busy_s = min(notice.answered_s, notice.next_s) if answered else notice.next_s
    if notice.granted and answered:
        add(
            svg, "line", "train", f"{record.node} trained",
            x1=time(busy_s), x2=time(notice.next_s), y1=y, y2=y,
        )  # fmt: skip
    if math.isfinite(notice.deadline_s) and notice.deadline_s > busy_s:
        until = time(min(notice.deadline_s, notice.next_s))
        window = f"{record.node}: a window of {duration_text(notice.deadline_s - notice.at_s)}"
        add(svg, "line", "wait", window, x1=time(busy_s), x2=until, y1=y, y2=y)
        if notice.deadline_s <= notice.next_s:
            add(svg, "line", "deadline", x1=until, x2=until, y1=y - 7, y2=y + 7)
    title = f"{record.node} {record.kind}: {record.outcome}; {record.action}"
    width = max(time(busy_s) - x, 1.0)
    add(svg, "rect", f"answer {kind}", title, x=x, y=y - 5, width=width, height=10)
    tip, base = (y - 10, y + 4) if notice.granted else (y + 10, y - 4)
    points = f"{x:.2f},{tip:.2f} {x - 7:.2f},{base:.2f} {x + 7:.2f},{base:.2f}"
    shape = SubElement(svg, "polygon", {"class": f"notice {kind}", "points": points})
    SubElement(shape, "title").text = title
