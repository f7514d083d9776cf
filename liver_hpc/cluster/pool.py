"""The nodes that a run holds: who tells of them as they come and go, and who gives them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from liver_hpc.run.node_events import Node, NodeGranted, PoolEvent


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
