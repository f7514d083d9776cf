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

from liver_hpc.cluster.launcher import AGENT_MODULE, LaunchedAgent, Launcher, NodeRequest, agent_log
from liver_hpc.host.child import Command

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

    def _prepare(self, request: NodeRequest) -> LaunchedAgent:
        words = [sys.executable, "-P", "-m", AGENT_MODULE, *request.options(self._run_directory)]
        log = agent_log(self._run_directory, request.agent)
        name = f"agent {request.agent}"
        command = Command(name, [*words, *self._agent_options], log=log, apart="session")
        return LaunchedAgent(request.agent, command, self._exit_s)
