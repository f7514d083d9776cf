"""How agents come to run: the launcher, and its in-memory twin."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from liver_hpc.errors import LiverError

KILLED = 137
"""Exit code of an agent that was killed (128 + SIGKILL, as shells count)."""
TERMINATED = 143
"""Exit code of an agent that was told to end by SIGTERM before it had met."""


@dataclass(frozen=True)
class NodeRequest:
    """One agent: how many workers it starts, the layout that they rehearse, where it runs.

    slots: the worker places of the node that its workers take, one each; a slot is the number of
    an accelerator. node: the node's name; empty where there is no choice.
    """

    agent: str
    workers: int
    layout: str
    slots: tuple[int, ...] = ()
    node: str = ""


class Launcher(ABC):
    """Starts agents, tells whether they still run, and ends them. An agent's name is used once."""

    @abstractmethod
    def launch(self, requests: Sequence[NodeRequest]) -> None:
        """Starts an agent for every request; does not wait until it has booted.

        Raises LiverError when that is impossible or a name was used before.
        """

    @abstractmethod
    def alive(self, agent: str) -> bool:
        """Whether anything of the agent still runs. Raises LiverError for an unknown agent."""

    @abstractmethod
    def exit_code(self, agent: str) -> int | None:
        """How the agent ended, None while it is alive: 0 when all its workers ended well.

        The agent's own codes are in `liver_hpc.node.agent`; for an agent that died by a signal a
        launcher may report that signal's number, or 128 and that number.
        """

    @abstractmethod
    def kill(self, agent: str) -> None:
        """Ends the agent and its workers; `alive` tells when that is done. Idempotent."""

    @abstractmethod
    def close(self) -> None:
        """Ends all agents; afterwards nothing of them lives. Idempotent."""


class MemoryLauncher(Launcher):
    """The in-memory twin: `start` is called for every request, and `end` plays a death."""

    def __init__(self, start: Callable[[NodeRequest], None] = lambda request: None) -> None:
        self._start = start
        self._exit_codes: dict[str, int | None] = {}
        self._closed = False

    def launch(self, requests: Sequence[NodeRequest]) -> None:
        check_names(requests, self._exit_codes, self._closed)
        for request in requests:
            self._exit_codes[request.agent] = None
            self._start(request)

    def alive(self, agent: str) -> bool:
        return self.exit_code(agent) is None

    def exit_code(self, agent: str) -> int | None:
        if agent not in self._exit_codes:
            raise unknown_agent(agent)
        return self._exit_codes[agent]

    def kill(self, agent: str) -> None:
        self.end(agent, KILLED)

    def close(self) -> None:
        self._closed = True
        for agent in self._exit_codes:
            self.end(agent, KILLED)

    def end(self, agent: str, exit_code: int) -> None:
        """The agent ends by itself, unless it has ended before."""
        if self.alive(agent):
            self._exit_codes[agent] = exit_code


def check_names(requests: Sequence[NodeRequest], used: Container[str], closed: bool) -> None:
    """Raises LiverError when `requests` cannot be launched beside the `used` names."""
    if closed:
        raise LiverError("the launcher is closed")
    names = [request.agent for request in requests]
    again = sorted({name for name in names if name in used or names.count(name) > 1})
    if again:
        raise LiverError(f"agents {again} were launched before; a name is used once")


def unknown_agent(agent: str) -> LiverError:
    return LiverError(f"agent {agent!r} was never launched")
