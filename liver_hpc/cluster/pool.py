"""The nodes that a run holds: who tells of them as they come and go, and who gives them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """A node that agents can be launched on.

    allocation: the name of what it came with: a component, or a burst allocation. slots: how many
    workers it takes, None without bound. volatile: it may be taken away again. automatic: used as
    soon as it is there; otherwise only when somebody asks for so many workers. burst: it was asked
    for while the run goes on, and goes back when it is of no use.
    """

    name: str
    allocation: str
    slots: int | None = None
    volatile: bool = False
    automatic: bool = True
    burst: bool = False


@dataclass(frozen=True)
class NodeGranted:
    """A node is held and answers."""

    node: Node


@dataclass(frozen=True)
class NodeWarned:
    """A node is to be left.

    reason: "preempted", "time limit", "drained", "cancelled", "operator" or "node hours".
    at_s: when the warning came. deadline_s: when its processes will be killed; None when nobody
    has set a time. Both in epoch seconds. A second warning of a node beats the first.
    """

    node: str
    reason: str
    at_s: float
    deadline_s: float | None = None


@dataclass(frozen=True)
class NodeGone:
    """A node is held no longer, and whatever ran there has ended."""

    node: str
    reason: str


@dataclass(frozen=True)
class EndNear:
    """The allocation in which the coordinator itself lives ends at `deadline_s`, epoch seconds."""

    reason: str
    at_s: float
    deadline_s: float


@dataclass(frozen=True)
class PoolNote:
    """Something that an operator would want to see: a refused request, a controller away."""

    text: str


PoolEvent = NodeGranted | NodeWarned | NodeGone | EndNear | PoolNote


class NodePool(ABC):
    """Finds out which nodes the run holds, asks for more of them, and gives them back."""

    @abstractmethod
    def start(self, tell: Callable[[PoolEvent], None]) -> None:
        """From now on `tell` is called with every event, from any thread. Once.

        The nodes that are held already are told before it returns.
        """

    @abstractmethod
    def warned(self, node: str, signal: str, at_s: float) -> None:
        """An agent on the node got a signal, such as "SIGTERM": finds out what that announces, then
        tells of it.

        Does not block.
        """

    @abstractmethod
    def want(self, workers: int) -> None:
        """How many workers the run could use on burst nodes, held or not. Does not block."""

    @abstractmethod
    def give_back(self, node: str) -> None:
        """No process of the run is on the node any more. Does not block.

        What can be returned of its allocation is; NodeGone follows where that is so.
        """

    @abstractmethod
    def avoid(self, node: str) -> None:
        """An operator wants the run off this node: it is not asked for again. Does not block."""

    @abstractmethod
    def readmit(self, node: str) -> None:
        """The operator wants the run off this node no longer. Does not block."""

    @abstractmethod
    def close(self) -> None:
        """Everything that was asked for while the run went on is returned. Idempotent."""


class FixedPool(NodePool):
    """Nodes that are simply there; by default this machine, with any number of slots."""

    def __init__(self, nodes: Sequence[Node] = (Node("", "machine"),)) -> None:
        self._nodes = tuple(nodes)

    def start(self, tell: Callable[[PoolEvent], None]) -> None:
        for node in self._nodes:
            tell(NodeGranted(node))

    def warned(self, node: str, signal: str, at_s: float) -> None:
        pass

    def want(self, workers: int) -> None:
        pass

    def give_back(self, node: str) -> None:
        pass

    def avoid(self, node: str) -> None:
        pass

    def readmit(self, node: str) -> None:
        pass

    def close(self) -> None:
        pass
