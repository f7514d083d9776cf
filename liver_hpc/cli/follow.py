"""Watches a run in the terminal: a view that is redrawn, or plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from liver_hpc.cli.status_text import FINAL_STATES, PlainLines, moved_text, waits_text
from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot
from liver_hpc.report.wording import (
    duration_text,
    ids_text,
    layout_text,
    number_text,
)

LABEL_COLUMNS = 9
BESIDE_BAR_COLUMNS = 28
MOST_COLUMNS = 120

_PHASES = ("BOOT", "PREPARE", "ARMED", "TRANSFER", "COMMIT", "RELEASE")
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
) -> StatusSnapshot | None:
    """Shows snapshots until the run is over or its coordinator gone, which None tells.

    Returns the last snapshot, None if there never was one. Ctrl-C restores the terminal, leaves
    the run alone, and goes on to the caller as KeyboardInterrupt; so do errors of `snapshots`.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        lines = PlainLines()
        return _watch(snapshots, lambda s: _print(lines.of(s), console), interval_s, wait)
    # Redrawn with each snapshot and at no other time: nothing blinks or spins.
    with Live(console=console, auto_refresh=False) as live:
        return _watch(snapshots, lambda s: live.update(view(s), refresh=True), interval_s, wait)


def _watch(
    snapshots: Callable[[], StatusSnapshot | None],
    show: Callable[[StatusSnapshot], None],
    interval_s: float,
    wait: Callable[[float], None],
) -> StatusSnapshot | None:
    last = None
    while (snapshot := snapshots()) is not None:
        last = snapshot
        show(snapshot)
        if snapshot.state in FINAL_STATES:
            break
        wait(interval_s)
    return last


# ---- in a terminal


def view(status: StatusSnapshot) -> RenderableType:
    """The view of one snapshot; as high with a handoff in progress as without."""
    lines = Table.grid(expand=True, padding=(0, 1))
    lines.add_column(style="dim", width=LABEL_COLUMNS, no_wrap=True)
    lines.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    lines.add_row("progress", _bar(status.step, status.steps, _progress(status), "green"))
    lines.add_row("training", _training(status))
    lines.add_row("layout", _layout(status))
    lines.add_row("handoffs", _line(_handoffs(status)))
    for label, line in _handoff(status):
        lines.add_row(label, line)
    lines.add_row("event", _line(status.last_event))
    if status.metrics_error:
        lines.add_row(Text("metrics", "bold red"), _line(status.metrics_error, "red"))
    state = Text(status.state, _STATE_STYLES.get(status.state, ""))
    panel = Panel(
        lines,
        title=Text.assemble((status.run, "bold"), " ", state),
        title_align="left",
        border_style="dim",
        padding=(1, 1),
    )
    return Constrain(panel, MOST_COLUMNS)


def _bar(done: int, total: int, text: str, style: str) -> RenderableType:
    """A bar that keeps its length while the text beside it changes."""
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True, min_width=BESIDE_BAR_COLUMNS)
    whole = max(total, 1)
    bar = ProgressBar(whole, min(done, whole), complete_style=style, finished_style=style)
    row.add_row(bar, text)
    return row


def _progress(status: StatusSnapshot) -> str:
    text = f"step {status.step} of {status.steps}"
    if status.step_s is not None and status.state == "training":
        text += f", {duration_text((status.steps - status.step) * status.step_s)} left"
    return text


def _training(status: StatusSnapshot) -> Text:
    figures = [
        ("loss ", None if status.loss is None else f"{status.loss:.4f}", ""),
        ("gradient norm ", None if status.grad_norm is None else f"{status.grad_norm:.3f}", ""),
        (
            "",
            None if status.tokens_per_s is None else number_text(status.tokens_per_s),
            " tokens/s",
        ),
        ("", None if status.step_s is None else number_text(status.step_s), " s a step"),
    ]
    parts = [
        Text.assemble((before, "dim"), (value, "bold"), (after, "dim"))
        for before, value, after in figures
        if value is not None
    ]
    return _joined(parts) if parts else Text("no step yet", "dim")


def _layout(status: StatusSnapshot) -> Text:
    parts = [
        Text(layout_text(status.layout), "bold"),
        Text.assemble(("generation ", "dim"), str(status.generation)),
        Text.assemble(("workers ", "dim"), ids_text(status.workers)),
    ]
    return _joined(parts)


def _handoffs(status: StatusSnapshot) -> str:
    text = f"{status.handoffs_done} done, {status.handoffs_aborted} aborted"
    return f"{text}; queued: {'; '.join(status.queued)}" if status.queued else text


def _handoff(status: StatusSnapshot) -> Iterator[tuple[str, RenderableType]]:
    """The labels and lines of the handoff in progress; as many when there is none."""
    handoff = status.handoff
    yield "", ""
    if handoff is None:
        yield "handoff", Text("none in progress", "dim")
        yield from [("", "")] * 3
    else:
        ends = Text(f"{layout_text(handoff.source)} to {layout_text(handoff.target)}", "bold")
        generation = Text(f"generation {handoff.generation}", "dim")
        yield "handoff", _joined([ends, generation, Text(handoff.notice, "dim")])
        yield "", _phases(handoff, status.now_s)
        yield "", _bar(handoff.bytes_done, handoff.bytes_total, moved_text(handoff), "cyan")
        yield "", Text(waits_text(handoff), "dim")
    yield "", ""


def _phases(handoff: HandoffStatus, now_s: float) -> RenderableType:
    """All phases in their order, the present one marked, and how long ago the notice was."""
    if handoff.phase in _PHASES:
        present = _PHASES.index(handoff.phase)
        styles = ["green"] * present + ["bold cyan"] + ["dim"] * (len(_PHASES) - present - 1)
        names = [Text(name.lower(), style) for name, style in zip(_PHASES, styles, strict=True)]
    else:
        names = [Text(handoff.phase.lower(), "bold yellow")]
    row = Table.grid(expand=True, padding=(0, 1))
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    row.add_row(_joined(names), duration_text(now_s - handoff.since_s))
    return row


def _line(text: str, style: str = "") -> Text:
    return Text(" ".join(text.split()), style, no_wrap=True, overflow="ellipsis")


def _joined(parts: list[Text]) -> Text:
    text = Text("  ").join(parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _print(lines: Iterator[str], console: Console) -> None:
    for line in lines:
        console.print(Text(line), soft_wrap=True)
