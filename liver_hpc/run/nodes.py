"""Which nodes the run holds, what was said of them, and where workers can still be started."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from liver_hpc.errors import LiverError
from liver_hpc.run.node_events import Node, NodeWarned, Seat

Taken = Mapping[str, Collection[int]]
"""Slots in use, by node."""


@dataclass
class HeldNode:
    """A node that the run holds.

    warning: set once it has to be left. idle_since_s: when its last process ended; None while one
    runs there. given_back: the pool was told so; a burst allocation goes back with its last node.
    """

    node: Node
    warning: NodeWarned | None = None
    idle_since_s: float | None = None
    given_back: bool = False


class HeldNodes:
    """The nodes of a run, in the order in which they came."""

    def __init__(self, workers_per_agent: int | None) -> None:
        self._workers_per_agent = workers_per_agent
        self._held: dict[str, HeldNode] = {}

    # ---- coming and going

    def grant(self, node: Node) -> bool:
        """Enters a node; False when it was held already. A node that comes again is as new."""
        known = self._held.get(node.name)
        if known is not None and known.node == node and known.warning is None:
            return False
        self._held[node.name] = HeldNode(node)
        return True

    def warn(self, warning: NodeWarned) -> bool:
        """Notes that a node has to be left; False for one that is not held."""
        held = self._held.get(warning.node)
        if held is None:
            return False
        held.warning = warning
        return True

    def remove(self, node: str) -> HeldNode | None:
        """Strikes a node off; None when it was not held."""
        return self._held.pop(node, None)

    def note_idle(self, taken: Taken, now_s: float) -> list[HeldNode]:
        """Notes since when nodes are idle; returns those that have become so."""
        fresh = []
        for name, held in self._held.items():
            if taken.get(name):
                held.idle_since_s, held.given_back = None, False
            elif held.idle_since_s is None:
                held.idle_since_s = now_s
                fresh.append(held)
        return fresh

    # ---- what there is

    def get(self, node: str) -> HeldNode | None:
        return self._held.get(node)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def held(self) -> tuple[HeldNode, ...]:
        return tuple(self._held.values())

    def usable(self) -> list[Node]:
        """Nodes that need not be left and do not go back, the ones to fill first at the front.

        What cannot be taken away comes before what can, what is used by itself before what has
        to be asked for.
        """
        kept = {held.node.allocation for held in self._held.values() if not held.given_back}
        free = [
            held.node
            for held in self._held.values()
            if held.warning is None and (held.node.allocation in kept or not held.node.burst)
        ]
        return sorted(free, key=lambda node: (not node.automatic, node.preemptible))

    def doomed(self) -> frozenset[str]:
        """Nodes that have to be left."""
        return frozenset(name for name, held in self._held.items() if held.warning is not None)

    def deadline_s(self, node: str) -> float | None:
        """By when a node has to be left, epoch seconds; None where nobody has set a time."""
        held = self._held.get(node)
        return held.warning.deadline_s if held is not None and held.warning is not None else None

    def window_s(self, nodes: Iterable[str], now_s: float) -> float:
        """Seconds until the first of the nodes is taken, at least 0; infinite without deadline."""
        known = [at_s for node in nodes if (at_s := self.deadline_s(node)) is not None]
        return max(0.0, min(known, default=math.inf) - now_s)

    def room(self, occupied: Collection[str]) -> int | None:
        """How many workers the run may have without being asked; None without bound.

        Nodes to be asked for count where workers are already (`occupied`).
        """
        nodes = [node for node in self.usable() if node.automatic or node.name in occupied]
        return _total(node.slots for node in nodes)

    def free_slots(self, taken: Taken) -> int | None:
        """Slots without a worker on usable nodes; None without bound."""
        return _total(
            None if node.slots is None else node.slots - len(taken.get(node.name, ()))
            for node in self.usable()
        )

    def steady_slots(self, taken: Taken, burst: bool) -> int:
        """Slots on usable nodes of one kind that are used, or would be without being asked for,
        but for those that were given back; 0 where there is no bound."""
        return sum(
            node.slots or 0
            for node in self.usable()
            if node.burst == burst
            and (node.automatic or node.name in taken)
            and not self._held[node.name].given_back
        )

    def seats(self, workers: int, taken: Taken) -> list[Seat]:
        """Places for this many more workers; an agent for every node, or for `workers_per_node`.

        Raises LiverError that says what is held when they do not fit.
        """
        seats: list[Seat] = []
        left = workers
        for node in self.usable():
            used = taken.get(node.name, ())
            numbers = count() if node.slots is None else range(node.slots)
            slots = tuple(islice((slot for slot in numbers if slot not in used), left))
            seats += self._split(node, slots)
            left -= len(slots)
            if left == 0:
                return seats
        raise LiverError(
            f"wanted free slots for {workers} workers, got {workers - left}; {self.describe(taken)}"
        )

    def _split(self, node: Node, slots: tuple[int, ...]) -> list[Seat]:
        step = len(slots) if node.slots is not None else self._workers_per_agent or len(slots)
        return [
            Seat(node.name, slots[first : first + step])
            for first in range(0, len(slots), max(1, step))
        ]

    def describe(self, taken: Taken) -> str:
        """All nodes in a line: "n1 (2 of 2 slots taken), n3 (0 of 2, to be left: preempted)"."""
        return ", ".join(self.lines(taken)) or "no node is held"

    def lines(self, taken: Taken) -> list[str]:
        lines = []
        for held in self._held.values():
            node, warning = held.node, held.warning
            used = len(taken.get(node.name, ()))
            slots = "any number" if node.slots is None else str(node.slots)
            leave = f", to be left: {warning.reason}" if warning else ""
            name = f"{node.name} ({node.allocation})" if node.name else node.allocation
            lines.append(f"{name}: {used} of {slots} slots taken{leave}")
        return lines

    # ---- who goes first

    def stayers(self, workers: Mapping[int, str], number: int) -> Sequence[int]:
        """The workers among which those that stay in a smaller world are chosen.

        workers: the node of each. Where some nodes are more lasting than others, exactly `number`
        workers of the most lasting ones; otherwise all, and the fewest bytes decide.
        """
        ranks = {worker: self._rank(node) for worker, node in workers.items()}
        if len(set(ranks.values())) <= 1:
            return sorted(workers)
        order = {name: position for position, name in enumerate(self._held)}
        whole_nodes = sorted(
            workers, key=lambda w: (ranks[w], order.get(workers[w], len(order)), w)
        )
        return sorted(whole_nodes[:number])

    def _rank(self, node: str) -> tuple[bool, bool]:
        held = self._held.get(node)
        if held is None:
            return (True, True)
        return (not held.node.automatic, held.node.preemptible)


def _total(slots: Iterable[int | None]) -> int | None:
    """Their sum; None where one of them has no bound."""
    numbers = list(slots)
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
