"""A run as its snapshots show it: in lines of text, or in a view that a terminal redraws."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import nullcontext

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from liver_hpc.layout.coordinates import ids_text
from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot
from liver_hpc.report.wording import (
    bytes_text,
    duration_text,
    layout_text,
    number_text,
)

FINAL_STATES = ("finished", "stopped", "failed")
STEPS_A_LINE = 10
LABEL_COLUMNS = 9
BESIDE_BAR_COLUMNS = 28
MOST_COLUMNS = 120

_PHASES = ("BOOT", "PREPARE", "ARMED", "TRANSFER", "RELEASE")
_STATE_STYLES = {
    "starting": "cyan",
    "training": "green",
    "stopping": "yellow",
    "finished": "bold green",
    "failed": "bold red",
}


def follow(
    snapshots: Callable[[], StatusSnapshot | None],
    console: Console,
    interval_s: float,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Shows snapshots until the run is over or its coordinator gone, which None tells.

    Ctrl-C restores the terminal, leaves the run alone, and goes on to the caller as
    KeyboardInterrupt; so do errors of `snapshots`.
    """
    is_plain = not console.is_terminal or console.is_dumb_terminal
    lines = PlainLines()
    # Redrawn with each snapshot and at no other time: nothing blinks or spins.
    with nullcontext() if is_plain else Live(console=console, auto_refresh=False) as live:
        while (snapshot := snapshots()) is not None:
            if live is not None:
                live.update(view(snapshot), refresh=True)
            for line in lines.of(snapshot) if live is None else ():
                console.print(Text(line), soft_wrap=True)
            if snapshot.state in FINAL_STATES:
                break
            wait(interval_s)


# ---- in lines


def status_text(status: StatusSnapshot) -> str:
    """One line each for progress, shape, handoffs, and for what is out of the ordinary."""
    over = f", over {', '.join(status.transports)}" if status.transports else ""
    lines = [
        f"run {status.run}: {status.state}, {_step_text(status)}",
        f"workers {ids_text(status.workers)}{over}",
        f"handoffs: {_handoffs_text(status)}",
    ]
    if status.handoff is not None:
        lines.append(_handoff_text(status.handoff, status.now_s))
    named = [line for line in status.nodes if not line.startswith("machine:")]
    for name, text in (
        ("validation", _validation_text(status)),
        ("queued", "; ".join(status.queued)),
        ("nodes", "; ".join(named)),
        ("spare", status.spares and f"workers {ids_text(status.spares)}, booted, without a seat"),
        ("observed", _observed_text(status)),
        ("checkpoint", _checkpoint_text(status)),
        ("last event", status.last_event),
        ("journal", status.journal_error),
    ):
        if text:
            lines.append(f"{name}: {text}")
    return "\n".join(lines)


class PlainLines:
    """What is new in each snapshot, in lines: a step now and then, and whatever has changed."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str] = {("journal", ""): ""}
        self._told_step = -1

    def of(self, status: StatusSnapshot) -> Iterator[str]:
        known, self._known = self._known, dict(_facts(status))
        yield from (text for fact, text in self._known.items() if fact not in known)
        over = status.state in FINAL_STATES and status.step != self._told_step
        if status.loss is not None and (over or self._is_due(status.step)):
            self._told_step = status.step
            yield _step_text(status)

    def _is_due(self, step: int) -> bool:
        return self._told_step < 0 or step // STEPS_A_LINE > self._told_step // STEPS_A_LINE


def _facts(status: StatusSnapshot) -> Iterator[tuple[Hashable, str]]:
    """What there is to tell, each with what has to change before it is told again."""
    yield status.state, f"run {status.run}: {status.state}"
    if status.last_event:
        yield ("event", status.last_event), f"event: {status.last_event}"
    if text := _validation_text(status):
        yield ("validation", status.evaluated), f"validation: {text}"
    for request in status.queued:
        yield ("queued", request), f"queued: {request}"
    if (handoff := status.handoff) is not None:
        yield (handoff.generation, handoff.phase), _handoff_text(handoff, status.now_s)
    yield ("journal", status.journal_error), f"journal: {status.journal_error or 'written again'}"


def _moved_text(handoff: HandoffStatus) -> str:
    if handoff.bytes_total == 0:
        return "no bytes to move yet"
    return f"{bytes_text(handoff.bytes_done)} of {bytes_text(handoff.bytes_total)}"


def _waits_text(handoff: HandoffStatus) -> str:
    return f"waits for workers {ids_text(handoff.waiting_for)}" if handoff.waiting_for else ""


def _figure_texts(status: StatusSnapshot) -> list[str]:
    figures = []
    if status.loss is not None:
        figures.append(f"loss {status.loss:.4f}")
    if status.grad_norm is not None:
        figures.append(f"gradient norm {status.grad_norm:.3f}")
    if status.tokens_per_s is not None:
        figures.append(f"{number_text(status.tokens_per_s)} tokens/s")
    return figures


def _validation_text(status: StatusSnapshot) -> str:
    if status.validation_loss is None:
        return ""
    return f"loss {status.validation_loss:.4f} after {status.evaluated} steps"


def _checkpoint_text(status: StatusSnapshot) -> str:
    of_step = "" if status.checkpointed is None else f"the newest is of step {status.checkpointed}"
    return "; ".join(filter(None, (of_step, status.checkpoint_error)))


def _observed_text(status: StatusSnapshot) -> str:
    times = "once" if status.observed == 1 else f"{status.observed} times"
    return f"{status.would_have} ({times} in all)" if status.observed else ""


def _handoffs_text(status: StatusSnapshot) -> str:
    failed = f", {status.handoffs_failed} failed" if status.handoffs_failed else ""
    return f"{status.handoffs_done} done, {status.handoffs_aborted} aborted{failed}"


def _step_text(status: StatusSnapshot) -> str:
    world = f"{status.layout} (generation {status.generation})"
    return f"step {status.step} of {status.steps}: {', '.join([*_figure_texts(status), world])}"


def _handoff_text(handoff: HandoffStatus, now_s: float) -> str:
    parts = [
        f"handoff to generation {handoff.generation}: {handoff.phase}",
        f"for {duration_text(now_s - handoff.since_s)}",
        _moved_text(handoff) if handoff.bytes_total else "",
        _waits_text(handoff),
    ]
    return ", ".join(filter(None, parts))


# ---- in a terminal


def view(status: StatusSnapshot) -> RenderableType:
    """The view of one snapshot; as high with a handoff in progress as without."""
    lines = Table.grid(expand=True, padding=(0, 1))
    lines.add_column(style="dim", width=LABEL_COLUMNS, no_wrap=True)
    lines.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    queued = f"; queued: {'; '.join(status.queued)}" if status.queued else ""
    for name, line in (
        ("progress", _bar(status.step, status.steps, _progress(status), "green")),
        ("training", _training(status)),
        ("layout", _layout(status)),
        ("handoffs", _handoffs_text(status) + queued),
        *_handoff(status),
        ("event", " ".join(status.last_event.split())),
    ):
        lines.add_row(name, Text(line) if isinstance(line, str) else line)
    for name, error in (("checkpoint", status.checkpoint_error), ("journal", status.journal_error)):
        if error:
            lines.add_row(Text(name, "bold red"), Text(" ".join(error.split()), "red"))
    state = Text(status.state, _STATE_STYLES.get(status.state, ""))
    title = Text.assemble((status.run, "bold"), " ", state)
    panel = Panel(lines, title=title, title_align="left", border_style="dim", padding=(1, 1))
    return Constrain(panel, MOST_COLUMNS)


def _bar(done: int, total: int, text: str, style: str) -> RenderableType:
    """A bar that keeps its length while the text beside it changes."""
    whole = max(total, 1)
    bar = ProgressBar(whole, min(done, whole), complete_style=style, finished_style=style)
    return _beside(bar, text, BESIDE_BAR_COLUMNS)


def _beside(left: RenderableType, right: str, min_width: int | None = None) -> RenderableType:
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True, min_width=min_width)
    row.add_row(left, right)
    return row


def _progress(status: StatusSnapshot) -> str:
    text = f"step {status.step} of {status.steps}"
    if status.left_s is not None and status.state == "training":
        text += f", {duration_text(status.left_s)} left"
    return text


def _training(status: StatusSnapshot) -> str:
    figures = _figure_texts(status)
    if status.step_s is not None:
        figures.append(f"{number_text(status.step_s)} s a step")
    if text := _validation_text(status):
        figures.append(f"validation {text}")
    return "  ".join(figures) or "no step yet"


def _layout(status: StatusSnapshot) -> str:
    workers = f"workers {ids_text(status.workers)}"
    return f"{layout_text(status.layout)}  generation {status.generation}  {workers}"


def _handoff(status: StatusSnapshot) -> Iterator[tuple[str, RenderableType]]:
    """The labels and lines of the handoff in progress; as many when there is none."""
    handoff = status.handoff
    yield "", ""
    if handoff is None:
        yield "handoff", Text("none in progress", "dim")
        yield from [("", "")] * 3
    else:
        ends = f"{layout_text(handoff.source)} to {layout_text(handoff.target)}"
        yield "handoff", f"{ends}  generation {handoff.generation}  {handoff.notice}"
        yield "", _beside(_phases(handoff), duration_text(status.now_s - handoff.since_s))
        yield "", _bar(handoff.bytes_done, handoff.bytes_total, _moved_text(handoff), "cyan")
        yield "", _waits_text(handoff)
    yield "", ""


def _phases(handoff: HandoffStatus) -> Text:
    if handoff.phase not in _PHASES:
        return Text(handoff.phase.lower(), "bold yellow")
    present = _PHASES.index(handoff.phase)
    styles = ["green"] * present + ["bold cyan"] + ["dim"] * (len(_PHASES) - present - 1)
    names = [Text(name.lower(), style) for name, style in zip(_PHASES, styles, strict=True)]
    return Text("  ", no_wrap=True, overflow="ellipsis").join(names)
