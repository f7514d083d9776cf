"""`python -m liver_hpc.node.kill_task STEP`: kills this node's task of a step, with all that it has
started. Slurm itself can only kill all tasks of a step together."""

from __future__ import annotations

import sys

from liver_hpc.cluster.slurm.together import STEP_VARIABLE
from liver_hpc.host.marks import kill_marked

_KILL_S = 5.0


def main() -> None:
    # The step's srun, which goes on, has the variable too, and may run on this node.
    kill_marked(STEP_VARIABLE, sys.argv[1], _KILL_S, spared="srun")


if __name__ == "__main__":
    main()
