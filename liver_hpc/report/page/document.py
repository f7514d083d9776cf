"""The page as a whole. Every text goes through an element tree, which escapes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any
from xml.etree.ElementTree import Element, SubElement, fromstring, tostring

import yaml
from matplotlib.figure import Figure

from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.drawings.canvas import svg
from liver_hpc.report.drawings.run import MOST_HANDOFFS
from liver_hpc.report.drawings.training import step_rows, timeline
from liver_hpc.report.page.parts import (
    asset,
    handoff_facts,
    handoff_line,
    scrolling,
    table,
    terms,
    verdict,
)
from liver_hpc.report.tables import remarks, sheets, summary_lines
from liver_hpc.report.wording import duration_text, strict
from liver_hpc.run.records import RunRecords

MOST_OPEN = 6
"""Of more handoffs than this only the costliest is unfolded at first."""
HIDDEN = "not shown here"
_LISTS, _TEXTS = ("setup", "options", "step_options"), ("health_check", "export")


def page(records: RunRecords, figures: RunFigures, drawn: Mapping[str, Figure]) -> str:
    """The report as HTML in one file. drawn: the run's drawings, by name."""
    root = fromstring(asset("page.html"))
    parts = {element.get("id"): element for element in root.iter()}
    times = timeline(records, figures.reconfigurations)
    name = records.attributes.get("name") or "run"
    texts = {
        "title": f"{name}: report",
        "style": asset("page.css"),
        "name": name,
        "facts": " \u00b7 ".join(filter(None, _run_facts(records, figures, times.start_s))),
        "config": shown_config(records.attributes.get("config", "")),
        "steps": json.dumps(strict(step_rows(times)), separators=(",", ":")),
        "script": asset("cursor.js") + asset("page.js"),
    }
    for part, text in texts.items():
        parts[part].text = text
    verdict(parts["verdict"], figures)
    for part in ("training", "nodes", "baselines"):
        if part in drawn:
            _drawing(parts[part], part, drawn[part])
        else:
            parts["main"].remove(parts[part])
    _cursor(parts["training"], drawn["training"])
    _handoffs(parts["handoffs"], figures, drawn)
    if not figures.reconfigurations:
        parts["main"].remove(parts["handoffs"])
    terms(parts["summary"], summary_lines(figures, records))
    for sheet in sheets(figures, records):
        table(parts["tables"], sheet)
    for note in remarks(figures):
        SubElement(parts["tables"], "p", {"class": "note"}).text = note.text
    terms(parts["versions"], {k: v for k, v in records.attributes.items() if k != "config"})
    return "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def _run_facts(records: RunRecords, figures: RunFigures, start_s: float) -> Iterator[str]:
    yield records.attributes.get("host", "")
    if start_s > 0:
        yield f"{datetime.fromtimestamp(start_s, UTC):%Y-%m-%d %H:%M} UTC"
    yield duration_text(figures.wall_s)


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
    handoff_line(SubElement(details, "summary"), record)
    SubElement(details, "p", {"class": "note"}).text = " \u00b7 ".join(handoff_facts(record))


def _drawing(parent: Element, name: str, drawing: Figure) -> None:
    element = svg(drawing, name)
    scrolling(parent, element, element.get("aria-label", "").partition(".")[0])


# ---- the run file, as it may be handed around


def shown_config(text: str) -> str:
    """A run file's text with the lines of shell that sites log in with (`setup`, `health_check`),
    the environment that sbatch and srun are given (`export`), and that a container is (its
    options), replaced; as it is where there are none, or where it is no run file.
    """
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    shown = _shown(document, "")
    return text if shown == document else yaml.safe_dump(shown, sort_keys=False)


def _shown(value: Any, key: str) -> Any:
    """What stands under a key of the file."""
    if value and key in _TEXTS:
        return HIDDEN
    if isinstance(value, dict):
        return {name: _shown(inner, name) for name, inner in value.items()}
    if value and key in _LISTS and isinstance(value, list | str):
        return [f"({len(value)}, {HIDDEN})"]
    return [_shown(each, "") for each in value] if isinstance(value, list) else value
