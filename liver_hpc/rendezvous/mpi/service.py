"""Meeting over MPI: the coordinator's side of the rendezvous (the joiner's is `joiner.py`).

The desk is a process of its own (`rendezvous.py`), so that an MPI that hangs or aborts takes
nothing with it; this module starts it, answers its questions and replaces it when it has ended.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from liver_hpc.errors import DeadlineError, LiverError, MeetingError
from liver_hpc.rendezvous.base import Answer, Identity, Refusal, Rendezvous
from liver_hpc.rendezvous.mpi.acceptor import EXIT_RENEW
from liver_hpc.rendezvous.mpi.calls import port_file, shared_memory_of

_OPEN_S = 30.0
_CLOSE_S = 10.0
_MAX_RESTARTS = 5
_RESTART_PAUSE_S = 0.1

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DeskPlace:
    """host: where the desk listens. interface, netmod: what MPI goes by, where the run file names
    it; by default the interface that leads to `host`, and ofi."""

    host: str = "127.0.0.1"
    interface: str | None = None
    netmod: str | None = None


HERE = DeskPlace()
"""For joiners of this machine alone."""


class MpiRendezvous(Rendezvous):
    """Runs the desk's process and answers for it; its log is logs/front-desk.log.

    `place` is the address at which the bell listens, and what MPI goes by. One joiner may hold
    the desk for `turn_s`, the coordinator's answer included.
    """

    def __init__(
        self,
        run_directory: Path,
        secret: bytes,
        place: DeskPlace = HERE,
        turn_s: float = 10.0,
    ) -> None:
        self._run_directory = run_directory
        self._settings = {
            "secret": secret.hex(),
            **asdict(place),
            "turn_s": turn_s,
        }
        self._answer: Callable[[Identity], Answer | Refusal] | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._open = threading.Event()  # set while a desk is open, and once it is broken
        self._closing = threading.Event()
        self._broken = ""
        self._failures = 0  # desks in a row that ended without having met anybody
        self._keeper: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the present desk; None while there is none."""
        with self._lock:
            return None if self._process is None else self._process.pid

    def start(self, answer: Callable[[Identity], Answer | Refusal]) -> None:
        self._answer = answer
        self._keeper = threading.Thread(target=self._keep, name="front-desk", daemon=True)
        self._keeper.start()
        if not self._open.wait(_OPEN_S):
            self.close()
            raise DeadlineError(f"waited {_OPEN_S:g} s for the rendezvous to open")
        self.check()

    def check(self) -> None:
        if self._broken:
            raise MeetingError(f"the rendezvous is broken: {self._broken}; see {self._log_path()}")

    def close(self) -> None:
        self._closing.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(_CLOSE_S)
        port_file(self._run_directory).unlink(missing_ok=True)

    def _log_path(self) -> Path:
        return self._run_directory / "logs" / "front-desk.log"

    def _keep(self) -> None:
        """Keeps a desk open until closing, or until too many have ended without a meeting."""
        try:
            while not self._closing.is_set() and self._failures <= _MAX_RESTARTS:
                code = self._run_once()
                if self._closing.is_set():
                    return
                _log.warning("the rendezvous ended with exit code %d", code)
                self._closing.wait(_RESTART_PAUSE_S * self._failures)
            self._broken = f"it ended {self._failures} times in a row without meeting anybody"
        except OSError as error:
            self._broken = str(error)
        finally:
            if not self._closing.is_set():
                self._broken = self._broken or "its keeper ended"
            self._open.set()

    def _run_once(self) -> int:
        """One life of the desk's process; its exit code."""
        process = self._spawn()
        if process is None:
            return 0
        opened = False
        timer = threading.Timer(_OPEN_S, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                self._tell(process, json.dumps(self._settings))
                assert process.stdout is not None
                for line in process.stdout:
                    event = json.loads(line)
                    if event["event"] == "open":
                        timer.cancel()
                        opened = True
                    self._handle(process, event)
        finally:
            timer.cancel()
            self._open.clear()
            process.kill()
            code = process.wait()
            with self._lock:
                self._process = None
            with contextlib.suppress(BrokenPipeError), process:
                pass  # closes its pipes
            for segment in shared_memory_of(process.pid):
                segment.unlink(missing_ok=True)
        if not (opened and code == EXIT_RENEW):
            self._failures += 1
        return code

    def _spawn(self) -> subprocess.Popen[str] | None:
        """Starts the desk's process, unless closing."""
        self._log_path().parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-P", "-m", "liver_hpc.rendezvous.mpi.acceptor"]
        with self._lock, self._log_path().open("ab") as log:
            if self._closing.is_set():
                return None
            # This thread, which the desk dies with, lives as long as the desk may.
            self._process = subprocess.Popen(
                [*command, str(os.getpid()), str(self._run_directory)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self._process

    def _handle(self, process: subprocess.Popen[str], event: dict[str, Any]) -> None:
        match event["event"]:
            case "open":
                self._open.set()
            case "ask":
                verdict = self._decide(Identity.model_validate(event["identity"]))
                answer = {"number": event["number"], "verdict": verdict.model_dump()}
                self._tell(process, json.dumps(answer))
            case "met":
                self._failures = 0
                _log.info("agent %s has been met", event["agent"])
            case "refused":
                _log.warning("a joiner was refused: %s", event["reason"])

    def _decide(self, identity: Identity) -> Answer | Refusal:
        assert self._answer is not None
        try:
            return self._answer(identity)
        except LiverError as error:
            return Refusal(reason=str(error))

    def _tell(self, process: subprocess.Popen[str], line: str) -> None:
        assert process.stdin is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
