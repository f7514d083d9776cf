"""The report of a run: tables for a terminal, one JSON document for programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from liver_hpc.metrics.derive import (
    ABORTED,
    COMPLETED,
    GenerationFigures,
    NoticeFigures,
    ReconfigurationFigures,
    RunFigures,
    notice_figures,
    run_figures,
)
from liver_hpc.metrics.records import BaselineRecord, NetworkRecord, RunRecords
from liver_hpc.metrics.wording import (
    NOTHING,
    bytes_text,
    duration_text,
    layout_text,
    number_text,
)

DETAIL_LENGTH = 300
_DISTURBED = "*"
_STYLES = {COMPLETED: "green", ABORTED: "yellow"}

Cell = str | Text


# ---- for programs


def report_json(records: RunRecords) -> dict[str, Any]:
    """All records with all that is derived from them; a figure that is not known is None.

    Keys: attributes, summary, generations, steps, reconfigurations, notices, baselines,
    networks. Lengths of time are in seconds, points in time in seconds since the epoch.
    """
    figures = run_figures(records)
    summary = {
        name: value
        for name, value in asdict(figures).items()
        if name not in ("generations", "reconfigurations")
    }
    attempts = zip(records.reconfigurations, figures.reconfigurations, strict=True)
    document = {
        "attributes": records.attributes,
        "summary": summary,
        "generations": [asdict(world) for world in figures.generations],
        "steps": [asdict(s) | {"step_s": s.ended_s - s.started_s} for s in records.steps],
        "reconfigurations": [asdict(record) | asdict(derived) for record, derived in attempts],
        "notices": _notice_rows(records),
        "baselines": [asdict(baseline) for baseline in records.baselines],
        "networks": [asdict(network) for network in records.networks],
    }
    strict: dict[str, Any] = _strict(document)
    return strict


def _notice_rows(records: RunRecords) -> list[dict[str, Any]]:
    """Each notice as it was recorded; what is derived of it under "figures"."""
    rows = sorted(records.notices, key=lambda notice: notice.at_s)
    figures = notice_figures(records)
    return [asdict(r) | {"figures": asdict(f)} for r, f in zip(rows, figures, strict=True)]


def _strict(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _strict(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---- for a terminal


def print_report(records: RunRecords, console: Console) -> None:
    """Tables of the run, its worlds, its reconfigurations and its baselines; fits 80 columns."""
    figures = run_figures(records)
    parts = [_summary(figures, records)]
    if figures.generations:
        parts.append(_worlds(figures.generations))
    if figures.reconfigurations:
        parts.append(_reconfigurations(figures.reconfigurations, console))
        parts.append(_phases(figures.reconfigurations))
    if records.notices:
        parts.append(_notices(notice_figures(records)))
    if records.baselines:
        parts.append(_baselines(records.baselines))
    for part in parts:
        console.print(part)
    for line in _remarks(figures):
        console.print(line)


def _summary(figures: RunFigures, records: RunRecords) -> Table:
    attributes = records.attributes
    steps = f"{figures.steps} in {duration_text(figures.wall_s)}"
    if figures.missing_steps:
        steps += f", {figures.missing_steps} more were not recorded"
    handoffs = f"{figures.completed} completed, {figures.aborted} aborted"
    lines = {
        "run": " on ".join(attributes[key] for key in ("name", "host") if attributes.get(key)),
        "steps": steps,
        "tokens/s": number_text(figures.tokens_per_s),
        "goodput": NOTHING if math.isnan(figures.goodput) else f"{figures.goodput:.1%}",
        "handoffs": handoffs,
    }
    if records.networks:
        lines["transport"] = _transports(records.networks)
    if figures.reconfigurations:
        lines["cost"] = (
            f"lost {duration_text(figures.lost_s)}, slowdown {duration_text(figures.slowdown_s)}"
        )
        lines["moved"] = (
            f"{bytes_text(figures.bytes_moved)}; {bytes_text(figures.bytes_local)} stayed in place"
        )
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, line in lines.items():
        if line:
            grid.add_row(name, Text(line))
    return grid


def _transports(networks: Sequence[NetworkRecord]) -> str:
    """What the collectives used; where that has changed, in which worlds."""
    by_generation: dict[int, str] = {}
    for record in networks:
        others = by_generation.get(record.generation)
        by_generation[record.generation] = ", ".join(filter(None, [others, record.transport]))
    users: dict[str, list[str]] = {}
    for generation, used in by_generation.items():
        users.setdefault(used, []).append(str(generation))
    if len(users) == 1:
        return next(iter(users))
    return "; ".join(f"{used} (gen {', '.join(worlds)})" for used, worlds in users.items())


def _worlds(worlds: Sequence[GenerationFigures]) -> Table:
    table = _table("Worlds", ["generation", "layout", "steps", "median step s", "tokens/s"], [1])
    for world in worlds:
        table.add_row(
            str(world.generation),
            layout_text(world.layout),
            str(world.steps),
            _marked(world.median_step_s, world.median_is_disturbed),
            number_text(world.tokens_per_s),
        )
    return table


def _reconfigurations(attempts: Sequence[ReconfigurationFigures], console: Console) -> Table:
    """One line an attempt where there is room, else what belongs together is stacked."""
    names = [
        ["gen"],
        ["from", "to"],
        ["pause\ns"],
        ["lost\ns", "lost\nsteps"],
        ["slow-\ndown s"],
        ["reconf.\ns"],
        ["bytes\nmoved", "bytes\nstayed"],
        ["digest\nequal"],
        ["outcome"],
    ]
    cells = [_attempt_cells(attempt) for attempt in attempts]
    table = _table("Reconfigurations", [name for group in names for name in group], [1, 2, 10, 11])
    for row in cells:
        table.add_row(*[cell for group in row for cell in group])
    unlimited = console.options.update(max_width=10 * console.width)
    if console.measure(table, options=unlimited).maximum <= console.width:
        return table
    for group, name in ((1, "from\nto"), (3, "lost s\nsteps"), (6, "moved\nstayed")):
        names[group] = [name]
    table = _table("Reconfigurations", [name for (name,) in names], [1, 7, 8], gap=1)
    for row in cells:
        table.add_row(*[Text("\n").join(map(_as_text, group)) for group in row])
    return table


def _attempt_cells(attempt: ReconfigurationFigures) -> list[list[Cell]]:
    """The cells of one attempt, in the groups that a narrow terminal stacks."""
    moved = [NOTHING, NOTHING, NOTHING]
    if attempt.completed:
        moved = [bytes_text(attempt.bytes_moved), bytes_text(attempt.bytes_local)]
        moved.append("yes" if attempt.digest_equal else "NO")
    digest_style = "bold red" if moved[2] == "NO" else ""
    return [
        [str(attempt.generation)],
        [layout_text(attempt.source), layout_text(attempt.target)],
        [number_text(attempt.pause_s)],
        [
            number_text(attempt.lost_s),
            _marked(attempt.lost_steps, attempt.median_is_disturbed),
        ],
        [number_text(attempt.slowdown_s)],
        [number_text(attempt.reconfiguration_s)],
        [moved[0], moved[1]],
        [Text(moved[2], digest_style)],
        [Text(attempt.outcome, _STYLES.get(attempt.outcome, "bold red"))],
    ]


def _phases(attempts: Sequence[ReconfigurationFigures]) -> Table:
    names = ["gen", "notice", "boot", "prepare", "boundary", "transfer", "commit", "release"]
    table = _table("Seconds in each phase", names, [1])
    table.columns[1].no_wrap = False
    table.columns[1].overflow = "fold"
    for attempt in attempts:
        durations = map(number_text, asdict(attempt.phases).values())
        table.add_row(str(attempt.generation), Text(attempt.notice), *durations)
    return table


def _notices(notices: Sequence[NoticeFigures]) -> Table:
    names = ["notice", "node", "window\ns", "left or\njoined s", "gen", "pause\ns", "lost\nsteps"]
    table = _table("Nodes", [*names, "steps\nagain", "outcome"], [0, 1, 8], gap=1)
    for notice in notices:
        style = {"in time": "green", "in use": "green", "not needed": "dim"}
        table.add_row(
            notice.kind,
            notice.node or NOTHING,
            number_text(notice.window_s),
            number_text(notice.left_s),
            str(notice.generation) if notice.generation >= 0 else NOTHING,
            number_text(notice.pause_s),
            number_text(notice.lost_steps),
            str(notice.repeated_steps),
            Text(notice.outcome, style.get(notice.outcome, "bold red")),
        )
    return table


def _baselines(baselines: Sequence[BaselineRecord]) -> Table:
    phases = ["save", "stop", "launch", "import", "groups", "load", "first step", "total"]
    names = ["method, from, to", *(phase.replace(" ", "\n") for phase in phases)]
    table = _table("Checkpoint and restart, seconds in each phase", names, [0], gap=1)
    for baseline in baselines:
        took_s = [getattr(baseline, f"{phase.replace(' ', '_')}_s") for phase in phases]
        ends = f"{layout_text(baseline.source)}, {layout_text(baseline.target)}"
        table.add_row(Text(f"{baseline.method}\n{ends}"), *map(number_text, took_s))
    return table


def _remarks(figures: RunFigures) -> list[Text]:
    """What a table has no room for."""
    remarks = [
        Text(f"generation {attempt.generation} {attempt.outcome}: {_cut(attempt.detail)}")
        for attempt in figures.reconfigurations
        if attempt.detail
    ]
    disturbed = [world.median_is_disturbed for world in figures.generations]
    disturbed += [attempt.median_is_disturbed for attempt in figures.reconfigurations]
    if any(disturbed):
        remarks.append(Text(f"{_DISTURBED} no undisturbed step to take the median of", "dim"))
    return [Text(), *remarks] if remarks else []


def _table(title: str, names: Sequence[str], left: Sequence[int], gap: int = 2) -> Table:
    """A table of aligned figures; the columns in `left` are text, `gap` blanks are between two."""
    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    table.show_edge = False
    table.padding = (0, gap - 1, 0, 0)
    for number, name in enumerate(names):
        if number in left:
            table.add_column(name, justify="left", no_wrap=True)
        else:
            table.add_column(name, justify="right", no_wrap=True)
    return table


def _cut(detail: str) -> str:
    """The JSON has all of it."""
    return detail if len(detail) <= DETAIL_LENGTH else f"{detail[:DETAIL_LENGTH].rstrip()} ..."


def _marked(value: float, disturbed: bool) -> str:
    text = number_text(value)
    return text + _DISTURBED if disturbed and text != NOTHING else text


def _as_text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)
