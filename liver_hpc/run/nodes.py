"""Which nodes the run holds, what was said of them, and where workers can still be started."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice

from liver_hpc.errors import LiverError
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run.agents import Agents
from liver_hpc.run.events import Node, NodeWarned, Seat

Situation = tuple[int, frozenset[str], int | None]
"""What a way out depends on: generation, nodes to be left, free slots."""


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

    @property
    def deadline_s(self) -> float | None:
        """By when it has to be left, epoch seconds; None where nobody has set a time."""
        return None if self.warning is None else self.warning.deadline_s


class HeldNodes(dict[str, HeldNode]):
    """The nodes of a run by name, in the order in which they came, and who is on them.

    granted_s: when the first of the nodes came that the run has not grown onto. grow_at_s: when it
    may. stuck: the situation in which there was nowhere to go from nodes that nobody takes away.
    """

    def __init__(self, agents: Agents, workers_per_agent: int | None) -> None:
        super().__init__()
        self.agents = agents
        self.granted_s = -math.inf
        self.grow_at_s = math.inf
        self.stuck: Situation | None = None
        self._workers_per_agent = workers_per_agent

    # ---- coming and going

    def grant(self, node: Node) -> bool:
        """Enters a node; False when it was held already. A node that comes again is as new."""
        known = self.get(node.name)
        if known is not None and known.node == node and known.warning is None:
            return False
        self[node.name] = HeldNode(node)
        self.agents.number_of(node.name)
        return True

    def note_idle(self, now_s: float) -> None:
        """Notes since when nodes are idle."""
        in_use = self.agents.nodes_in_use()
        for name, held in self.items():
            if name in in_use:
                held.idle_since_s, held.given_back = None, False
            elif held.idle_since_s is None:
                held.idle_since_s = now_s

    # ---- what there is

    def usable(self) -> list[Node]:
        """Nodes that need not be left and do not go back, the ones to fill first at the front.

        What cannot be taken away comes before what can, what is used by itself before what has
        to be asked for.
        """
        kept = {held.node.allocation for held in self.values() if not held.given_back}
        free = [
            held.node
            for held in self.values()
            if held.warning is None and (held.node.allocation in kept or not held.node.burst)
        ]
        return sorted(free, key=_lasting)

    def doomed(self) -> frozenset[str]:
        """Nodes that have to be left."""
        return frozenset(name for name, held in self.items() if held.warning is not None)

    def window_s(self, nodes: Container[str], now_s: float) -> float:
        """Seconds until the first of the nodes is taken, at least 0; infinite without deadline."""
        deadlines = (held.deadline_s for name, held in self.items() if name in nodes)
        known = [at_s for at_s in deadlines if at_s is not None]
        return max(0.0, min(known, default=math.inf) - now_s)

    def linger(self, workers: Iterable[int], limit_s: float, now_s: float) -> None:
        """These workers stay with their snapshots for so long, or until their node is about to be
        taken."""
        for worker in sorted(workers):
            left_s = self.window_s((self.agents.node_of(worker),), now_s)
            self.agents.linger(worker, min(limit_s, left_s - self.agents.exit_s))

    def room(self, occupied: Collection[str]) -> int | None:
        """How many workers the run may have without being asked; None without bound.

        Nodes to be asked for count where workers are already (`occupied`).
        """
        nodes = [node for node in self.usable() if node.automatic or node.name in occupied]
        return _total(node.slots for node in nodes)

    def slots_without(self, name: str) -> int | None:
        """All slots on usable nodes but one; None without bound."""
        return _total(node.slots for node in self.usable() if node.name != name)

    def free_slots(self, ending: bool = True) -> int | None:
        """Slots for more workers on usable nodes, None without bound: those of kept joiners too,
        and, without `ending`, those that will soon be free."""
        taken = self.agents.taken(ending)
        spare = Counter(map(self.agents.node_of, self.agents.spare(clearing=not ending)))
        return _total(
            None
            if node.slots is None
            else node.slots - len(taken.get(node.name, ())) + spare[node.name]
            for node in self.usable()
        )

    def kept(self) -> list[int]:
        """Kept joiners on usable nodes, in the order in which these are filled."""
        return self._spare_on(self.usable(), clearing=False)

    def standbys(self, clearing: bool = False) -> list[int]:
        """Those of them that hold up no node, as it would be held without them, too."""
        return self._spare_on(self._standby_nodes(), clearing)

    def _spare_on(self, nodes: Iterable[Node], clearing: bool) -> list[int]:
        order = {node.name: position for position, node in enumerate(nodes)}
        there = self.agents.workers_on(order, self.agents.spare(clearing))
        return sorted(there, key=lambda worker: order[self.agents.node_of(worker)])

    def joiners(self, number: int) -> tuple[int, ...]:
        """The next so many joiners: kept ones, and the ids of those that are to be launched."""
        kept = self.kept()[:number]
        return (*kept, *self.agents.next_workers(number - len(kept)))

    def situation(self, world: WorldRef) -> Situation:
        return world.generation, self.doomed(), self.free_slots()

    def steady_slots(self, with_burst: bool) -> int:
        """Slots on usable nodes that are used, or would be without being asked for, but for those
        that were given back; 0 where there is no bound."""
        in_use = self.agents.nodes_in_use()
        return sum(
            node.slots or 0
            for node in self.usable()
            if (with_burst or not node.burst)
            and (node.automatic or node.name in in_use)
            and not self[node.name].given_back
        )

    def seats(self, workers: int) -> list[Seat]:
        """Places for this many more workers; an agent for every node, or for `workers_per_node`.

        Raises LiverError that says what is held when they do not fit.
        """
        seats: list[Seat] = []
        left, taken = workers, self.agents.taken()
        for node in self.usable():
            slots = tuple(islice(_open_slots(node, taken), left))
            seats += self._split(node, slots)
            left -= len(slots)
            if left == 0:
                return seats
        raise LiverError(
            f"wanted free slots for {workers} workers, got {workers - left}; {self.describe()}"
        )

    def standby_seats(self, most: int) -> list[Seat]:
        """Places for up to so many spares, an agent for each."""
        taken = self.agents.taken()
        seats = (
            Seat(node.name, (slot,))
            for node in self._standby_nodes()
            for slot in _open_slots(node, taken)
        )
        return [*islice(seats, max(0, most))]

    def _standby_nodes(self) -> list[Node]:
        """Those that are used without being asked for, and do not go back when they are idle."""
        return [node for node in self.usable() if node.automatic and not node.burst]

    def nodes_of(self, workers: Iterable[int], joiners: Iterable[int]) -> dict[int, int]:
        """The numbers of the nodes of workers, and of joiners, of whom some are to be launched, as
        far as they are known: a launch without room fails."""
        known = self.agents.nodes_of((*workers, *joiners))
        fresh = [worker for worker in joiners if worker not in known]
        try:
            seats = self.seats(len(fresh))
        except LiverError:
            return known
        numbers = [self.agents.number_of(seat.node) for seat in seats for _ in seat.slots]
        return known | dict(zip(fresh, numbers, strict=True))

    def _split(self, node: Node, slots: tuple[int, ...]) -> list[Seat]:
        step = len(slots) if node.slots is not None else self._workers_per_agent or len(slots)
        return [
            Seat(node.name, slots[first : first + step])
            for first in range(0, len(slots), max(1, step))
        ]

    def describe(self) -> str:
        """All nodes in a line: "n1 (2 of 2 slots taken), n3 (0 of 2, to be left: preempted)"."""
        return ", ".join(self.lines()) or "no node is held"

    def lines(self) -> list[str]:
        lines, taken = [], self.agents.taken()
        for held in self.values():
            node, warning = held.node, held.warning
            used = len(taken.get(node.name, ()))
            slots = "any number" if node.slots is None else str(node.slots)
            leave = f", to be left: {warning.reason}" if warning else ""
            name = f"{node.name} ({node.allocation})" if node.name else node.allocation
            lines.append(f"{name}: {used} of {slots} slots taken{leave}")
        return lines

    # ---- who goes first

    def stayers(self, workers: Sequence[int], number: int) -> Sequence[int]:
        """The workers among which those that stay in a smaller world are chosen.

        Where some nodes are more lasting than others, exactly `number` workers of the most lasting
        ones; otherwise all, and the fewest bytes decide.
        """
        on = {worker: self.agents.node_of(worker) for worker in workers}
        gone = (True, True)
        ranks = {w: _lasting(self[node].node) if node in self else gone for w, node in on.items()}
        if len(set(ranks.values())) <= 1:
            return sorted(workers)
        order = {name: position for position, name in enumerate(self)}
        whole_nodes = sorted(workers, key=lambda w: (ranks[w], order.get(on[w], len(order)), w))
        return sorted(whole_nodes[:number])


def _open_slots(node: Node, taken: Mapping[str, Container[int]]) -> Iterator[int]:
    """Those of a node that nobody holds."""
    used = taken.get(node.name, ())
    numbers = count() if node.slots is None else range(node.slots)
    return (slot for slot in numbers if slot not in used)


def _lasting(node: Node) -> tuple[bool, bool]:
    """A sort key: the most lasting nodes come first."""
    return not node.automatic, node.preemptible


def _total(slots: Iterable[int | None]) -> int | None:
    """Their sum; None where one of them has no bound."""
    numbers = list(slots)
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
