"""The launcher's in-memory twin."""

from __future__ import annotations

from collections.abc import Callable

from liver_hpc.cluster.launcher import KILLED, LaunchedAgent, Launcher
from liver_hpc.host.child import Command
from liver_hpc.run.actions import LaunchAgent


class MemoryLauncher(Launcher):
    """`start` is called for every request, and `end` plays a death."""

    def __init__(self, start: Callable[[LaunchAgent], None] = lambda request: None) -> None:
        super().__init__(lambda request: _Played(lambda: start(request)))

    def adopt(self, agent: str, node: str, host: str, pid: int) -> bool:
        """The other coordinator had this very launcher."""
        return self.alive(agent)

    def end(self, agent: str, exit_code: int) -> None:
        """The agent ends by itself, unless it has ended before."""
        if self.alive(agent):
            self._known(agent).exit_code = exit_code


class _Played(LaunchedAgent):
    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__("played", Command("nothing", []), exit_s=0.0)
        self._begin = begin

    def start(self) -> None:
        self._begin()

    def kill(self) -> None:
        if self.exit_code is None:
            self.exit_code = KILLED

    def join(self, limit_s: float) -> bool:
        return self.exit_code is not None
