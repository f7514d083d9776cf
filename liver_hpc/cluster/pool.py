"""The nodes that a run holds: who tells of them as they come and go, and who gives them back."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from liver_hpc.run.events import Node, NodeGranted, NodeWarned, PoolEvent

Adopted = Mapping[str, NodeWarned | None]
"""Nodes that another coordinator held, with what it knew they were warned of."""


class NodePool:
    """Finds out which nodes the run holds, asks for more of them, and gives them back.

    No method blocks but `start` and `close`. Here it is this machine, which is simply there, with
    any number of slots: nothing is asked for and nothing given back.
    """

    def start(self, tell: Callable[[PoolEvent], None], adopt: Adopted | None = None) -> None:
        """From now on `tell` is called with every event, from any thread. Once.

        The nodes that are held already are told before it returns. adopt: those that another
        coordinator of this run held, with their warnings: what it has asked for is held, too, and
        not given back. Then it does not block; what is gone by now is told later. Raises
        LiverError.
        """
        tell(NodeGranted(Node("", "machine")))

    def warned(self, node: str, signal: str, at_s: float) -> None:
        """An agent on the node got a signal, such as "SIGTERM": finds out what that announces, then
        tells of it."""

    def want(self, workers: int) -> None:
        """How many workers the run could use on burst nodes, held or not."""

    def give_back(self, node: str) -> None:
        """No process of the run is on the node any more.

        What can be returned of its allocation is; NodeGone follows where that is so.
        """

    def reject(self, node: str, why: str) -> None:
        """The node is not well: it is given back, NodeGone follows, and it is not asked for again
        for a while."""

    def avoid(self, node: str) -> None:
        """An operator wants the run off this node: it is not asked for again."""

    def readmit(self, node: str) -> None:
        """The operator wants the run off this node no longer."""

    def close(self) -> None:
        """Everything that was asked for while the run went on is returned. Idempotent."""
