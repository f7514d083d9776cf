"""A coordinator that trains nothing: it listens, answers operators, and ends as it is told.

Operator commands meet it in the test process. `sitecustomize_in` puts it in the place of
`liver_hpc.coordinator.main` in every process that the test starts; of those, one that is to derive
a model's spec imports no torch.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
from pathlib import Path
from typing import Any

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.coordinator.connections import Inbox
from liver_hpc.protocol.messages import (
    AnyMessage,
    DrainRequest,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    StatusRequest,
    StopRequest,
)
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.recipes.specs import DERIVE_MODULE
from liver_hpc.rendezvous.channel import Channel, ChannelClosed
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.events import EndNear, StopSignalled
from liver_hpc.run.outcome import Outcome
from liver_hpc.run.secret import read_secret


def snapshot(run: str) -> StatusSnapshot:
    return StatusSnapshot(
        run=run,
        state="training",
        step=7,
        steps=10,
        loss=3.25,
        grad_norm=1.5,
        tokens_per_s=1000.0,
        step_s=0.5,
        generation=1,
        layout="tp1 pp1 dp2",
        workers=(0, 1),
        handoffs_done=1,
        handoffs_aborted=0,
        queued=(),
        handoff=None,
        last_event="handoff done",
        journal_error="",
        now_s=1.0,
    )


class StandIn:
    """Serves a run directory; `requests` is what operators asked for."""

    def __init__(self, run_directory: Path, host: str = "127.0.0.1") -> None:
        self.requests: queue.Queue[AnyMessage] = queue.Queue()
        self._directory = run_directory
        self._told = threading.Event()
        self._end = ("stopped", "asked to")
        self.stop_data: dict[str, float] = {}
        self._server = ControlServer(host, read_secret(run_directory / "secret"), self._handle)

    def __enter__(self) -> StandIn:
        host, port = self._server.address
        address = {"host": host, "port": port, "pid": os.getpid(), "hostname": socket.gethostname()}
        self._write("coordinator.json", address)
        return self

    def __exit__(self, *_error: object) -> None:
        self._server.close()

    def run(self, limit_s: float, inbox: Inbox | None = None) -> Outcome:
        """Until it is told to stop, or that the end is near."""
        inbox = inbox or Inbox()
        deadline = Deadline.after(SystemClock(), limit_s, "somebody to end the stand-in")
        while not self._told.is_set():
            event = inbox.get(0.02)
            if isinstance(event, StopSignalled):
                self._tell("stopped", event.reason)
            elif isinstance(event, EndNear):
                self._tell("requeue", event.reason)
            elif deadline.expired():
                self._tell("failed", "nobody told the stand-in to end")
        (self._directory / "coordinator.json").unlink()
        return self.end(*self._end)

    def _tell(self, state: str, reason: str) -> None:
        self._end = (state, reason)
        self._told.set()

    def end(self, state: str, reason: str) -> Outcome:
        outcome = Outcome(state, reason, 7)
        outcome.write(self._directory)
        return outcome

    def _handle(self, channel: Channel) -> None:
        try:
            while True:
                request = channel.receive()
                self.requests.put(request)
                channel.send(self._reply(request))
                if isinstance(request, StopRequest):
                    self._told.set()
        except ChannelClosed:
            return

    def _reply(self, request: AnyMessage) -> Reply:
        if isinstance(request, StatusRequest):
            return Reply(ok=True, text="", data=snapshot(self._directory.name).model_dump())
        if isinstance(request, ResizeRequest):
            if request.layout == "tp1 pp1 dp2":
                return Reply(ok=False, text="the run already has layout tp1 pp1 dp2")
            return Reply(ok=True, text="queued")
        if isinstance(request, ReplaceRequest):
            return Reply(ok=True, text=f"replacing worker {request.replace}")
        if isinstance(request, DrainRequest):
            return Reply(ok=True, text=f"leaving {request.node}")
        assert isinstance(request, StopRequest)
        return Reply(ok=True, text="stopping", data=self.stop_data)

    def _write(self, name: str, data: dict[str, object]) -> None:
        path = self._directory / f".{name}"
        path.write_text(json.dumps(data))
        path.replace(self._directory / name)


def run_standin(path: Path, control: Any) -> Outcome:
    """In the place of `run_coordinator`; on a node of a cluster it listens to all of it."""
    (path / "outcome.json").unlink(missing_ok=True)
    on_node = "SLURM_JOB_ID" in os.environ
    with StandIn(path, socket.gethostname() if on_node else "127.0.0.1") as standin:
        control.steps_done = 7
        inbox = Inbox()
        control.reach(inbox)
        control.outcome = standin.run(60.0, inbox)
        return control.outcome  # type: ignore[no-any-return]


SITECUSTOMIZE = """
import sys, types
sys.path.append({repository!r})

def run_coordinator(run_directory, control):
    {before}
    from tests.unit.standin import run_standin
    return run_standin(run_directory, control)

module = types.ModuleType("liver_hpc.coordinator.main")
module.run_coordinator = run_coordinator
sys.modules["liver_hpc.coordinator.main"] = module
"""
BY_RULE = f"""
if {DERIVE_MODULE!r} in sys.orig_argv:
    from tests.unit.by_rule import answer
    at = sys.orig_argv.index({DERIVE_MODULE!r})
    answer(*sys.orig_argv[at + 1 : at + 3])
"""


def sitecustomize_in(
    directory: Path, repository: Path, before: str = "pass", by_rule: bool = True
) -> None:
    """For PYTHONPATH: processes then find the stand-in as `liver_hpc.coordinator.main`.

    `before` is a statement that the coordinator starts with. by_rule: specs are by rule; models
    must be GPTs then.
    """
    text = SITECUSTOMIZE.format(repository=str(repository), before=before)
    text += BY_RULE if by_rule else ""
    (directory / "sitecustomize.py").write_text(text)
