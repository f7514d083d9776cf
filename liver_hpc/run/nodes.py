"""Which nodes the run holds, what was said of them, and where workers can still be started."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from liver_hpc.errors import LiverError
from liver_hpc.run.node_events import Node, NodeWarned

Taken = Mapping[str, Collection[int]]
"""Slots in use, by node."""


@dataclass(frozen=True)
class Seat:
    """Where one agent is to run, and the slots of the node that its workers take."""

    node: str
    slots: tuple[int, ...]


@dataclass
class Held:
    """A node that the run holds; `warning` is set once it has to be left."""

    node: Node
    warning: NodeWarned | None = None


class Capacity:
    """The book of nodes, in the order in which they came. Used by the event loop alone."""

    def __init__(self, workers_per_agent: int | None) -> None:
        self._workers_per_agent = workers_per_agent
        self._held: dict[str, Held] = {}

    # ---- coming and going

    def grant(self, node: Node) -> bool:
        """Enters a node; False when it was held already. A node that comes again is as new."""
        known = self._held.get(node.name)
        if known is not None and known.node == node and known.warning is None:
            return False
        self._held[node.name] = Held(node)
        return True

    def warn(self, warning: NodeWarned) -> bool:
        """Notes that a node has to be left; False for one that is not held."""
        held = self._held.get(warning.node)
        if held is None:
            return False
        held.warning = warning
        return True

    def remove(self, node: str) -> Held | None:
        """Strikes a node off; None when it was not held."""
        return self._held.pop(node, None)

    # ---- what there is

    def get(self, node: str) -> Held | None:
        return self._held.get(node)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._held)

    def held(self) -> tuple[Held, ...]:
        return tuple(self._held.values())

    def usable(self) -> list[Node]:
        """Nodes that need not be left, the ones to fill first at the front.

        What cannot be taken away comes before what can, what is used by itself before what has
        to be asked for.
        """
        free = [held.node for held in self._held.values() if held.warning is None]
        return sorted(free, key=lambda node: (not node.automatic, node.preemptible))

    def room(self, occupied: Collection[str]) -> int | None:
        """How many workers the run may have without being asked; None without bound.

        Nodes to be asked for count where workers are already (`occupied`).
        """
        total = 0
        for node in self.usable():
            if not node.automatic and node.name not in occupied:
                continue
            if node.slots is None:
                return None
            total += node.slots
        return total

    def free_slots(self, taken: Taken) -> int | None:
        """Slots without a worker on usable nodes; None without bound."""
        total = 0
        for node in self.usable():
            if node.slots is None:
                return None
            total += node.slots - len(taken.get(node.name, ()))
        return total

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
        whole_nodes = sorted(workers, key=lambda w: (ranks[w], self._position(workers[w]), w))
        return sorted(whole_nodes[:number])

    def _rank(self, node: str) -> tuple[bool, bool]:
        held = self._held.get(node)
        if held is None:
            return (True, True)
        return (not held.node.automatic, held.node.preemptible)

    def _position(self, node: str) -> int:
        return list(self._held).index(node) if node in self._held else len(self._held)
