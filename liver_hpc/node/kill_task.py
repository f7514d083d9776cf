"""`python -m liver_hpc.node.kill_task JOB.STEP`: kills this node's task of a step, with all that it
has started. Slurm itself can only kill all tasks of a step together.

With --look it kills none, and prints the node's name where nothing of the task is left."""

from __future__ import annotations

import os
import sys

from liver_hpc.cluster.slurm.together import STEP_VARIABLE
from liver_hpc.host.marks import kill_marked, marked_processes

_KILL_S = 5.0


def main() -> None:
    # The step's srun, which goes on, has the variable too, and may run on this node.
    if "--look" not in sys.argv:
        kill_marked(STEP_VARIABLE, sys.argv[1], _KILL_S, spared="srun")
    elif not marked_processes(STEP_VARIABLE, sys.argv[1], spared="srun"):
        print(os.environ["SLURMD_NODENAME"], flush=True)


if __name__ == "__main__":
    main()
