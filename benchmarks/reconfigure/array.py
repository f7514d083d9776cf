"""A sweep as a Slurm job array: one task a cell, with a node to itself."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.reconfigure.cells import Rows, measure
from benchmarks.reconfigure.sweep import Cell, Sweep
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import look_anew
from liver_hpc.host.process import clean_environment

_POLL_S = 2.0
_COMMAND_S = 30.0
_AWAY_S = 300.0
_LOOKS = 40
"""How often results are still looked for once the array is over: on NFS a directory may be seen as
it was for a minute."""


def run_cell(sweep_json: str, cell_json: str) -> None:
    """What one task runs: a sweep's cell as on any machine, of which no process takes itself for
    a part of the task's step; nothing, where it has been measured since. Raises ConfigError where
    torch sees fewer GPUs than are asked for: workers would take the CPU."""
    for name in os.environ.keys() - clean_environment(os.environ).keys():
        del os.environ[name]
    sweep, cell = Sweep.model_validate_json(sweep_json), Cell.model_validate_json(cell_json)
    if Rows(sweep).of(cell) is not None:
        return
    if (wanted := sweep.slurm.gpus_per_node) and (seen := _gpus_seen()) < wanted:
        raise ConfigError(
            f"slurm.gpus_per_node: wanted {wanted}, torch sees {seen} on {socket.gethostname()}"
        )
    measure(sweep, cell, sweep.slurm.parallel)


def _gpus_seen() -> int:
    """By torch, in a process of its own, whose import of it takes nothing from what is measured."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    asked = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=_AWAY_S)
    return int(asked.stdout)


def measure_on_slurm(sweep: Sweep, cells: Sequence[Cell], done: Callable[[Cell], None]) -> None:
    """Submits all cells, and waits for as long as the array is queued or runs. Raises LiverError
    with all that failed, SlurmError when Slurm does not answer. An array that is not waited for to
    its end, as after Ctrl-C, is cancelled."""
    import submitit

    sweep = sweep.model_copy(update={"directory": sweep.directory.absolute()})
    executor: Any = submitit.SlurmExecutor(Rows(sweep).directory / "submitit")
    executor.update_parameters(**_parameters(sweep))
    jobs = executor.map_array(
        run_cell,
        [sweep.model_dump_json()] * len(cells),
        [cell.model_dump_json() for cell in cells],
    )
    array = jobs[0].job_id.partition("_")[0]
    try:
        failures = _await_all(array, dict(zip(cells, jobs, strict=True)), done)
    except BaseException:
        with contextlib.suppress(SlurmError):
            SlurmCommands(_COMMAND_S, 0.0).cancel(array)
        raise
    if failures:
        raise LiverError("\n".join(failures))


def _await_all(array: str, waiting: dict[Cell, Any], done: Callable[[Cell], None]) -> list[str]:
    """What went wrong, once there is a result of every task or Slurm knows the array no more."""
    commands, pause = SlurmCommands(_COMMAND_S, _AWAY_S), threading.Event()
    failures: list[str] = []
    looks_left = _LOOKS
    while waiting and looks_left:
        # Before the results are looked for, so that the last ones are not missed; and on a shared
        # file system they may come a moment after the task's end.
        looks_left = _LOOKS if commands.jobs([array]) else looks_left - 1
        look_anew(next(iter(waiting.values())).paths.folder)
        for cell, job in list(waiting.items()):
            if not job.paths.result_pickle.exists():
                continue
            del waiting[cell]
            error = job.exception()
            if error is None:
                done(cell)
            else:
                failures.append(f"{cell.name} (job {job.job_id}): {error}")
        if waiting:
            pause.wait(_POLL_S)
    for cell, job in waiting.items():
        failures.append(f"{cell.name}: job {job.job_id} is over without a result")
    return failures


def _parameters(sweep: Sweep) -> dict[str, Any]:
    """As submitit's SlurmExecutor names them."""
    section = sweep.slurm
    given: dict[str, Any] = {
        "job_name": sweep.name,
        "nodes": 1,
        "ntasks_per_node": 1,
        "exclusive": True,
        "cpus_per_task": section.cpus_per_task,
        "time": section.timeout_min,
        "array_parallelism": section.parallel,
        "setup": section.setup,
    }
    if section.partition is not None:
        given["partition"] = section.partition
    if section.node is not None:
        given["nodelist"] = section.node
    if section.gpus_per_node:
        given["gpus_per_node"] = section.gpus_per_node
    return given
