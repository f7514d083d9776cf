"""The launcher's in-memory twin."""

from __future__ import annotations

from collections.abc import Callable

from liver_hpc.cluster.launcher import KILLED, LaunchedAgent, Launcher
from liver_hpc.run.actions import LaunchAgent


class MemoryLauncher(Launcher):
    """`start` is called for every request, and `end` plays a death."""

    def __init__(self, start: Callable[[LaunchAgent], None] = lambda request: None) -> None:
        super().__init__(lambda requests: [_Played(each, start) for each in requests])

    def adopt(self, agent: str, node: str, host: str, pid: int) -> bool:
        """The other coordinator had this very launcher."""
        return self.alive(agent)

    def end(self, agent: str, exit_code: int) -> None:
        """The agent ends by itself, unless it has ended before."""
        if self.alive(agent):
            self._known(agent).has_ended(exit_code)


class _Played(LaunchedAgent):
    def __init__(self, request: LaunchAgent, begin: Callable[[LaunchAgent], None]) -> None:
        super().__init__(request.agent)
        self._request = request
        self._begin = begin

    def start(self) -> None:
        self._begin(self._request)

    def adopt(self, host: str, pid: int) -> bool:
        return self.exit_code is None

    def kill(self) -> None:
        self.has_ended(KILLED)

    def join(self, limit_s: float) -> bool:
        return self.exit_code is not None
