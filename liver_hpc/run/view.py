"""A run as people see it: the status snapshot."""

from __future__ import annotations

from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.machine import Run


def snapshot(run: Run, now_s: float, last_event: str, metrics_error: str) -> StatusSnapshot:
    """The run at one moment, for people; `last_event` is the newest note."""
    last = run.recorder.last_step
    world = run.handoffs.committed_world or run.world
    took_s = last.ended_s - last.started_s if last else None
    state = RunState.TRAINING if run.state is RunState.HANDING_OVER else run.state
    return StatusSnapshot(
        run=run.config.name,
        state=str(state if run.ending is None else run.ending.state),
        step=run.recorder.steps_done,
        steps=run.config.train.steps,
        loss=last.loss if last else None,
        grad_norm=last.grad_norm if last else None,
        tokens_per_s=last.tokens / took_s if last and took_s else None,
        step_s=took_s,
        generation=world.generation if world else 0,
        layout=str(world.rank_map.layout if world else run.first_layout),
        workers=world.rank_map.workers if world else (),
        handoffs_done=run.recorder.completed,
        handoffs_aborted=run.recorder.aborted,
        queued=run.elastic.queue.texts(),
        handoff=run.handoffs.status(),
        last_event=last_event,
        metrics_error=metrics_error,
        now_s=now_s,
        nodes=tuple(run.elastic.nodes.held.lines(run.agents.taken())),
        transports=run.recorder.transports.get(world.generation, ()) if world else (),
    )
