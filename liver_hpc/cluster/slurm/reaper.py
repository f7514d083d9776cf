"""`python -m liver_hpc.cluster.slurm.reaper NAME RUN_DIRECTORY EPOCH`.

A child of the coordinator of that number, which outlives it where it is killed: until the reaper
of another one stands, or else for as long as it takes to cancel its burst jobs.

Keepers end by themselves, but a request that is still pending has none yet.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.replies import COMPLETING
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import EPOCHS, newest_epoch

SETTLE_S = 2.0
_LOOK_S = 1.0
_CANCEL_S = 30.0

log = logging.getLogger(__name__)


def cancel_all(commands: SlurmCommands, name: str, settle_s: float = 0.0) -> None:
    """Ends all jobs of that name; those that only wait for their processes to end are left.

    settle_s: how long a submission may still be under way. Raises DeadlineError, SlurmError.
    """
    deadline = Deadline.after(SystemClock(), _CANCEL_S, f"jobs named {name} to end")

    def ended() -> bool:
        commands.cancel_named(name)
        threading.Event().wait(settle_s)
        return all(job.state == COMPLETING for job in commands.named(name).values())

    poll_until(ended, deadline, _LOOK_S)


def stands(run: RunDirectory, epoch: int) -> Path:
    """The file that says that the reaper of the coordinator of that number does."""
    return run.path / EPOCHS / f"{epoch}.reaper"


def is_followed(run: RunDirectory, epoch: int, limits: DeadlineSection) -> bool:
    """Waits for another coordinator than that of the number; false where none has come, or the run
    is over."""
    clock, newest = SystemClock(), epoch
    deadline = Deadline.after(clock, limits.coordinator_s, "a coordinator")
    while not deadline.expired():
        try:
            if (newer := newest_epoch(run.path)) > newest:
                newest = newer
                # It may still be killed before it looks at burst jobs.
                reaper = f"the reaper of coordinator {newest}"
                deadline = Deadline.after(clock, limits.successor_s, reaper)
            if any(stands(run, later).exists() for later in range(epoch + 1, newest + 1)):
                log.info("the reaper of another coordinator stands")
                return True
            if run.last_outcome() is not None:
                break
        except (LiverError, OSError) as error:
            log.warning("%s", error)
        threading.Event().wait(_LOOK_S)
    return False


def main() -> int:
    name, run, epoch = sys.argv[1], RunDirectory(Path(sys.argv[2])), int(sys.argv[3])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [reaper] %(message)s")
    config = run.config()
    # Whoever ends the coordinator politely ends it first, and it dismisses the reaper.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        stands(run, epoch).touch(mode=0o600)
    except OSError as error:
        log.warning("%s", error)
    sys.stdin.buffer.read()  # until the coordinator, which alone holds the other end, is gone
    if is_followed(run, epoch, config.deadlines):
        return 0
    log.info("the coordinator is gone; cancels all jobs named %s", name)
    slurm = config.cluster.slurm
    try:
        cancel_all(SlurmCommands(slurm.command_s, slurm.unreachable_s), name, SETTLE_S)
    except LiverError as error:
        log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
