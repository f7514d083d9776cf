"""The page as a whole. Every text goes through an element tree, which escapes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

from matplotlib.figure import Figure

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.drawings.canvas import svg
from liver_hpc.report.drawings.run import MOST_HANDOFFS
from liver_hpc.report.drawings.training import step_rows, timeline
from liver_hpc.report.page.shown import shown_config
from liver_hpc.report.report import strict
from liver_hpc.report.tables import Sheet, Tone, outcome_tone, remarks, sheets, summary_lines
from liver_hpc.report.wording import bytes_text, duration_text, layout_text, number_text
from liver_hpc.run.records import RunRecords

MOST_OPEN = 6
"""Of more handoffs than this only the costliest is unfolded at first."""


def page(records: RunRecords, figures: RunFigures, drawn: Mapping[str, Figure]) -> str:
    """The report as HTML in one file. drawn: the run's drawings, by name."""
    root = fromstring(_asset("page.html"))
    parts = {element.get("id"): element for element in root.iter()}
    times = timeline(records, figures.reconfigurations)
    name = records.attributes.get("name") or "run"
    texts = {
        "title": f"{name}: report",
        "style": _asset("page.css"),
        "name": name,
        "facts": " \u00b7 ".join(filter(None, _run_facts(records, figures, times.start_s))),
        "config": shown_config(records.attributes.get("config", "")),
        "steps": json.dumps(strict(step_rows(times)), separators=(",", ":")),
        "script": _asset("page.js"),
    }
    for part, text in texts.items():
        parts[part].text = text
    for index, words in enumerate(_verdict(figures).split("*")):
        SubElement(parts["verdict"], "strong" if index % 2 else "span").text = words
    for part in ("training", "nodes", "baselines"):
        if part in drawn:
            _drawing(parts[part], part, drawn[part])
        else:
            parts["main"].remove(parts[part])
    _cursor(parts["training"], drawn["training"])
    _handoffs(parts["handoffs"], figures, drawn)
    if not figures.reconfigurations:
        parts["main"].remove(parts["handoffs"])
    _terms(parts["summary"], summary_lines(figures, records))
    for sheet in sheets(figures, records):
        _table(parts["tables"], sheet)
    for note in remarks(figures):
        SubElement(parts["tables"], "p", {"class": "note"}).text = note.text
    _terms(parts["versions"], {k: v for k, v in records.attributes.items() if k != "config"})
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _asset(name: str) -> str:
    return files("liver_hpc.report.page").joinpath(name).read_text(encoding="utf-8")


def _run_facts(records: RunRecords, figures: RunFigures, start_s: float) -> Iterator[str]:
    yield records.attributes.get("host", "")
    if start_s > 0:
        yield f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%d %H:%M} UTC"
    yield duration_text(figures.wall_s)


def _verdict(figures: RunFigures) -> str:
    """The run in one line; what weighs more stands between asterisks."""
    words = f"*{figures.steps} {'step' if figures.steps == 1 else 'steps'}*"
    if attempts := figures.completed + figures.aborted:
        words += f", *{figures.completed} of {attempts} handoffs* completed. They cost "
        words += f"*{number_text(figures.cost_s)} s* of training in all, "
        words += f"*{number_text(figures.lost_s)} s* of it lost"
        worst = [each.lost_steps for each in figures.reconfigurations]
        most = max(filter(math.isfinite, worst), default=math.nan)
        if math.isfinite(most):
            words += f", at most *{number_text(most)} steps* at once"
        words += ". "
    else:
        words += " without a handoff. "
    return words + (f"Goodput *{figures.goodput:.1%}*." if math.isfinite(figures.goodput) else "")


def _cursor(section: Element, drawing: Figure) -> None:
    """The bounds of the time axis for the cursor, in the drawing's units."""
    (element,) = section.iter("svg")
    axes, width = drawing.axes[0], float(element.get("viewBox", "").split()[2])
    element.set("data-left", f"{axes.get_position().x0 * width:.2f}")
    element.set("data-right", f"{axes.get_position().x1 * width:.2f}")
    element.set("data-seconds", repr(float(axes.get_xlim()[1])))


# ---- handoffs


def _handoffs(section: Element, figures: RunFigures, drawn: Mapping[str, Figure]) -> None:
    attempts = figures.reconfigurations
    known = [each for each in attempts if math.isfinite(each.cost_s)]
    if len(attempts) > MOST_HANDOFFS:
        words = f"The {MOST_HANDOFFS} costliest of {len(attempts)} handoffs are drawn."
        SubElement(section, "p", {"class": "note"}).text = words
    costliest = max(known or attempts, key=lambda each: each.cost_s, default=None)
    for record in attempts:
        unfolded = len(attempts) <= MOST_OPEN or record is costliest
        details = SubElement(section, "details", {"open": ""} if unfolded else {})
        _handoff(details, record)
        name = f"handoff-{record.generation}"
        if name in drawn:
            _drawing(details, name, drawn[name])


def _handoff(details: Element, record: ReconfigurationFigures) -> None:
    summary = SubElement(details, "summary")
    badge = "completed" if record.completed else "not-completed"
    SubElement(summary, "span", {"class": f"number {badge}"}).text = str(record.generation)
    change = f"{layout_text(record.source)} \u2192 {layout_text(record.target)}"
    SubElement(summary, "h3").text = change
    tone = outcome_tone(record.outcome)
    SubElement(summary, "span", {"class": f"tone {tone.name.lower()}"}).text = record.outcome
    if math.isfinite(record.lost_s):
        words = f"cost {number_text(record.cost_s)} s, lost {number_text(record.lost_s)} s of it"
        if math.isfinite(record.lost_steps):
            words += f" ({number_text(record.lost_steps)} steps)"
        SubElement(summary, "span", {"class": "cost"}).text = words
    SubElement(details, "p", {"class": "note"}).text = " \u00b7 ".join(_facts(record))


def _facts(record: ReconfigurationFigures) -> Iterator[str]:
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
        yield f"{bytes_text(record.bytes_local)} stayed"
        if record.spares:
            yield f"spares among the joiners: {record.spares}"
    if record.detail:
        yield record.detail


# ---- parts


def _table(parent: Element, sheet: Sheet) -> None:
    table = Element("table")
    SubElement(table, "caption").text = sheet.title
    head = SubElement(SubElement(table, "thead"), "tr")
    kinds = ["words" if column.is_text else "figure" for column in sheet.columns]
    for column, kind in zip(sheet.columns, kinds, strict=True):
        SubElement(head, "th", {"scope": "col", "class": kind}).text = column.title
    body = SubElement(table, "tbody")
    for cells in sheet.rows:
        row = SubElement(body, "tr")
        for index, (cell, kind) in enumerate(zip(cells, kinds, strict=True)):
            tag, scope = ("td", {}) if index else ("th", {"scope": "row"})
            element = SubElement(row, tag, {"class": kind, **scope})
            element.text = cell.text.replace("\n", ", ")
            if cell.tone is not Tone.PLAIN:
                element.set("class", f"{kind} tone {cell.tone.name.lower()}")
    _scrolling(parent, table, sheet.title)


def _terms(listed: Element, terms: Mapping[str, str]) -> None:
    for name, meaning in terms.items():
        SubElement(listed, "dt").text = name
        SubElement(listed, "dd").text = meaning


def _scrolling(parent: Element, wide: Element, name: str) -> None:
    """A wide table or drawing scrolls in a box of its own, which the keyboard reaches."""
    box = {"class": "scroll", "role": "region", "aria-label": name, "tabindex": "0"}
    SubElement(parent, "div", box).append(wide)


def _drawing(parent: Element, name: str, drawing: Figure) -> None:
    element = svg(drawing, name)
    _scrolling(parent, element, element.get("aria-label", "").partition(".")[0])
