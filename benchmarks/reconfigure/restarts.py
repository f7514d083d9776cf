"""One round of transitions of a job that stops and starts again for each of them."""

from __future__ import annotations

from benchmarks.baseline.job import RestartJob
from benchmarks.baseline.methods import Method
from benchmarks.baseline.phases import Restart, as_if_saved_before
from benchmarks.baseline.workers import Surroundings
from benchmarks.reconfigure.links import nodes
from benchmarks.reconfigure.sweep import Cell, Sweep, Transition
from liver_hpc.cli.submission import checked_run, new_run
from liver_hpc.run.records import BaselineRecord

PHASES = ("save_s", "stop_s", "launch_s", "import_s", "groups_s", "load_s", "first_step_s")


def measure(sweep: Sweep, cell: Cell) -> list[dict[str, float | int | str]]:
    """Two rows a claimed transition: as it was, and as if the checkpoint had existed already."""
    run = new_run(*checked_run(sweep.run_config(cell.size, cell.variant), "local"))
    rate = sweep.variant(cell.variant).storage_bytes_per_s
    found: list[dict[str, float | int | str]] = []
    with RestartJob(run.path, around=Surroundings(nodes(sweep), rate)) as job:
        job.begin(sweep.start.layout())
        job.train(1)  # the first has a state to leave, of which no median is taken
        for transition in sweep.transitions:
            if not transition.claimed:
                continue
            layout, method = transition.to.layout(), Method(cell.method)
            done = job.restart(layout, method, steps=sweep.settle_steps)
            record = done.record()
            found.append(_row(cell, transition, done, record))
            found.append(_row(cell, transition, done, as_if_saved_before(record)))
        job.stop()
    return found


def _row(
    cell: Cell, transition: Transition, done: Restart, record: BaselineRecord
) -> dict[str, float | int | str]:
    phases = {name: getattr(record, name) for name in PHASES}
    saved_s = done.record().save_s - record.save_s
    return {
        "size": cell.size,
        "transition": transition.name,
        "method": record.method,
        "round": cell.round,
        "source": record.source,
        "target": record.target,
        "lost_s": record.lost_s,
        "median_step_s": done.median_step_s,
        "slowdown_s": 0.0,
        "reconfiguration_s": done.reconfiguration_s - saved_s,
        "detection_s": 0.0,  # what stops the job is what decided to
        "pause_s": record.total_s - record.first_step_s,
        "bytes": done.num_bytes,
        **phases,
        "detail": record.detail,
    }
