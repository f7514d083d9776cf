"""Pieces of a page: of the report's, and of the one that follows a run. Every text goes through an
element tree, which escapes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.tables import Sheet, Tone, outcome_tone
from liver_hpc.report.wording import bytes_text, layout_text, number_text


def asset(name: str) -> str:
    """A file that lies beside this one."""
    return files("liver_hpc.report.page").joinpath(name).read_text(encoding="utf-8")


def verdict(parent: Element, figures: RunFigures) -> None:
    """The run in one line, with what weighs more."""
    for index, words in enumerate(_verdict(figures).split("*")):
        SubElement(parent, "strong" if index % 2 else "span").text = words


def _verdict(figures: RunFigures) -> str:
    """The run in one line; what weighs more stands between asterisks."""
    words = f"*{figures.steps} {'step' if figures.steps == 1 else 'steps'}*"
    if attempts := len(figures.reconfigurations):
        words += f", *{figures.completed} of {attempts} handoffs* completed. They cost "
        words += f"*{number_text(figures.cost_s)} s* of training in all, "
        words += f"*{number_text(figures.lost_s)} s* of it lost"
        worst = [each.lost_steps for each in figures.reconfigurations]
        most = max(filter(math.isfinite, worst), default=math.nan)
        if math.isfinite(most):
            words += f", at most *{number_text(most)} steps* at once"
        if figures.unknown:
            words += f"; what *{figures.unknown}* lost is not known"
        words += ". "
    else:
        words += " without a handoff. "
    return words + (f"Goodput *{figures.goodput:.1%}*." if math.isfinite(figures.goodput) else "")


def handoff_line(parent: Element, record: ReconfigurationFigures) -> None:
    """Number, change, outcome and cost of an attempt."""
    badge = "completed" if record.completed else "not-completed"
    SubElement(parent, "span", {"class": f"number {badge}"}).text = str(record.generation)
    change = f"{layout_text(record.source)} \u2192 {layout_text(record.target)}"
    SubElement(parent, "h3").text = change
    tone = outcome_tone(record.outcome)
    SubElement(parent, "span", {"class": f"tone {tone.name.lower()}"}).text = record.outcome
    if math.isfinite(record.lost_s):
        words = f"cost {number_text(record.cost_s)} s, lost {number_text(record.lost_s)} s of it"
        if math.isfinite(record.lost_steps):
            words += f" ({number_text(record.lost_steps)} steps)"
        SubElement(parent, "span", {"class": "cost"}).text = words


def handoff_facts(record: ReconfigurationFigures) -> Iterator[str]:
    yield record.notice
    yield f"after step {record.step}" if record.completed else f"at step {record.step}"
    for name, seconds in (
        ("pause", record.pause_s),
        ("slowdown", record.slowdown_s),
        ("reconfiguration", record.reconfiguration_s),
    ):
        if math.isfinite(seconds):
            yield f"{name} {number_text(seconds)} s"
    if record.completed:
        yield f"{bytes_text(record.bytes_moved)} moved"
        if record.bytes_between_nodes:
            yield f"{bytes_text(record.bytes_between_nodes)} between nodes"
        yield f"{bytes_text(record.bytes_local)} copied"
        if record.spares:
            yield f"spares among the joiners: {record.spares}"
    if record.detail:
        yield record.detail


def table(parent: Element, sheet: Sheet) -> None:
    element = Element("table")
    SubElement(element, "caption").text = sheet.title
    head = SubElement(SubElement(element, "thead"), "tr")
    kinds = ["words" if column.is_text else "figure" for column in sheet.columns]
    for column, kind in zip(sheet.columns, kinds, strict=True):
        SubElement(head, "th", {"scope": "col", "class": kind}).text = column.title
    body = SubElement(element, "tbody")
    for cells in sheet.rows:
        row = SubElement(body, "tr")
        for index, (cell, kind) in enumerate(zip(cells, kinds, strict=True)):
            tag, scope = ("td", {}) if index else ("th", {"scope": "row"})
            shown = SubElement(row, tag, {"class": kind, **scope})
            shown.text = cell.text.replace("\n", ", ")
            if cell.tone is not Tone.PLAIN:
                shown.set("class", f"{kind} tone {cell.tone.name.lower()}")
    scrolling(parent, element, sheet.title)


def terms(listed: Element, terms: Mapping[str, str]) -> None:
    for name, meaning in terms.items():
        SubElement(listed, "dt").text = name
        SubElement(listed, "dd").text = meaning


def scrolling(parent: Element, wide: Element, name: str) -> None:
    """A wide table or drawing scrolls in a box of its own, which the keyboard reaches."""
    box = {"class": "scroll", "role": "region", "aria-label": name, "tabindex": "0"}
    SubElement(parent, "div", box).append(wide)
