"""The report's tables as data: what a terminal prints, a page shows too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from liver_hpc.report.derive import (
    ABORTED,
    COMPLETED,
    GenerationFigures,
    NoticeFigures,
    ReconfigurationFigures,
    RunFigures,
)
from liver_hpc.report.wording import (
    NOTHING,
    bytes_text,
    duration_text,
    layout_text,
    number_text,
)
from liver_hpc.run.records import BaselineRecord, NetworkRecord, RunRecords

DETAIL_LENGTH = 300
_DISTURBED = "*"


class Tone(StrEnum):
    """How a cell is meant; the words say it too."""

    PLAIN = "plain"
    GOOD = "good"
    WARNING = "warning"
    BAD = "bad"
    DIM = "dim"


@dataclass(frozen=True)
class Cell:
    """share: of the largest cell, where a page shades it; from 0 to 1."""

    text: str
    tone: Tone = Tone.PLAIN
    share: float | None = None


@dataclass(frozen=True)
class Column:
    """name: a line break where a narrow head may have one. is_text: aligned to the left."""

    name: str
    is_text: bool = False
    may_wrap: bool = False

    @property
    def title(self) -> str:
        """The name in one line."""
        return self.name.replace("-\n", "").replace("\n", " ")


@dataclass(frozen=True)
class Sheet:
    """A titled table. groups: columns that a narrow form puts above each other, and the name and
    alignment of what they make; every column is in one group, in order."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    gap: int = 2
    groups: tuple[tuple[Column, int], ...] = ()

    def stacked(self) -> Sheet:
        """The narrow form: a row of several lines, one for each column of a group."""
        rows = [tuple(self._stacked_cells(row)) for row in self.rows]
        return Sheet(self.title, tuple(column for column, _ in self.groups), tuple(rows), gap=1)

    def _stacked_cells(self, row: tuple[Cell, ...]) -> Iterator[Cell]:
        start = 0
        for _, count in self.groups:
            cells, start = row[start : start + count], start + count
            tone = cells[0].tone if count == 1 else Tone.PLAIN
            yield Cell("\n".join(cell.text for cell in cells), tone)


def sheets(figures: RunFigures, records: RunRecords) -> list[Sheet]:
    """All tables that a run has rows for."""
    found = []
    if figures.generations:
        found.append(_worlds(figures.generations))
    if figures.reconfigurations:
        found.append(_reconfigurations(figures.reconfigurations))
        found.append(_phases(figures.reconfigurations))
    if figures.notices:
        found.append(_notices(figures.notices))
    if records.baselines:
        found.append(_baselines(records.baselines))
    return found


def summary_lines(figures: RunFigures, records: RunRecords) -> dict[str, str]:
    """The run in a few lines, by their names."""
    attributes = records.attributes
    steps = f"{figures.steps} in {duration_text(figures.wall_s)}"
    if figures.missing_steps:
        steps += f", {figures.missing_steps} more were not recorded"
    lines = {
        "run": " on ".join(attributes[key] for key in ("name", "host") if attributes.get(key)),
        "steps": steps,
        "tokens/s": number_text(figures.tokens_per_s),
        "goodput": NOTHING if math.isnan(figures.goodput) else f"{figures.goodput:.1%}",
        "handoffs": f"{figures.completed} completed, {figures.aborted} aborted",
    }
    diverged = [step.step for step in records.steps if not step.is_finite]
    if diverged:
        steps = "1 step" if len(diverged) == 1 else f"{len(diverged)} steps"
        lines["not finite"] = f"loss or gradient norm of {steps}, first of step {diverged[0]}"
    if records.networks:
        lines["transport"] = _transports(records.networks)
    if figures.reconfigurations:
        lines["cost"] = (
            f"lost {duration_text(figures.lost_s)}, slowdown {duration_text(figures.slowdown_s)}"
        )
        lines["moved"] = (
            f"{bytes_text(figures.bytes_moved)}; {bytes_text(figures.bytes_local)} stayed in place"
        )
    return {name: line for name, line in lines.items() if line}


def remarks(figures: RunFigures) -> list[Cell]:
    """What a table has no room for."""
    found = [
        Cell(f"generation {attempt.generation} {attempt.outcome}: {_cut(attempt.detail)}")
        for attempt in figures.reconfigurations
        if attempt.detail
    ]
    disturbed = [world.median_is_disturbed for world in figures.generations]
    disturbed += [attempt.median_is_disturbed for attempt in figures.reconfigurations]
    if any(disturbed):
        found.append(Cell(f"{_DISTURBED} no undisturbed step to take the median of", Tone.DIM))
    return found


def outcome_tone(outcome: str) -> Tone:
    """Of a handoff attempt."""
    return {COMPLETED: Tone.GOOD, ABORTED: Tone.WARNING}.get(outcome, Tone.BAD)


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


def _worlds(worlds: Sequence[GenerationFigures]) -> Sheet:
    columns = (
        Column("generation"),
        Column("layout", is_text=True),
        Column("steps"),
        Column("median step s"),
        Column("tokens/s"),
    )
    rows = [
        _cells(
            str(world.generation),
            layout_text(world.layout),
            str(world.steps),
            _marked(world.median_step_s, world.median_is_disturbed),
            number_text(world.tokens_per_s),
        )
        for world in worlds
    ]
    return Sheet("Worlds", columns, tuple(rows))


def _reconfigurations(attempts: Sequence[ReconfigurationFigures]) -> Sheet:
    """One line an attempt where there is room, else what belongs together is stacked."""
    ends = [Column("from", is_text=True), Column("to", is_text=True)]
    stacks: list[tuple[Column, list[Column]]] = [
        (Column("gen"), []),
        (Column("from\nto", is_text=True), ends),
        (Column("pause\ns"), []),
        (Column("lost s\nsteps"), [Column("lost\ns"), Column("lost\nsteps")]),
        (Column("slow-\ndown s"), []),
        (Column("reconf.\ns"), []),
        (Column("moved\nstayed"), [Column("bytes\nmoved"), Column("bytes\nstayed")]),
        (Column("digest\nequal", is_text=True), []),
        (Column("outcome", is_text=True), []),
    ]
    columns = tuple(column for head, own in stacks for column in own or [head])
    groups = tuple((head, len(own) or 1) for head, own in stacks)
    rows = tuple(tuple(_attempt_cells(attempt)) for attempt in attempts)
    return Sheet("Reconfigurations", columns, rows, groups=groups)


def _attempt_cells(attempt: ReconfigurationFigures) -> Iterator[Cell]:
    moved = [NOTHING, NOTHING, NOTHING]
    if attempt.completed:
        moved = [bytes_text(attempt.bytes_moved), bytes_text(attempt.bytes_local)]
        moved.append("yes" if attempt.digest_equal else "NO")
    yield from _cells(
        str(attempt.generation),
        layout_text(attempt.source),
        layout_text(attempt.target),
        number_text(attempt.pause_s),
        number_text(attempt.lost_s),
        _marked(attempt.lost_steps, attempt.median_is_disturbed),
        number_text(attempt.slowdown_s),
        number_text(attempt.reconfiguration_s),
        *moved[:2],
    )
    yield Cell(moved[2], Tone.BAD if moved[2] == "NO" else Tone.PLAIN)
    yield Cell(attempt.outcome, outcome_tone(attempt.outcome))


def _phases(attempts: Sequence[ReconfigurationFigures]) -> Sheet:
    names = ("boot", "prepare", "boundary", "transfer", "commit", "release")
    columns = (Column("gen"), Column("notice", is_text=True, may_wrap=True), *map(Column, names))
    rows = [
        _cells(
            str(attempt.generation),
            attempt.notice,
            *map(number_text, asdict(attempt.phases).values()),
        )
        for attempt in attempts
    ]
    return Sheet("Seconds in each phase", columns, tuple(rows))


def _notices(notices: Sequence[NoticeFigures]) -> Sheet:
    names = ["window\ns", "left or\njoined s", "gen", "pause\ns", "lost\nsteps", "steps\nagain"]
    text = (Column("notice", is_text=True), Column("node", is_text=True))
    columns = (*text, *map(Column, names), Column("outcome", is_text=True))
    tones = {"in time": Tone.GOOD, "in use": Tone.GOOD, "not needed": Tone.DIM}
    rows = [
        (
            *_cells(
                record.kind,
                record.node or NOTHING,
                number_text(notice.window_s),
                number_text(notice.left_s),
                str(record.generation) if record.generation >= 0 else NOTHING,
                number_text(notice.pause_s),
                number_text(notice.lost_steps),
                str(notice.repeated_steps),
            ),
            Cell(record.outcome, tones.get(record.outcome, Tone.BAD)),
        )
        for notice in notices
        for record in [notice.record]
    ]
    return Sheet("Nodes", columns, tuple(rows), gap=1)


def _baselines(baselines: Sequence[BaselineRecord]) -> Sheet:
    phases = ["save", "stop", "launch", "import", "groups", "load", "first step", "total"]
    names = [phase.replace(" ", "\n") for phase in phases]
    columns = (Column("method, from, to", is_text=True), *map(Column, names))
    rows = []
    for baseline in baselines:
        took_s = [getattr(baseline, f"{phase.replace(' ', '_')}_s") for phase in phases]
        ends = f"{layout_text(baseline.source)}, {layout_text(baseline.target)}"
        rows.append(_cells(f"{baseline.method}\n{ends}", *map(number_text, took_s)))
    return Sheet("Checkpoint and restart, seconds in each phase", columns, tuple(rows), gap=1)


def _cells(*texts: str) -> tuple[Cell, ...]:
    return tuple(map(Cell, texts))


def _cut(detail: str) -> str:
    """The JSON has all of it."""
    return detail if len(detail) <= DETAIL_LENGTH else f"{detail[:DETAIL_LENGTH].rstrip()} ..."


def _marked(value: float, disturbed: bool) -> str:
    text = number_text(value)
    return text + _DISTURBED if disturbed and text != NOTHING else text
