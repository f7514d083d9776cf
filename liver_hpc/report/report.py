"""The report of a run: tables for a terminal, one JSON document for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from liver_hpc.report.derive import run_figures
from liver_hpc.report.tables import Cell, Sheet, remarks, sheets, summary_lines, trace_sheet
from liver_hpc.report.wording import duration_text, number_text, strict
from liver_hpc.run.records import TABLES, RunRecords

NAMING = ("kind", "node", "allocation", "generation", "outcome", "action")
"""What a notice's derived figures are told with."""


# ---- for programs


def report_json(records: RunRecords) -> dict[str, Any]:
    """All records with all that is derived from them; a figure that is not known is None.

    Keys: attributes, summary, generations, steps, reconfigurations, recoveries, notices, baselines,
    networks, worker_phases, traffic, crossings, evaluations, metrics, holdings, placements,
    observations, stragglers. Lengths of time are in seconds, points in time in seconds since the
    epoch.
    """
    figures = run_figures(records)
    summary = asdict(figures)
    document = {
        "attributes": records.attributes,
        "summary": summary,
        "generations": summary.pop("generations"),
        **{name: [asdict(row) for row in getattr(records, name)] for name in TABLES},
        "reconfigurations": summary.pop("reconfigurations"),
        "recoveries": [*map(_recovery, summary.pop("recoveries"))],
        "notices": [*map(_notice, summary.pop("notices"))],
    }
    for step in document["steps"]:
        step["step_s"] = step["ended_s"] - step["started_s"]
    known: dict[str, Any] = strict(document)
    return known


def _notice(figures: dict[str, Any]) -> dict[str, Any]:
    """A notice as it was recorded; what is derived of it, and what names it, under "figures"."""
    record = figures.pop("record")
    return {**record, "figures": {name: record[name] for name in NAMING} | figures}


def _recovery(figures: dict[str, Any]) -> dict[str, Any]:
    """A recovery as it was recorded, and what is derived of it."""
    record: dict[str, Any] = figures.pop("record")
    return record | figures


# ---- for a terminal


def print_report(records: RunRecords, console: Console) -> None:
    """Tables of the run, its worlds, its reconfigurations and its baselines, in the widest form
    that the console has room for; the narrowest is a list of names and figures."""
    figures = run_figures(records)
    grid = _grid()
    for name, line in summary_lines(figures, records).items():
        grid.add_row(name, Text(line))
    console.print(grid)
    for sheet in sheets(figures, records):
        console.print(_fitting(sheet, console))
    notes = remarks(figures)
    if notes:
        console.print()
    for note in notes:
        console.print(_text(note))


def print_trace(replayed: Mapping[str, Any], console: Console) -> None:
    """What a trace would have cost each strategy, and which costs that was judged by."""
    costs = {
        name: f"{number_text(replayed[name]['lost_s'])} s lost in "
        f"{number_text(replayed[name]['busy_s'])} s"
        for name in ("grow", "shrink", "restart")
    }
    costs["restart"] += f": {replayed['restart_is']}"
    grid = _grid()
    grid.add_row("trace", f"{replayed['events']} events in {duration_text(replayed['length_s'])}")
    for name, text in costs.items():
        grid.add_row(name, Text(text))
    console.print(grid)
    console.print(_fitting(trace_sheet(replayed["strategies"]), console))


def _fitting(sheet: Sheet, console: Console) -> Group:
    """A title of its own line, as one of rich's wraps at the table's width."""
    return Group(Text(f"\n{sheet.title}", "bold"), _fitting_table(sheet, console))


def _fitting_table(sheet: Sheet, console: Console) -> Table:
    unlimited = console.options.update(max_width=10 * console.width)
    for form, gap in ((sheet, 2), (sheet, 1), (sheet.stacked(), 1)):
        table = _table(form, gap)
        if console.measure(table, options=unlimited).minimum <= console.width:
            return table
    return _listed(sheet)


def _table(sheet: Sheet, gap: int) -> Table:
    table = Table(box=SIMPLE_HEAD)
    table.show_edge = False
    table.padding = (0, gap - 1, 0, 0)
    for index, column in enumerate(sheet.columns):
        texts = (column.name, *(row[index].text for row in sheet.rows))
        longest = max(cell_len(line) for text in texts for line in text.splitlines() or [""])
        table.add_column(
            column.name,
            justify="left" if column.is_text else "right",
            no_wrap=not column.may_wrap,
            overflow="fold",
            min_width=None if column.may_wrap else longest,
        )
    for row in sheet.rows:
        table.add_row(*map(_text, row))
    return table


def _listed(sheet: Sheet) -> Table:
    """Every cell on a line of its own, behind the name of its column."""
    grid = _grid()
    for number, row in enumerate(sheet.rows):
        if number:
            grid.add_row()
        for column, cell in zip(sheet.columns, row, strict=True):
            grid.add_row(column.title, _text(cell))
    return grid


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    return grid


def _text(cell: Cell) -> Text:
    return Text(cell.text, cell.tone)
