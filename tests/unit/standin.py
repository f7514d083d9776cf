"""A coordinator that trains nothing: it listens, answers operators, and ends as it is told.

Operator commands meet it in the test process. `sitecustomize_in` puts it in the place of
`liver_hpc.coordinator` in every process that the test starts.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from pathlib import Path
from types import TracebackType

from liver_hpc.protocol.messages import (
    AnyMessage,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    StatusRequest,
    StopRequest,
)
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ControlServer
from liver_hpc.rendezvous.secret import read_secret


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
        metrics_error="",
        now_s=1.0,
    )


class StandIn:
    """Serves a run directory; `requests` is what operators asked for."""

    def __init__(self, run_directory: Path) -> None:
        self.requests: queue.Queue[AnyMessage] = queue.Queue()
        self._directory = run_directory
        self._stopped = threading.Event()
        self._server = ControlServer(
            "127.0.0.1", read_secret(run_directory / "secret"), self._handle
        )

    def __enter__(self) -> StandIn:
        host, port = self._server.address
        address = {"host": host, "port": port, "pid": os.getpid()}
        self._write("coordinator.json", address)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.close()

    def run(self, limit_s: float) -> int:
        """Until it is told to stop."""
        stopped = self._stopped.wait(limit_s)
        self._write("outcome.json", {"state": "stopped", "reason": "asked to", "step": 7})
        return 0 if stopped else 1

    def end(self, state: str, reason: str) -> None:
        self._write("outcome.json", {"state": state, "reason": reason, "step": 7})

    def _handle(self, channel: Channel) -> None:
        try:
            while True:
                request = channel.receive()
                self.requests.put(request)
                channel.send(self._reply(request))
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
        assert isinstance(request, StopRequest)
        self._stopped.set()
        return Reply(ok=True, text="stopping")

    def _write(self, name: str, data: dict[str, object]) -> None:
        path = self._directory / f".{name}"
        path.write_text(json.dumps(data))
        path.replace(self._directory / name)


SITECUSTOMIZE = """
import sys, types
sys.path.append({repository!r})

def run_coordinator(run_directory):
    {before}
    from pathlib import Path
    from tests.unit.standin import StandIn
    with StandIn(Path(run_directory)) as standin:
        return standin.run(limit_s=60.0)

module = types.ModuleType("liver_hpc.coordinator")
module.run_coordinator = run_coordinator
sys.modules["liver_hpc.coordinator"] = module
"""


def sitecustomize_in(directory: Path, repository: Path, before: str = "pass") -> None:
    """For PYTHONPATH: processes then find the stand-in as `liver_hpc.coordinator`.

    `before` is a statement that the coordinator starts with.
    """
    text = SITECUSTOMIZE.format(repository=str(repository), before=before)
    (directory / "sitecustomize.py").write_text(text)
