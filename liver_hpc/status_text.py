"""What `liver status` prints: a snapshot of a run in a few lines."""

from __future__ import annotations

from liver_hpc.protocol.status import HandoffStatus, StatusSnapshot


def status_text(status: StatusSnapshot) -> str:
    """One line each for progress, shape, handoffs, and for what is out of the ordinary."""
    workers = _ids(status.workers)
    lines = [
        f"run {status.run}: {status.state}, {_progress(status)}",
        f"layout {status.layout} (generation {status.generation}) on workers {workers}",
        f"handoffs: {status.handoffs_done} done, {status.handoffs_aborted} aborted",
    ]
    if status.handoff is not None:
        lines.append(_handoff_text(status.handoff, status.now_s))
    if status.queued:
        lines.append(f"queued: {'; '.join(status.queued)}")
    if status.last_event:
        lines.append(f"last event: {status.last_event}")
    if status.metrics_error:
        lines.append(f"metrics: {status.metrics_error}")
    return "\n".join(lines)


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


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
    waits = f", waiting for workers {_ids(handoff.waiting_for)}" if handoff.waiting_for else ""
    return text + waits


def _ids(workers: tuple[int, ...]) -> str:
    return ",".join(map(str, workers)) or "none"
