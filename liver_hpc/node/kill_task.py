"""`python -m liver_hpc.node.kill_task STEP`: kills this node's task of a step, of which Slurm can
only kill all tasks together. What the task has started goes with it."""

from __future__ import annotations

import os
import signal
import sys

import psutil

from liver_hpc.cluster.slurm.together import STEP_VARIABLE

_TASK_VARIABLE = "SLURM_TASK_PID"
"""In the environment of a task: its own process id. Its children inherit it."""


def main() -> int:
    step = sys.argv[1]
    for process in psutil.process_iter(["environ"]):
        told = process.info["environ"] or {}  # None for somebody else's
        if told.get(STEP_VARIABLE) == step and told.get(_TASK_VARIABLE) == str(process.pid):
            os.kill(process.pid, signal.SIGKILL)
    return 0


if __name__ == "__main__":
    sys.exit(main())
