"""A stand-in for a coordinator on the control host: `RUN_DIRECTORY HOST`.

Meets agents at the real rendezvous, writes what they say, with the time, to said.jsonl of the run
directory, and tells them to end once the file `end` is there.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.protocol.messages import AnyMessage, Exit, Hears
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.secret import create_secret

LIMIT_S = 120.0


class Listener:
    """Notes in the threads of its agents."""

    def __init__(self, run_directory: Path) -> None:
        self._said = (run_directory / "said.jsonl").open("a", encoding="utf-8", buffering=1)
        self.channels: list[Channel] = []

    def serve(self, channel: Channel) -> None:
        self.channels.append(channel)
        channel.receive()  # its call
        channel.send(Hears(heard=0, epoch=1))
        try:
            while True:
                self._note(channel.receive())
        except ChannelClosed:
            self._said.write(json.dumps({"type": "gone", "heard_s": time.time()}) + "\n")

    def _note(self, message: AnyMessage) -> None:
        self._said.write(json.dumps({**message.model_dump(), "heard_s": time.time()}) + "\n")


def main() -> None:
    run_directory, host = Path(sys.argv[1]), sys.argv[2]
    secret = create_secret(run_directory / "secret")
    listener = Listener(run_directory)
    server = ControlServer(host, secret, listener.serve)
    control_host, control_port = server.address
    rendezvous = MpiRendezvous(run_directory, secret, MpiNetwork(host))
    rendezvous.start(
        lambda who: Answer(
            worker_ids=tuple(range(who.workers)),
            control_host=control_host,
            control_port=control_port,
        )
    )
    (run_directory / "open").touch()
    try:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the end")
        poll_until((run_directory / "end").exists, deadline)
        for channel in listener.channels:
            with contextlib.suppress(ChannelClosed):  # killed by Slurm
                channel.send(Exit(reason="the test is over"))
        deadline = Deadline.after(SystemClock(), LIMIT_S, "agents to go")
        poll_until((run_directory / "over").exists, deadline)
    finally:
        rendezvous.close()
        server.close()


if __name__ == "__main__":
    main()
