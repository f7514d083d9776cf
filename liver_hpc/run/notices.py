"""Nodes that come and have to be left: what was known, what was done, when it was over."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from liver_hpc.run.events import Node, NodeWarned
from liver_hpc.run.records import NoticeRecord

GRANTED = "granted"
LOST = "lost"


@dataclass
class Notice:
    """One node's notice while it is open; see NoticeRecord for the fields."""

    kind: str
    node: str
    allocation: str
    at_s: float
    deadline_s: float = math.nan
    estimate_s: float = math.nan
    actions: list[str] = field(default_factory=list)
    generation: int = -1
    left_s: float = math.nan

    def record(self, outcome: str, returned_s: float = math.nan) -> NoticeRecord:
        return NoticeRecord(
            kind=self.kind,
            node=self.node,
            allocation=self.allocation,
            at_s=self.at_s,
            deadline_s=self.deadline_s,
            estimate_s=self.estimate_s,
            action="; ".join(self.actions),
            generation=self.generation,
            left_s=self.left_s,
            returned_s=returned_s,
            outcome=outcome,
        )


class NoticeBook:
    """The open notices, one a node; each is recorded once, when it is over."""

    def __init__(self, add: Callable[[NoticeRecord], None]) -> None:
        self._add = add
        self._open: dict[str, Notice] = {}

    # ---- nodes that come

    def granted(self, node: Node, at_s: float) -> None:
        self._open[node.name] = Notice(GRANTED, node.name, node.allocation, at_s)

    def used(self, nodes: Container[str], action: str, generation: int) -> None:
        """A handoff onto these nodes is complete. Recorded in the order in which they came."""
        for name, notice in list(self._open.items()):
            if name in nodes and notice.kind == GRANTED:
                notice.actions.append(action)
                notice.generation = generation
                self._close(name, "in use")

    # ---- nodes to be left

    def warned(self, warning: NodeWarned, allocation: str) -> bool:
        """Opens a notice; of one that is open already only the deadline changes, and False."""
        deadline_s = math.nan if warning.deadline_s is None else warning.deadline_s
        notice = self._open.get(warning.node)
        if notice is not None and notice.kind != GRANTED:
            notice.deadline_s, notice.kind = deadline_s, warning.reason
            return False
        if notice is not None:
            self._close(warning.node, "not needed")
        self._open[warning.node] = Notice(
            warning.reason, warning.node, allocation, warning.at_s, deadline_s
        )
        return True

    def decided(
        self, nodes: Iterable[str], action: str, generation: int, estimate_s: float = math.nan
    ) -> None:
        """What is being done about nodes that have to be left."""
        for name in nodes:
            notice = self._open.get(name)
            if notice is not None and notice.kind != GRANTED:
                if notice.actions[-1:] != [action] or notice.generation != generation:
                    notice.actions.append(action)
                notice.generation, notice.estimate_s = generation, estimate_s

    def left(self, node: str, at_s: float) -> None:
        """The last process of the run on a node has ended. Only the first call counts."""
        notice = self._open.get(node)
        if notice is not None and notice.kind != GRANTED and math.isnan(notice.left_s):
            notice.left_s = at_s

    def gone(self, node: str, allocation: str, now_s: float, had_workers: bool) -> None:
        """The node is held no longer; with workers of the run on it, it was lost."""
        notice = self._open.get(node)
        if notice is None:
            if had_workers:
                self._add(Notice(LOST, node, allocation, now_s).record(LOST, now_s))
            return
        if notice.kind == GRANTED:
            outcome = LOST if had_workers else "not needed"
        else:
            outcome = LOST if had_workers else _outcome(notice)
        self._close(node, outcome, now_s)

    def stays(self, node: str) -> None:
        """The node was left and stays held: nobody takes it back."""
        notice = self._open.get(node)
        if notice is not None and notice.kind != GRANTED:
            self._close(node, _outcome(notice))

    def restarts(self, kind: str, reason: str, at_s: float) -> None:
        """The run is to go on from the disk: whoever was to leave has left so."""
        for name in [name for name, notice in self._open.items() if notice.kind != GRANTED]:
            self._close(name, "to disk")
        self._add(Notice(kind, "", "", at_s, actions=[reason]).record("to disk"))

    def close(self) -> None:
        """The run ends: what is still open is recorded as it stands."""
        for name in list(self._open):
            notice = self._open[name]
            if notice.kind != GRANTED:
                self._close(name, _outcome(notice) if notice.left_s > 0 else "open")
        self._open.clear()

    def _close(self, node: str, outcome: str, returned_s: float = math.nan) -> None:
        notice = self._open.pop(node)
        self._add(notice.record(outcome, returned_s))


def _outcome(notice: Notice) -> str:
    """A node that was left after its deadline was left late; without a deadline, in time."""
    if math.isnan(notice.left_s):
        return "not needed"
    return "late" if notice.left_s > notice.deadline_s else "in time"
