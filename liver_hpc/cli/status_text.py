"""A snapshot of a run in plain lines: all of it for `liver status`, what is new for a log."""

from __future__ import annotations

from collections.abc import Iterator

from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot
from liver_hpc.report.wording import bytes_text, duration_text, ids_text, number_text

FINAL_STATES = ("finished", "failed")
STEPS_A_LINE = 10


def status_text(status: StatusSnapshot) -> str:
    """One line each for progress, shape, handoffs, and for what is out of the ordinary."""
    over = f", over {', '.join(status.transports)}" if status.transports else ""
    lines = [
        f"run {status.run}: {status.state}, {_step_text(status)}",
        f"workers {ids_text(status.workers)}{over}",
        f"handoffs: {handoffs_text(status)}",
    ]
    if status.handoff is not None:
        lines.append(_handoff_text(status.handoff, status.now_s))
    named = [line for line in status.nodes if not line.startswith("machine:")]
    for name, text in (
        ("queued", "; ".join(status.queued)),
        ("nodes", "; ".join(named)),
        ("last event", status.last_event),
        ("metrics", status.metrics_error),
    ):
        if text:
            lines.append(f"{name}: {text}")
    return "\n".join(lines)


class PlainLines:
    """What is new in each snapshot, in lines: a step now and then, and whatever has changed."""

    def __init__(self) -> None:
        self._last: StatusSnapshot | None = None
        self._told_step = -1

    def of(self, status: StatusSnapshot) -> Iterator[str]:
        last, self._last = self._last, status
        if last is None or last.state != status.state:
            yield f"run {status.run}: {status.state}"
        if status.last_event and (last is None or last.last_event != status.last_event):
            yield f"event: {status.last_event}"
        for request in status.queued:
            if last is None or request not in last.queued:
                yield f"queued: {request}"
        if status.handoff is not None and _phase(last) != _phase(status):
            yield _handoff_text(status.handoff, status.now_s)
        if (last.metrics_error if last is not None else "") != status.metrics_error:
            yield f"metrics: {status.metrics_error or 'written again'}"
        over = status.state in FINAL_STATES and status.step != self._told_step
        if status.loss is not None and (over or self._is_due(status.step)):
            self._told_step = status.step
            yield _step_text(status)

    def _is_due(self, step: int) -> bool:
        return self._told_step < 0 or step // STEPS_A_LINE > self._told_step // STEPS_A_LINE


def moved_text(handoff: HandoffStatus) -> str:
    if handoff.bytes_total == 0:
        return "no bytes to move yet"
    return f"{bytes_text(handoff.bytes_done)} of {bytes_text(handoff.bytes_total)}"


def waits_text(handoff: HandoffStatus) -> str:
    return f"waits for workers {ids_text(handoff.waiting_for)}" if handoff.waiting_for else ""


def _phase(status: StatusSnapshot | None) -> tuple[int, str] | None:
    if status is None or status.handoff is None:
        return None
    return status.handoff.generation, status.handoff.phase


def figure_texts(status: StatusSnapshot) -> list[str]:
    figures = []
    if status.loss is not None:
        figures.append(f"loss {status.loss:.4f}")
    if status.grad_norm is not None:
        figures.append(f"gradient norm {status.grad_norm:.3f}")
    if status.tokens_per_s is not None:
        figures.append(f"{number_text(status.tokens_per_s)} tokens/s")
    return figures


def handoffs_text(status: StatusSnapshot) -> str:
    return f"{status.handoffs_done} done, {status.handoffs_aborted} aborted"


def _step_text(status: StatusSnapshot) -> str:
    world = f"{status.layout} (generation {status.generation})"
    return f"step {status.step} of {status.steps}: {', '.join([*figure_texts(status), world])}"


def _handoff_text(handoff: HandoffStatus, now_s: float) -> str:
    parts = [
        f"handoff to generation {handoff.generation}: {handoff.phase}",
        f"for {duration_text(now_s - handoff.since_s)}",
        moved_text(handoff) if handoff.bytes_total else "",
        waits_text(handoff),
    ]
    return ", ".join(filter(None, parts))
