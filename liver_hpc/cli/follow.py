"""Watches a run in the terminal: a view that is redrawn, or plain lines where there is none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from rich.console import Console, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from liver_hpc.cli.status_text import (
    FINAL_STATES,
    PlainLines,
    figure_texts,
    handoffs_text,
    moved_text,
    waits_text,
)
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
    is_plain = not console.is_terminal or console.is_dumb_terminal
    lines, last = PlainLines(), None
    # Redrawn with each snapshot and at no other time: nothing blinks or spins.
    with nullcontext() if is_plain else Live(console=console, auto_refresh=False) as live:
        while (snapshot := snapshots()) is not None:
            last = snapshot
            if live is not None:
                live.update(view(snapshot), refresh=True)
            for line in lines.of(snapshot) if live is None else ():
                console.print(Text(line), soft_wrap=True)
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
    queued = f"; queued: {'; '.join(status.queued)}" if status.queued else ""
    for name, line in (
        ("progress", _bar(status.step, status.steps, _progress(status), "green")),
        ("training", _training(status)),
        ("layout", _layout(status)),
        ("handoffs", handoffs_text(status) + queued),
        *_handoff(status),
        ("event", " ".join(status.last_event.split())),
    ):
        lines.add_row(name, Text(line) if isinstance(line, str) else line)
    if status.metrics_error:
        lines.add_row(
            Text("metrics", "bold red"), Text(" ".join(status.metrics_error.split()), "red")
        )
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
    if status.step_s is not None and status.state == "training":
        text += f", {duration_text((status.steps - status.step) * status.step_s)} left"
    return text


def _training(status: StatusSnapshot) -> str:
    figures = figure_texts(status)
    if status.step_s is not None:
        figures.append(f"{number_text(status.step_s)} s a step")
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
        yield "", _bar(handoff.bytes_done, handoff.bytes_total, moved_text(handoff), "cyan")
        yield "", waits_text(handoff)
    yield "", ""


def _phases(handoff: HandoffStatus) -> Text:
    if handoff.phase not in _PHASES:
        return Text(handoff.phase.lower(), "bold yellow")
    present = _PHASES.index(handoff.phase)
    styles = ["green"] * present + ["bold cyan"] + ["dim"] * (len(_PHASES) - present - 1)
    names = [Text(name.lower(), style) for name, style in zip(_PHASES, styles, strict=True)]
    return Text("  ", no_wrap=True, overflow="ellipsis").join(names)
