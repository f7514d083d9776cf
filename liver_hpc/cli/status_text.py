"""What `liver status` prints: a snapshot of a run in a few lines."""

from __future__ import annotations

from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot
from liver_hpc.report.wording import bytes_text, ids_text


def status_text(status: StatusSnapshot) -> str:
    """One line each for progress, shape, handoffs, and for what is out of the ordinary."""
    workers = ids_text(status.workers)
    over = f", over {', '.join(status.transports)}" if status.transports else ""
    lines = [
        f"run {status.run}: {status.state}, {_progress(status)}",
        f"layout {status.layout} (generation {status.generation}) on workers {workers}{over}",
        f"handoffs: {status.handoffs_done} done, {status.handoffs_aborted} aborted",
    ]
    if status.handoff is not None:
        lines.append(_handoff_text(status.handoff, status.now_s))
    if status.queued:
        lines.append(f"queued: {'; '.join(status.queued)}")
    named = [line for line in status.nodes if not line.startswith("machine:")]
    if named:
        lines.append(f"nodes: {'; '.join(named)}")
    if status.last_event:
        lines.append(f"last event: {status.last_event}")
    if status.metrics_error:
        lines.append(f"metrics: {status.metrics_error}")
    return "\n".join(lines)


def _progress(status: StatusSnapshot) -> str:
    parts = [f"step {status.step} of {status.steps}"]
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:.0f} tokens/s")
    if status.step_s is not None:
        parts.append(f"{status.step_s:.3f} s a step")
    return ", ".join(parts)


def _handoff_text(handoff: HandoffStatus, now_s: float) -> str:
    text = (
        f"handoff to {handoff.target} (generation {handoff.generation}, {handoff.notice}): "
        f"{handoff.phase} for {now_s - handoff.since_s:.1f} s, "
        f"{bytes_text(handoff.bytes_done)} of {bytes_text(handoff.bytes_total)}"
    )
    waits = f", waiting for workers {ids_text(handoff.waiting_for)}" if handoff.waiting_for else ""
    return text + waits
