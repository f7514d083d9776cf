"""Agents as processes of this machine.

The tree of one agent is the agent, its workers and, while it meets the rendezvous, its joiner.
Whichever of them, or of the processes above, is killed, what is below it follows: the agent dies
with the process that launched it, its children with the agent; and once the agent has ended the
launcher kills whatever is left.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from liver_hpc.cluster.launcher import Launcher, NodeRequest, check_names, unknown_agent
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded
from liver_hpc.host.marks import kill_marked, marked_processes

_MARK = "LIVER_LAUNCH"
_SPAWN_S = 30.0
_SWEEP_S = 5.0

_log = logging.getLogger(__name__)


class LocalLauncher(Launcher):
    """Runs agents on this machine.

    `exit_s` is how long a killed agent may take to end its workers before all get SIGKILL;
    `agent_options` are added to every agent's command line. What an agent prints goes to its
    log, logs/agent-NAME.log of the run directory.
    """

    def __init__(
        self, run_directory: Path, exit_s: float = 10.0, agent_options: Sequence[str] = ()
    ) -> None:
        self._run_directory = run_directory
        self._exit_s = exit_s
        self._agent_options = tuple(agent_options)
        self._trees: dict[str, _Tree] = {}
        self._closed = False

    def launch(self, requests: Sequence[NodeRequest]) -> None:
        check_names(requests, self._trees, self._closed)
        for request in requests:
            log = self._run_directory / "logs" / f"agent-{request.agent}.log"
            tree = _Tree(request.agent, self._command(request), log, self._exit_s)
            self._trees[request.agent] = tree
            tree.start()

    def alive(self, agent: str) -> bool:
        return self._tree(agent).exit_code is None

    def exit_code(self, agent: str) -> int | None:
        return self._tree(agent).exit_code

    def kill(self, agent: str) -> None:
        self._tree(agent).kill()

    def close(self) -> None:
        self._closed = True
        trees = list(self._trees.values())
        for tree in trees:
            tree.kill()
        survivors = [pid for tree in trees for pid in tree.join()]
        if survivors:
            raise DeadlineError(f"waited for killed processes {survivors} to end")

    def _tree(self, agent: str) -> _Tree:
        try:
            return self._trees[agent]
        except KeyError:
            raise unknown_agent(agent) from None

    def _command(self, request: NodeRequest) -> list[str]:
        agent = [sys.executable, "-P", "-m", "liver_hpc.node.agent"]
        run = ["--run-directory", str(self._run_directory), "--agent", request.agent]
        work = ["--workers", str(request.workers), "--layout", request.layout]
        slots = ["--slots", ",".join(map(str, request.slots))] if request.slots else []
        return [*agent, *run, *work, *slots, *self._agent_options]


class _Tree:
    """The process tree of one agent, kept by a thread that starts it and buries it."""

    def __init__(self, agent: str, command: list[str], log: Path, exit_s: float) -> None:
        self._agent = agent
        self._command = command
        self._log = log
        self._exit_s = exit_s
        self._value = f"{agent}:{secrets.token_hex(8)}"
        self._spawned = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._buried = threading.Event()
        self._killer: threading.Thread | None = None
        self._keeper: threading.Thread | None = None
        self.exit_code: int | None = None

    def start(self) -> None:
        """Raises LiverError when the agent cannot be started."""
        self._keeper = threading.Thread(target=self._keep, name=f"agent-{self._agent}", daemon=True)
        self._keeper.start()
        if not self._spawned.wait(_SPAWN_S):
            raise DeadlineError(f"waited {_SPAWN_S:g} s for agent {self._agent} to start")
        if self._failure is not None:
            raise LiverError(f"agent {self._agent}: {self._failure}") from self._failure

    def kill(self) -> None:
        if self._killer is None and self.exit_code is None:
            self._killer = threading.Thread(
                target=self._kill, name=f"kill-{self._agent}", daemon=True
            )
            self._killer.start()

    def _kill(self) -> None:
        """SIGTERM to the agent, which ends its workers; SIGKILL to all after `exit_s`."""
        if self._process is not None:
            self._process.terminate()
        if not self._buried.wait(self._exit_s):
            _log.warning("agent %s has not ended %g s after SIGTERM", self._agent, self._exit_s)
            self._sweep()

    def join(self) -> list[int]:
        """Waits for a killed tree; the processes that live on nevertheless."""
        if self._keeper is None:
            return []
        self._keeper.join(self._exit_s + 2 * _SWEEP_S)
        return marked_processes(_MARK, self._value) if self._keeper.is_alive() else []

    def _keep(self) -> None:
        # The agent dies with the thread that started it: this one stays until it has ended.
        try:
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    guarded(self._command),
                    env={**clean_environment(os.environ), _MARK: self._value},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        except OSError as error:
            self._failure = error
            self.exit_code = 127
            self._buried.set()
            return
        finally:
            self._spawned.set()
        code = self._process.wait()
        self._sweep()
        self.exit_code = code if code >= 0 else 128 - code
        self._buried.set()
        _log.info("agent %s ended with exit code %d", self._agent, self.exit_code)

    def _sweep(self) -> None:
        try:
            kill_marked(_MARK, self._value, _SWEEP_S)
        except DeadlineError as error:
            _log.error("agent %s: %s", self._agent, error)
