"""Nodes that come and have to be left: what was known, what was done, when it was over."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import Any

from liver_hpc.run.events import Node, NodeWarned
from liver_hpc.run.records import NoticeRecord

GRANTED = "granted"
LOST = "lost"


class NoticeBook:
    """The open notices, one a node; each is recorded once, when it is over."""

    def __init__(self, add: Callable[[NoticeRecord], None]) -> None:
        self._add = add
        self._open: dict[str, NoticeRecord] = {}

    # ---- nodes that come

    def granted(self, node: Node, at_s: float) -> None:
        self._open[node.name] = _opened(GRANTED, node.name, node.allocation, at_s)

    def used(self, nodes: Container[str], action: str, generation: int) -> None:
        """A handoff onto these nodes is complete. Recorded in the order in which they came."""
        for name, notice in list(self._open.items()):
            if name in nodes and notice.kind == GRANTED:
                self._close(name, "in use", action=action, generation=generation)

    # ---- nodes to be left

    def warned(self, warning: NodeWarned, allocation: str) -> bool:
        """Opens a notice; False where one is open already: its deadline changes, and its start
        where the signal is older than the poll that told first."""
        node, kind = warning.node, warning.reason
        deadline_s = math.nan if warning.deadline_s is None else warning.deadline_s
        known = self._to_leave(node)
        if known is not None:
            at_s = min(known.at_s, warning.at_s)
            self._open[node] = replace(known, at_s=at_s, deadline_s=deadline_s, kind=kind)
            return False
        if node in self._open:
            self._close(node, "not needed")
        self._open[node] = _opened(kind, node, allocation, warning.at_s, deadline_s)
        return True

    def decided(
        self, nodes: Iterable[str], action: str, generation: int, estimate_s: float = math.nan
    ) -> None:
        """What is being done about nodes that have to be left."""
        for name in nodes:
            notice = self._to_leave(name)
            if notice is None:
                continue
            again = notice.generation == generation and notice.action.endswith(action)
            actions = notice.action if again else f"{notice.action}; {action}".removeprefix("; ")
            self._open[name] = replace(
                notice, action=actions, generation=generation, estimate_s=estimate_s
            )

    def left(self, node: str, at_s: float) -> None:
        """The last process of the run on a node has ended. Only the first call counts."""
        notice = self._to_leave(node)
        if notice is not None and math.isnan(notice.left_s):
            self._open[node] = replace(notice, left_s=at_s)

    def gone(self, node: str, allocation: str, now_s: float, had_workers: bool) -> None:
        """The node is held no longer; with workers of the run on it, it was lost."""
        if node in self._open:
            outcome = LOST if had_workers else _outcome(self._open[node])
            self._close(node, outcome, returned_s=now_s)
        elif had_workers:
            self._open[node] = _opened(LOST, node, allocation, now_s)
            self._close(node, LOST, returned_s=now_s)

    def stays(self, node: str) -> None:
        """The node was left and stays held: nobody takes it back."""
        notice = self._to_leave(node)
        if notice is not None:
            self._close(node, _outcome(notice))

    def restarts(self, kind: str, reason: str, at_s: float) -> None:
        """The run is to go on from the disk: whoever was to leave has left so."""
        for name in filter(self._to_leave, [*self._open]):
            self._close(name, "to disk")
        self._add(replace(_opened(kind, "", "", at_s), action=reason, outcome="to disk"))

    def close(self) -> None:
        """The run ends: what is still open is recorded as it stands."""
        for name in filter(self._to_leave, [*self._open]):
            notice = self._open[name]
            self._close(name, _outcome(notice) if notice.left_s > 0 else "open")
        self._open.clear()

    def _to_leave(self, node: str) -> NoticeRecord | None:
        """The open notice of a node that has to be left."""
        notice = self._open.get(node)
        return None if notice is None or notice.kind == GRANTED else notice

    def _close(self, node: str, outcome: str, **known: Any) -> None:
        self._add(replace(self._open.pop(node), outcome=outcome, **known))


def _opened(
    kind: str, node: str, allocation: str, at_s: float, deadline_s: float = math.nan
) -> NoticeRecord:
    nan = math.nan
    return NoticeRecord(kind, node, allocation, at_s, deadline_s, nan, "", -1, nan, nan, "open")


def _outcome(notice: NoticeRecord) -> str:
    """A node that was left after its deadline was left late; without a deadline, in time."""
    if math.isnan(notice.left_s):
        return "not needed"
    return "late" if notice.left_s > notice.deadline_s else "in time"
