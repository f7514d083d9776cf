"""The report's tables as data: what a terminal prints, a page shows too."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from liver_hpc.report.derive import (
    NoticeFigures,
    PhaseFigures,
    ReconfigurationFigures,
    RunFigures,
)
from liver_hpc.report.hours import HoursFigures, WorkerHours
from liver_hpc.report.wording import NOTHING, bytes_text, duration_text, layout_text, number_text
from liver_hpc.report.worlds import ABORTED, COMPLETED
from liver_hpc.run.records import BaselineRecord, EvaluationRecord, NetworkRecord, RunRecords

DETAIL_LENGTH = 300
_DISTURBED = "*"


class Tone(StrEnum):
    """How a cell is meant, and how a terminal shows it; the words say it too."""

    PLAIN = ""
    GOOD = "green"
    WARNING = "yellow"
    BAD = "bold red"
    DIM = "dim"


@dataclass(frozen=True)
class Cell:
    text: str
    tone: Tone = Tone.PLAIN


@dataclass(frozen=True)
class Column:
    """name: a line break where a narrow head may have one. content: what it has in a row. is_text:
    aligned to the left. stack: the name of what it makes with its neighbours of the same stack,
    where there is little room."""

    name: str
    content: Callable[[Any], str | Cell]
    is_text: bool = False
    may_wrap: bool = False
    stack: str = ""

    @property
    def title(self) -> str:
        """The name in one line."""
        return self.name.replace("-\n", "").replace("\n", " ")

    def cell(self, row: Any) -> Cell:
        content = self.content(row)
        return Cell(content) if isinstance(content, str) else content


@dataclass(frozen=True)
class Sheet:
    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]

    def stacked(self) -> Sheet:
        """The narrow form: a row of several lines, one for each column of a stack."""
        by_stack = groupby(enumerate(self.columns), lambda each: each[1].stack or each[1].name)
        groups = [(name, list(group)) for name, group in by_stack]
        columns = [replace(group[0][1], name=name) for name, group in groups]
        rows = [[_above([row[i] for i, _ in group]) for _, group in groups] for row in self.rows]
        return Sheet(self.title, columns, rows)


def _above(cells: Sequence[Cell]) -> Cell:
    return cells[0] if len(cells) == 1 else Cell("\n".join(cell.text for cell in cells))


def sheets(figures: RunFigures, records: RunRecords) -> list[Sheet]:
    """All tables that a run has rows for."""
    tables: dict[str, tuple[Sequence[Column], Sequence[Any]]] = {
        "Worlds": (_WORLDS, figures.generations),
        "Reconfigurations": (_RECONFIGURATIONS, figures.reconfigurations),
        "Seconds in each phase": (_PHASES, figures.reconfigurations),
        "Where the lost time went, and one median step; seconds": (
            _PATH,
            [attempt for attempt in figures.reconfigurations if attempt.path is not None],
        ),
        "Workers that were lost; seconds": (_RECOVERIES, figures.recoveries),
        "Nodes": (_NOTICES, figures.notices),
        f"{figures.hours.unit} of nodes": (_HOURS, _by_node(figures.hours)),
        "Nodes that straggled": (_STRAGGLERS, records.stragglers),
        "What the run would have done": (_OBSERVATIONS, records.observations),
        "Checkpoint and restart, seconds in each phase": (_RESTARTS, records.baselines),
    }
    return [
        Sheet(title, columns, [[column.cell(row) for column in columns] for row in rows])
        for title, (columns, rows) in tables.items()
        if rows
    ]


def trace_sheet(strategies: Sequence[Mapping[str, Any]]) -> Sheet:
    """What each strategy comes to under a trace."""
    rows = [[column.cell(row) for column in _STRATEGIES] for row in strategies]
    return Sheet("What the trace would have cost; hours of workers", _STRATEGIES, rows)


def summary_lines(figures: RunFigures, records: RunRecords) -> dict[str, str]:
    """The run in a few lines, by their names."""
    attributes = records.attributes
    steps = f"{figures.steps} in {duration_text(figures.wall_s)}"
    if figures.steps_again:
        steps += f", {figures.steps_again} of them done again"
    if figures.missing_steps:
        steps += f", {figures.missing_steps} more were not recorded"
    failed = f", {figures.failed} failed" if figures.failed else ""
    lines = {
        "run": " on ".join(attributes[key] for key in ("name", "host") if attributes.get(key)),
        "steps": steps,
        "tokens/s": number_text(figures.tokens_per_s),
        "goodput": NOTHING if math.isnan(figures.goodput) else f"{figures.goodput:.1%}",
        "handoffs": f"{figures.completed} completed, {figures.aborted} aborted{failed}",
    }
    hours = figures.hours
    if hours.nodes:
        parts = ("training", "waiting", "lost")
        texts = (f"{part} {number_text(getattr(hours.total, f'{part}_h'))}" for part in parts)
        lines[hours.unit] = f"{number_text(hours.total.held_h)} held: {', '.join(texts)}"
    if figures.recoveries:
        again = sum(each.steps_again for each in figures.recoveries)
        times = "once" if len(figures.recoveries) == 1 else f"{len(figures.recoveries)} times"
        stood = duration_text(math.fsum(each.stood_s for each in figures.recoveries))
        lines["recovered"] = f"{times} from memory: {stood} without a step, {again} done again"
    if records.evaluations:
        lines["validation"] = _validation(records.evaluations, figures)
    if records.metrics:
        last = {metric.name: metric.value for metric in records.metrics}
        values = (f"{name} {number_text(value)}" for name, value in sorted(last.items()))
        lines["metrics"] = f"{', '.join(values)}; the last values"
    diverged = sorted({step.step for step in records.steps if not step.is_finite})
    if diverged:
        steps = "1 step" if len(diverged) == 1 else f"{len(diverged)} steps"
        lines["not finite"] = f"loss or gradient norm of {steps}, first of step {diverged[0]}"
    if records.networks:
        lines["transport"] = _transports(records.networks)
    if figures.reconfigurations:
        lines["cost"] = (
            f"{duration_text(figures.cost_s)}: lost {duration_text(figures.lost_s)}, "
            f"slowdown {duration_text(figures.slowdown_s)}"
            + (f"; what {figures.unknown} lost is not known" if figures.unknown else "")
        )
        between = figures.bytes_between_nodes
        lines["moved"] = (
            f"{bytes_text(figures.bytes_moved)}"
            + (f", {bytes_text(between)} of it between nodes" if between else "")
            + f"; {bytes_text(figures.bytes_local)} copied within workers"
        )
        if figures.spares:
            lines["spares"] = f"{figures.spares} joiners had booted before their handoff"
    return {name: line for name, line in lines.items() if line}


def _validation(evaluations: Sequence[EvaluationRecord], figures: RunFigures) -> str:
    """The last loss, and the least one where that is another."""
    last = evaluations[-1]
    known = [each for each in evaluations if math.isfinite(each.loss)]
    least = min(known, key=attrgetter("loss"), default=last)
    words = f"loss {last.loss:.4f} after {last.step} steps"
    if least.loss < last.loss:
        words += f", least {least.loss:.4f} after {least.step}"
    number = figures.evaluations
    times = "1 evaluation" if number == 1 else f"{number} evaluations"
    return f"{words}; {times} in {duration_text(figures.evaluation_s)}"


def _by_node(hours: WorkerHours) -> Sequence[HoursFigures]:
    """Each partition, then its nodes; nothing of a run on one machine, whose sum says it all."""
    if len(hours.nodes) < 2:
        return ()
    found = []
    for partition in hours.partitions:
        found.append(replace(partition, node="all"))
        found += [each for each in hours.nodes if each.partition == partition.partition]
    return found


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
    by_generation: dict[int, list[str]] = defaultdict(list)
    for record in networks:
        by_generation[record.generation].append(record.transport)
    users: dict[str, list[str]] = defaultdict(list)
    for generation, transports in by_generation.items():
        users[", ".join(transports)].append(str(generation))
    if len(users) == 1:
        return next(iter(users))
    return "; ".join(f"{used} (gen {', '.join(worlds)})" for used, worlds in users.items())


def _cut(detail: str) -> str:
    """The JSON has all of it."""
    return detail if len(detail) <= DETAIL_LENGTH else f"{detail[:DETAIL_LENGTH].rstrip()} ..."


def _marked(value: float, disturbed: bool) -> str:
    text = number_text(value)
    return text + _DISTURBED if disturbed and text != NOTHING else text


# ---- the tables' columns


def _moved(attempt: ReconfigurationFigures, num_bytes: int) -> str:
    return bytes_text(num_bytes) if attempt.completed else NOTHING


def _digest(attempt: ReconfigurationFigures) -> str | Cell:
    if not attempt.completed:
        return NOTHING
    return "yes" if attempt.digest_equal else Cell("NO", Tone.BAD)


def _notice_outcome(notice: NoticeFigures) -> Cell:
    tones = {"in time": Tone.GOOD, "in use": Tone.GOOD, "not needed": Tone.DIM}
    return Cell(notice.record.outcome, tones.get(notice.record.outcome, Tone.BAD))


def _method(baseline: BaselineRecord) -> str:
    ends = f"{layout_text(baseline.source)}, {layout_text(baseline.target)}"
    return f"{baseline.method}\n{ends}"


def _figure(name: str, path: str, text: Callable[[Any], str] = number_text, **kind: Any) -> Column:
    """A column of one attribute, such as `phases.boot_s`. kind: more of Column's fields."""
    get = attrgetter(path)
    return Column(name, lambda row: text(get(row)), **kind)


_words = partial(_figure, text=str, is_text=True)

_WORLDS = (
    _figure("generation", "generation", str),
    _words("layout", "layout", text=layout_text),
    _figure("steps", "steps", str),
    Column("median step s", lambda row: _marked(row.median_step_s, row.median_is_disturbed)),
    _figure("tokens/s", "tokens_per_s"),
)
_ENDS, _LOST, _BYTES = "from\nto", "lost s\nsteps", "moved\ncopied"
_COST = "cost s\nslow-\ndown s"
_RECONFIGURATIONS = (
    _figure("gen", "generation", str),
    _words("from", "source", text=layout_text, stack=_ENDS),
    _words("to", "target", text=layout_text, stack=_ENDS),
    _figure("pause\ns", "pause_s"),
    _figure("cost\ns", "cost_s", stack=_COST),
    _figure("slow-\ndown s", "slowdown_s", stack=_COST),
    _figure("lost\ns", "lost_s", stack=_LOST),
    Column(
        "lost\nsteps", lambda row: _marked(row.lost_steps, row.median_is_disturbed), stack=_LOST
    ),
    _figure("reconf.\ns", "reconfiguration_s"),
    Column("bytes\nmoved", lambda row: _moved(row, row.bytes_moved), stack=_BYTES),
    Column("bytes\ncopied", lambda row: _moved(row, row.bytes_local), stack=_BYTES),
    Column("digest\nequal", _digest, is_text=True),
    Column("outcome", lambda row: Cell(row.outcome, outcome_tone(row.outcome)), is_text=True),
)
_PHASES = (
    _figure("gen", "generation", str),
    _words("notice", "notice", may_wrap=True),
    *(_figure(f.name.removesuffix("_s"), f"phases.{f.name}") for f in fields(PhaseFigures)),
)
_PATH = (
    _figure("gen", "generation", str),
    _figure("boundary,\nbefore", "path.boundary_s"),
    _figure("check-\npoint", "path.lines.checkpoint_s"),
    _figure("wire", "path.lines.wire_s"),
    _figure("pack", "path.lines.pack_s"),
    _figure("digest", "path.lines.digest_s"),
    _figure("other", "path.lines.other_s"),
    _figure("forward\nbackward", "path.lines.forward_backward_s"),
    _figure("opti-\nmizer", "path.lines.optimizer_s"),
    _figure("votes", "path.lines.votes_s"),
    _figure("update", "path.lines.update_s"),
    Column("sum", lambda row: number_text(row.path.lines.sum_s)),
    _figure("first step\nslow by", "path.slow_first_step_s"),
    _figure("last\nbegins", "path.last_to_begin", str),
    _figure("last\nvotes", "path.last_to_vote", str),
    _figure("last\nends", "path.last_to_end", str),
)
_RECOVERIES = (
    _figure("gen", "record.generation", str),
    _words("from", "record.source", text=layout_text),
    _words("to", "record.target", text=layout_text),
    _words("lost\nworkers", "record.lost", text=lambda workers: workers or NOTHING),
    _figure("known", "known_s"),
    _figure("let go", "let_go_s"),
    _figure("filled", "refill_s"),
    _figure("first\nstep", "first_step_s"),
    _figure("steps\nagain", "steps_again", str),
)
_NOTICES = (
    _words("notice", "record.kind"),
    _words("node", "record.node", text=lambda node: node or NOTHING),
    _figure("window\ns", "window_s"),
    _figure("left or\njoined s", "left_s"),
    _figure("gen", "record.generation", lambda number: str(number) if number >= 0 else NOTHING),
    _figure("pause\ns", "pause_s"),
    _figure("lost\nsteps", "lost_steps"),
    _figure("steps\nagain", "repeated_steps", str),
    Column("outcome", _notice_outcome, is_text=True),
)
_HOURS = (
    _words("partition", "partition", text=lambda name: name or NOTHING),
    _words("node", "node"),
    *(_figure(name, f"{name}_h") for name in ("held", "training", "waiting", "lost")),
)


def _of(name: str, key: str, text: Callable[[Any], str] = number_text) -> Column:
    return Column(name, lambda row: text(row[key]))


_STRATEGIES = (
    Column("strategy", lambda row: row["strategy"], is_text=True),
    Column("goodput", lambda row: f"{row['goodput']:.1%}"),
    _of("tokens", "tokens", lambda value: f"{value:.4g}"),
    _of("held\nh", "held_h"),
    _of("lost\nh", "lost_h"),
    _of("tokens\nan hour", "tokens_per_hour", lambda value: f"{value:.4g}"),
    _of("changes", "changes", str),
    _of("too\nlate", "late", str),
)
_STRAGGLERS = (
    _figure("after\nsteps", "step", str),
    _words("node", "node"),
    _figure("worker", "worker", str),
    _figure("times\nothers'", "ratio"),
    _figure("for\ns", "for_s"),
    _figure("of\nnodes", "compared", str),
    _words("then", "action", may_wrap=True),
)
_OBSERVATIONS = (
    _figure("after\nsteps", "step", str),
    _words("notice", "notice", may_wrap=True),
    _words("from", "source", text=layout_text),
    _words("to", "target", text=layout_text),
    _figure("ready\ns", "ready_s"),
    _figure("cost\ns", "cost_s"),
    _words("instead", "instead"),
)
_STAGES = ("save", "stop", "launch", "import", "groups", "load", "first_step", "total")
_RESTARTS = (
    Column("method, from, to", _method, is_text=True),
    *(_figure(stage.replace("_", "\n"), f"{stage}_s") for stage in _STAGES),
)
