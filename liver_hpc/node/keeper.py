"""The batch process of a burst allocation: keeps it for exactly as long as the run goes on.

It holds a channel to the coordinator and ends when that closes and no other coordinator takes over;
Slurm then takes the nodes back.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import threading
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.protocol.messages import KeeperHello
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import last_sign, replay_limit_s
from liver_hpc.run.secret import read_secret

CONNECT_S = 30.0
"""How long at least the first coordinator is looked for."""
EXIT_NO_RUN = 3
"""Exit code of a keeper that found no run to keep nodes for."""

_RETRY_S = 1.0

log = logging.getLogger(__name__)


def find_coordinator(run: RunDirectory, limit_s: float) -> Channel | None:
    """A channel to the run's coordinator; None where the run is over. Raises LiverError when there
    is none in time, which is `deadlines.boot_s` longer while one shows that it lives: it begins."""
    secret, limits, clock = read_secret(run.secret_path), run.config().deadlines, SystemClock()
    control_s, sign = limits.control_s, last_sign(run.path)
    deadline = Deadline.after(clock, limit_s, f"the coordinator of {run.path}")
    longest_s = limits.boot_s + limit_s + replay_limit_s(run.path)
    longest = Deadline.after(clock, longest_s, deadline.waits_for)
    pause = threading.Event()
    while True:
        try:
            if (at := run.coordinator()) is not None:
                left_s = max(min(deadline.remaining_s(), control_s), 0.1)
                return connect((at.host, at.port), secret, left_s, "the coordinator")
        except (LiverError, OSError) as error:
            # Also of a stranger at the port of one that is gone, and of a file system.
            log.info("no coordinator yet: %s", error)
        with contextlib.suppress(LiverError, OSError):
            if run.last_outcome() is not None:
                return None
        before, sign = sign, last_sign(run.path)
        if before != sign is not None:
            left_s = min(limit_s, longest.remaining_s())
            deadline = Deadline.after(clock, left_s, deadline.waits_for)
        deadline.check()
        pause.wait(min(_RETRY_S, deadline.remaining_s()))


def keep(run_directory: Path, job: str) -> None:
    """Returns when the run is over. Raises LiverError when there is none to begin with, or no
    coordinator any more."""
    run = RunDirectory(run_directory)
    # The nodes may have been granted while a coordinator is gone.
    channel = find_coordinator(run, max(CONNECT_S, run.config().deadlines.coordinator_s))
    while channel is not None:
        try:
            channel.send(KeeperHello(job=job))
            log.info("keeps job %s for %s", job, channel.peer)
            while True:
                channel.receive()
        except ChannelClosed as error:
            log.info("the coordinator is gone: %s", error)
        finally:
            channel.close()
        channel = find_coordinator(run, run.config().deadlines.coordinator_s)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="liver_hpc.node.keeper", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [keeper] %(message)s")
    try:
        keep(given.run_directory, os.environ.get("SLURM_JOB_ID", ""))
    except LiverError as error:
        log.error("%s", error)
        return EXIT_NO_RUN
    return 0


if __name__ == "__main__":
    sys.exit(main())
