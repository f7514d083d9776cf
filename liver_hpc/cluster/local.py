"""Agents as processes of this machine.

The tree of one agent is the agent, its workers and, while it meets the rendezvous, its joiner.
Whichever of them, or of the processes above, is killed, what is below it follows: the agent dies
with the process that launched it, its children with the agent; and once the agent has ended the
launcher kills whatever is left.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from liver_hpc.cluster.launcher import AGENT_MODULE, KeptAgent, Launcher, NodeRequest
from liver_hpc.host.child import Child, Command

_SWEEP_S = 20.0


class LocalLauncher(Launcher):
    """Runs agents on this machine.

    `exit_s` is how long a killed agent may take to end its workers before all get SIGKILL;
    `agent_options` are added to every agent's command line. What an agent prints goes to its
    log, logs/agent-NAME.log of the run directory.
    """

    def __init__(
        self, run_directory: Path, exit_s: float = 10.0, agent_options: Sequence[str] = ()
    ) -> None:
        super().__init__(close_s=exit_s + _SWEEP_S)
        self._run_directory = run_directory
        self._exit_s = exit_s
        self._agent_options = agent_options

    def _prepare(self, request: NodeRequest) -> KeptAgent:
        words = [sys.executable, "-P", "-m", AGENT_MODULE, *request.options(self._run_directory)]
        log = self._run_directory / "logs" / f"agent-{request.agent}.log"
        command = Command(
            f"agent {request.agent}", [*words, *self._agent_options], log=log, apart="session"
        )
        return _LocalAgent(request.agent, command, self._exit_s)


class _LocalAgent(KeptAgent):
    def __init__(self, agent: str, command: Command, exit_s: float) -> None:
        super().__init__(agent)
        self._command = command
        self._exit_s = exit_s
        self._child: Child

    def _begin(self) -> None:
        self._child = Child(self._command)

    def _bury(self) -> int:
        code = self._child.wait()
        self._child.end(0.0)
        return code

    def _end(self) -> None:
        """SIGTERM to the agent, which ends its workers; SIGKILL to all after `exit_s`."""
        self._child.end(self._exit_s)
