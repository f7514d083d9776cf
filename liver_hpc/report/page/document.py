"""The page as a whole. Every text goes through an element tree, which escapes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement, tostring

from matplotlib.figure import Figure

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.drawings.canvas import svg
from liver_hpc.report.drawings.training import step_rows, timeline
from liver_hpc.report.tables import Sheet, Tone, outcome_tone, remarks, sheets, summary_lines
from liver_hpc.report.wording import bytes_text, duration_text, layout_text, number_text
from liver_hpc.run.records import RunRecords

MOST_OPEN = 6
"""Of more handoffs than this only the costliest is unfolded at first."""

WORDS = {
    "handoff": "the move of state from one layout to the next, numbered by the generation that it "
    "leads to",
    "pause": "wall time in which neither world trains",
    "lost time": "from the end of the source's last step to the end of the target's first, less "
    "the target's median step; in steps: divided by that median",
    "slowdown": "extra time of the steps beside PREPARE and RELEASE",
    "reconfiguration time": "from the notice to the end of the target's first step",
    "goodput": "steps done, each at the median of its world, over wall time",
}


def page(records: RunRecords, figures: RunFigures, drawn: Mapping[str, Figure]) -> str:
    """The report as HTML in one file. drawn: the run's drawings, by name."""
    name = records.attributes.get("name") or "run"
    times = timeline(records, figures.reconfigurations)
    root = Element("html", {"lang": "en"})
    _head(root, name)
    body = SubElement(root, "body")
    main = SubElement(body, "main")
    _opening(main, name, records, figures, times.start_s)
    _overview(main, drawn["training"], bool(records.steps))
    if "nodes" in drawn:
        _drawing(_section(main, "Nodes"), "nodes", drawn["nodes"])
    if "baselines" in drawn:
        section = _section(main, "Live against checkpoint and restart")
        _drawing(section, "baselines", drawn["baselines"])
    _handoffs(main, figures, drawn)
    _tables(main, records, figures)
    _closing(main, records)
    SubElement(body, "div", {"id": "hover", "hidden": "", "aria-hidden": "true"})
    steps = json.dumps(step_rows(records, times), separators=(",", ":"))
    SubElement(body, "script", {"type": "application/json", "id": "steps"}).text = steps
    SubElement(body, "script").text = _asset("page.js")
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _head(root: Element, name: str) -> None:
    head = SubElement(root, "head")
    SubElement(head, "meta", {"charset": "utf-8"})
    SubElement(head, "meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"})
    SubElement(head, "meta", {"name": "color-scheme", "content": "light dark"})
    # The page may be sent to anybody: whatever is in it, it fetches nothing.
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    policy += "img-src data:"
    SubElement(head, "meta", {"http-equiv": "Content-Security-Policy", "content": policy})
    SubElement(head, "link", {"rel": "icon", "href": "data:,"})
    SubElement(head, "title").text = f"{name}: report"
    SubElement(head, "style").text = _asset("page.css")


def _asset(name: str) -> str:
    return files("liver_hpc.report.page").joinpath(name).read_text(encoding="utf-8")


# ---- what one sees first


def _opening(
    main: Element, name: str, records: RunRecords, figures: RunFigures, start_s: float
) -> None:
    header = SubElement(main, "header")
    SubElement(header, "h1").text = name
    facts = [records.attributes.get("host", "")]
    if start_s > 0:
        began = datetime.fromtimestamp(start_s, UTC)
        facts.append(f"{began:%Y-%m-%d %H:%M} UTC")
    facts.append(duration_text(figures.wall_s))
    SubElement(header, "p", {"class": "facts"}).text = " \u00b7 ".join(filter(None, facts))
    verdict = SubElement(header, "p", {"class": "verdict"})
    for index, words in enumerate(_verdict(figures).split("*")):
        SubElement(verdict, "strong" if index % 2 else "span").text = words


def _verdict(figures: RunFigures) -> str:
    """The run in one line; what weighs more stands between asterisks."""
    words = f"*{figures.steps} {'step' if figures.steps == 1 else 'steps'}*"
    if attempts := figures.completed + figures.aborted:
        words += f", *{figures.completed} of {attempts} handoffs* completed. They cost "
        words += f"*{number_text(figures.lost_s)} s* of training in all"
        worst = [each.lost_steps for each in figures.reconfigurations]
        most = max(filter(math.isfinite, worst), default=math.nan)
        if math.isfinite(most):
            words += f", at most *{number_text(most)} steps* at once"
        words += ". "
    else:
        words += " without a handoff. "
    return words + (f"Goodput *{figures.goodput:.1%}*." if math.isfinite(figures.goodput) else "")


def _overview(main: Element, drawing: Figure, has_steps: bool) -> None:
    """With the bounds of its time axis for the cursor, in the drawing's units."""
    section = _section(main, "Loss and tokens per second")
    if not has_steps:
        SubElement(section, "p").text = "No step was recorded."
        return
    element = _drawing(section, "training", drawing)
    axes = drawing.axes[0]
    width = float(element.get("viewBox", "").split()[2])
    element.set("data-left", f"{axes.get_position().x0 * width:.2f}")
    element.set("data-right", f"{axes.get_position().x1 * width:.2f}")
    element.set("data-seconds", repr(float(axes.get_xlim()[1])))


# ---- sections


def _handoffs(main: Element, figures: RunFigures, drawn: Mapping[str, Figure]) -> None:
    attempts = figures.reconfigurations
    if not attempts:
        return
    section = _section(main, "Each handoff")
    costliest = max(attempts, key=lambda each: each.lost_s if math.isfinite(each.lost_s) else -1.0)
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
    SubElement(summary, "span", {"class": f"tone {tone}"}).text = record.outcome
    if math.isfinite(record.lost_s):
        words = f"lost {number_text(record.lost_s)} s"
        if math.isfinite(record.lost_steps):
            words += f", {number_text(record.lost_steps)} steps"
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
        yield f"{bytes_text(record.bytes_local)} stayed"
    if record.detail:
        yield record.detail


def _tables(main: Element, records: RunRecords, figures: RunFigures) -> None:
    section = _section(main, "Tables")
    _terms(section, summary_lines(figures, records))
    for sheet in sheets(figures, records):
        _table(section, sheet)
    for note in remarks(figures):
        SubElement(section, "p", {"class": "note"}).text = note.text


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
                element.set("class", f"{kind} tone {cell.tone}")
    _scrolling(parent, table, sheet.title)


def _closing(main: Element, records: RunRecords) -> None:
    words = SubElement(main, "details", {"class": "plain"})
    SubElement(words, "summary").text = "What the words mean"
    _terms(words, WORDS)
    others = {k: v for k, v in records.attributes.items() if k != "config"}
    versions = SubElement(main, "details", {"class": "plain"})
    SubElement(versions, "summary").text = "Versions and run file"
    _terms(versions, others)
    if config := records.attributes.get("config"):
        SubElement(versions, "pre", {"tabindex": "0"}).text = config


# ---- parts


def _section(main: Element, title: str) -> Element:
    section = SubElement(main, "section")
    SubElement(section, "h2").text = title
    return section


def _terms(parent: Element, terms: Mapping[str, str]) -> None:
    listed = SubElement(parent, "dl")
    for name, meaning in terms.items():
        SubElement(listed, "dt").text = name
        SubElement(listed, "dd").text = meaning


def _scrolling(parent: Element, wide: Element, name: str) -> None:
    """A wide table or drawing scrolls in a box of its own, which the keyboard reaches."""
    box = {"class": "scroll", "role": "region", "aria-label": name, "tabindex": "0"}
    SubElement(parent, "div", box).append(wide)


def _drawing(parent: Element, name: str, drawing: Figure) -> Element:
    element = svg(drawing, name)
    _scrolling(parent, element, element.get("aria-label", "").partition(".")[0])
    return element
