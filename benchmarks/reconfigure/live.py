"""One round of transitions in a running job: what `liver resize` and `liver replace` do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.live_runs import LiveRun
from benchmarks.reconfigure.sweep import LIVE, Cell, Sweep
from liver_hpc.errors import LiverError
from liver_hpc.report.derive import ReconfigurationFigures, run_figures
from liver_hpc.run.records import RunRecords


def measure(sweep: Sweep, cell: Cell) -> list[dict[str, float | int | str]]:
    """One row a transition. Raises LiverError when one of them does not complete."""
    config = sweep.run_config(cell.size, cell.variant)
    with LiveRun(config, sweep.event_s, cluster=config.cluster.kind) as run:
        run.settle(sweep.settle_steps)
        for transition in sweep.transitions:
            if transition.replace:
                run.replace()
            else:
                run.resize(transition.to.layout())
            run.await_handoffs()
            run.settle(sweep.settle_steps)
    return rows(sweep, cell, run.records(), run.asked_s)


def rows(
    sweep: Sweep, cell: Cell, records: RunRecords, asked_s: Sequence[float]
) -> list[dict[str, float | int | str]]:
    """The transitions' figures of a run that has done them all, in their order.

    asked_s: when each was asked for, in epoch seconds.
    """
    figures = run_figures(records)
    medians = {world.generation: world.median_step_s for world in figures.generations}
    if len(figures.reconfigurations) != len(sweep.transitions):
        raise LiverError(
            f"{cell.name}: wanted {len(sweep.transitions)} handoffs, "
            f"got {len(figures.reconfigurations)}"
        )
    return [
        {
            "size": cell.size,
            "transition": transition.name,
            "method": LIVE,
            "round": cell.round,
            "source": done.source,
            "target": done.target,
            "lost_s": done.lost_s,
            "median_step_s": medians[done.generation],
            "slowdown_s": done.slowdown_s,
            "reconfiguration_s": done.reconfiguration_s,
            "detection_s": noticed.notice_s - at_s,
            "pause_s": done.pause_s,
            "bytes": done.bytes_moved,
            **_path(done),
        }
        for transition, done, noticed, at_s in zip(
            sweep.transitions,
            figures.reconfigurations,
            records.reconfigurations,
            asked_s,
            strict=True,
        )
        if transition.claimed and _whole(done)
    ]


def _path(done: ReconfigurationFigures) -> dict[str, float]:
    """The critical path's lines, as far as the workers said."""
    if done.path is None:
        return {}
    lines = {f"path_{name}": spent_s for name, spent_s in asdict(done.path.lines).items()}
    return {**lines, "path_slow_first_step_s": done.path.slow_first_step_s}


def _whole(done: ReconfigurationFigures) -> bool:
    """Raises LiverError for a handoff that is no measurement."""
    if not done.completed or not done.digest_equal:
        raise LiverError(f"generation {done.generation} {done.outcome}: {done.detail}")
    if done.median_is_disturbed:
        raise LiverError(f"generation {done.generation} had no undisturbed step")
    return True
