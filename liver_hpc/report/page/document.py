"""The page as a whole. Every text goes through an element tree, which escapes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from xml.etree.ElementTree import Element, SubElement, tostring

from liver_hpc.report.compare import Comparison, of_run
from liver_hpc.report.derive import RunFigures, run_figures
from liver_hpc.report.page import bars, lanes, nodes, timeline, traffic
from liver_hpc.report.page.series import Handoff, Story, story, thinned
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
LEGENDS = {
    "not-finite": "the loss or the gradient norm is not finite",
    "badge completed": "handoff, by the generation that it led to",
    "badge not-completed": "one that was not completed",
    "band boot": "joiners boot",
    "band prepare": "target prepared beside training",
    "band crossing": "crossing: last step of the old to the first of the new",
    "band release": "old world freed",
    "notice granted": "granted",
    "answer granted": "until its first step",
    "notice leave": "to be left",
    "answer leave": "until it was left",
    "deadline": "end of the window",
    "phase boot": "boot",
    "phase prepare": "prepare, alone",
    "phase connect": "connect, with the others",
    "phase transfer": "parameters",
    "phase first-step": "first step, optimizer state arriving",
    "phase update": "update",
    "phase release": "old world freed",
    "train": "trains",
    "wait": "waits, or what was over of a window",
    "last": "the others waited for this one",
}
"""What the classes of shapes mean, in the order of the legends."""


def page(records: RunRecords, comparisons: Sequence[Comparison] = ()) -> str:
    """The report as HTML in one file. comparisons: of a benchmark, else those of the run."""
    figures = run_figures(records)
    told = story(records, figures)
    name = records.attributes.get("name") or "run"
    root = Element("html", {"lang": "en"})
    _head(root, name)
    body = SubElement(root, "body")
    main = SubElement(body, "main")
    _opening(main, name, records, figures, told)
    _overview(main, told)
    _nodes(main, figures, told)
    _comparison(main, comparisons or of_run(figures, records))
    _handoffs(main, records, told)
    _tables(main, records, figures)
    _closing(main, records)
    SubElement(body, "div", {"id": "hover", "hidden": "", "aria-hidden": "true"})
    SubElement(body, "script", {"type": "application/json", "id": "steps"}).text = _steps(told)
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
    main: Element, name: str, records: RunRecords, figures: RunFigures, told: Story
) -> None:
    header = SubElement(main, "header")
    SubElement(header, "h1").text = name
    facts = [records.attributes.get("host", "")]
    if told.start_s > 0:
        began = datetime.fromtimestamp(told.start_s, UTC)
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


def _overview(main: Element, told: Story) -> None:
    section = _section(main, "Loss and tokens per second")
    if not told.points:
        SubElement(section, "p").text = "No step was recorded."
        return
    _drawing(section, timeline.training(told))


def _steps(told: Story) -> str:
    """What the cursor shows: end, step, loss and tokens/s of each step that is drawn."""
    rows = []
    for point in thinned(told.points, lambda point: point.loss):
        loss = round(point.loss, 4) if math.isfinite(point.loss) else None
        rate = round(point.tokens_per_s) if math.isfinite(point.tokens_per_s) else None
        rows.append([round(point.ended_s, 3), point.step, point.generation, loss, rate])
    return json.dumps(rows, separators=(",", ":"))


# ---- sections


def _nodes(main: Element, figures: RunFigures, told: Story) -> None:
    if not figures.notices:
        return
    section = _section(main, "Nodes")
    _drawing(section, nodes.draw(told, figures.notices))


def _comparison(main: Element, comparisons: Sequence[Comparison]) -> None:
    if not comparisons:
        return
    section = _section(main, "Live against checkpoint and restart")
    _drawing(section, bars.draw(comparisons))
    SubElement(section, "p", {"class": "note"}).text = (
        "Lost time: median of each method, with the least and the greatest; in brackets also the "
        "number of measurements."
    )


def _handoffs(main: Element, records: RunRecords, told: Story) -> None:
    if not told.handoffs:
        return
    section = _section(main, "Each handoff")
    drawings = {
        handoff: lanes.draw(handoff, found)
        for handoff in told.handoffs
        if (found := lanes.lanes_of(handoff, records.worker_phases))
    }
    _legend(section, list(drawings.values()))
    costliest = max(
        told.handoffs,
        key=lambda each: each.figures.lost_s if math.isfinite(each.figures.lost_s) else -1.0,
    )
    for handoff in told.handoffs:
        unfolded = len(told.handoffs) <= MOST_OPEN or handoff is costliest
        details = SubElement(section, "details", {"open": ""} if unfolded else {})
        _handoff(details, handoff, drawings.get(handoff), records)


def _handoff(
    details: Element, handoff: Handoff, drawing: Element | None, records: RunRecords
) -> None:
    record = handoff.figures
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
    SubElement(details, "p", {"class": "note"}).text = " \u00b7 ".join(_facts(handoff))
    if drawing is not None:
        _scrolling(details, drawing, f"Workers in handoff {record.generation}")
    of = traffic.matrix(records.traffic, record.generation)
    if of.names and record.completed:
        _table(details, traffic.sheet(of))


def _facts(handoff: Handoff) -> Iterator[str]:
    record = handoff.figures
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
            if cell.share is not None:
                element.set("style", f"--share:{cell.share:.3f}")
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


def _drawing(parent: Element, drawing: Element) -> None:
    _scrolling(parent, drawing, drawing.get("aria-label", "").partition(".")[0])
    _legend(parent, [drawing])


def _legend(parent: Element, drawings: Sequence[Element]) -> None:
    """Of the shapes that are drawn."""
    used = {shape.get("class", "") for drawing in drawings for shape in drawing.iter()}
    entries = {classes: words for classes, words in LEGENDS.items() if classes in used}
    if entries:
        listed = SubElement(parent, "ul", {"class": "legend"})
    for classes, words in entries.items():
        entry = SubElement(listed, "li")
        SubElement(entry, "i", {"class": f"key {classes}", "aria-hidden": "true"})
        SubElement(entry, "span").text = words
