"""Runs whose shape changes live, to their end, and what their losses are compared by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from liver_hpc.report.store import RunRecords, read_run
from tests.integration.runs import ENDLESS, run_config, start, stop_and_read, watch


def elastic_run(
    tmp_path: Path, notices: list[dict[str, Any]], at_least: int = 0, **sections: Any
) -> RunRecords:
    """A run that stops a few steps after the last of its scripted handoffs has ended, and after
    `at_least` so many steps."""
    config = run_config(tmp_path, ENDLESS, notices=notices, **sections)
    run = start(config)
    watch(run, lambda status: status.handoffs_done + status.handoffs_aborted == len(notices), 150.0)
    watch(run, lambda status: status.handoff is None and not status.queued, 10.0)
    last = read_run(run.path).reconfigurations[-1].step
    watch(run, lambda status: status.step >= max(at_least, last + 4), 60.0)
    return stop_and_read(run)


def losses(records: RunRecords) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step, each once and in order."""
    assert [record.step for record in records.steps] == list(range(len(records.steps)))
    return [(record.loss, record.grad_norm) for record in records.steps]
