"""A child that outlives a killed coordinator for as long as it takes to cancel its burst jobs.

Keepers end with the coordinator, but a request that is still pending has none yet.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import threading
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.replies import COMPLETING
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Child, Command

_SETTLE_S = 2.0
_LOOK_S = 0.2
_CANCEL_S = 30.0

log = logging.getLogger(__name__)


class Reaper:
    """The reaper of one job name, from the side of the process that it watches."""

    def __init__(self, name: str, command_s: float, unreachable_s: float, log_path: Path) -> None:
        words = [sys.executable, "-P", "-m", "liver_hpc.cluster.slurm.reaper", "--name", name]
        words += ["--command-s", str(command_s), "--unreachable-s", str(unreachable_s)]
        self._child = Child(
            Command(
                "the reaper of burst jobs",
                words,
                orphan_signal=None,
                stdin=subprocess.PIPE,
                log=log_path,
                apart="session",
            )
        )

    def dismiss(self) -> None:
        """There is nothing left to cancel."""
        self._child.end(0.0)


def cancel_all(
    commands: SlurmCommands, name: str, settle_s: float = 0.0, limit_s: float = _CANCEL_S
) -> None:
    """Ends all jobs of that name; those that only wait for their processes to end are left.

    settle_s: how long a submission may still be under way. Raises DeadlineError after `limit_s`,
    SlurmError.
    """
    deadline = Deadline.after(SystemClock(), limit_s, f"jobs named {name} to end")
    pause = threading.Event()
    while True:
        commands.cancel_named(name)
        pause.wait(settle_s)
        if all(job.state == COMPLETING for job in commands.named(name).values()):
            return
        deadline.check()
        pause.wait(_LOOK_S)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="liver_hpc.cluster.slurm.reaper", description=__doc__)
    parser.add_argument("--name", required=True, help="of the jobs to be cancelled")
    parser.add_argument("--command-s", type=float, required=True)
    parser.add_argument("--unreachable-s", type=float, required=True)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [reaper] %(message)s")
    # Whoever ends the coordinator politely ends it first, and it dismisses the reaper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the coordinator, which alone holds the other end, is gone
    log.info("the coordinator is gone; cancels all jobs named %s", given.name)
    try:
        cancel_all(SlurmCommands(given.command_s, given.unreachable_s), given.name, _SETTLE_S)
    except LiverError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
