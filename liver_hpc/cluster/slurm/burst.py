"""Pure: when to ask for burst nodes, when to stop asking, and when the cap is reached."""

from __future__ import annotations

import math
from dataclasses import dataclass

from liver_hpc.clock import Clock
from liver_hpc.config.schema import BurstSection

HELD_S = 10.0
"""A grant that was lost sooner counts as a refusal."""


@dataclass(frozen=True)
class Request:
    """An allocation to be asked for; time_min is its time limit."""

    nodes: int
    time_min: int


@dataclass(frozen=True)
class Grant:
    nodes: int
    since_s: float


class BurstPolicy:
    """Knows what was asked for, granted and refused; says what to do now.

    Requests stand, each for `nodes_per_request` nodes, until the run holds or has asked for as
    many nodes as its wanted workers take, within `min_nodes` and `max_nodes`. spent_node_hours:
    what jobs of the run that are over have used of the cap. shortest_min: an allocation for a
    shorter time is of no use, so near the cap nothing is asked for. pending: the nodes of each
    request that stands, the oldest first. not_before_s: nothing is asked for before; -inf after no
    refusal.
    """

    def __init__(
        self,
        config: BurstSection,
        slots_per_node: int,
        clock: Clock,
        spent_node_hours: float = 0.0,
        shortest_min: int = 1,
    ) -> None:
        self._config = config
        self._slots_per_node = slots_per_node
        self._clock = clock
        self.spent_node_hours = spent_node_hours
        self._shortest_min = shortest_min
        self._workers = 0
        self.pending: dict[str, int] = {}
        self.held: dict[str, Grant] = {}
        self._useless = 0  # nodes of what is held, which count for `max_nodes` alone
        self.not_before_s = -math.inf
        self._backoff_s = config.backoff_s

    # ---- what happened

    def want(self, workers: int) -> None:
        """So many workers could be used on burst nodes, held ones included."""
        self._workers = workers

    def note_useful(self, nodes: int) -> None:
        """So many of the nodes that are held need not be left."""
        self._useless = max(0, sum(grant.nodes for grant in self.held.values()) - nodes)

    def submitted(self, job: str, nodes: int) -> None:
        self.pending[job] = nodes

    def granted(self, job: str, nodes: int, since_s: float | None = None) -> None:
        """since_s: None for now."""
        self.pending.pop(job, None)
        self.held[job] = Grant(nodes, self._clock.now_s() if since_s is None else since_s)

    def ended(self, job: str, by_us: bool) -> None:
        """A request or a grant is no more; `by_us`: it was cancelled or given back on purpose."""
        self.pending.pop(job, None)
        grant, lived_s = self.held.pop(job, None), 0.0
        if grant is not None:
            lived_s = self._clock.now_s() - grant.since_s
            self.spent_node_hours += grant.nodes * lived_s / 3600
        if not by_us and lived_s < HELD_S:
            self.refused()

    def refused(self) -> None:
        """Slurm does not want to give anything now."""
        self.not_before_s = self._clock.now_s() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, self._config.backoff_max_s)

    # ---- what follows

    @property
    def node_hours(self) -> float:
        """Granted nodes times the hours for which they were held, up to now."""
        now_s = self._clock.now_s()
        running = sum(grant.nodes * (now_s - grant.since_s) for grant in self.held.values())
        return self.spent_node_hours + running / 3600

    @property
    def exhausted(self) -> bool:
        """Whether the cap of node hours is reached: what is held has to be left."""
        cap = self._config.node_hours
        return cap is not None and self.node_hours >= cap

    @property
    def over(self) -> str:
        """Why no more nodes come: no request stands, and none would fit into the cap; else empty.
        What was used of it never becomes less."""
        time_min = self._time_min(min(self._config.nodes_per_request, self._config.max_nodes))
        if self.pending or time_min >= self._shortest_min:
            return ""
        cap = self._config.node_hours
        used = "" if cap is None else f"{self.node_hours:.2f} of {cap:g} node hours are used, and "
        return f"{used}{max(0, time_min)} min are too short for an allocation"

    def to_submit(self) -> list[Request]:
        """Requests to be made now."""
        now_s = self._clock.now_s()
        if any(now_s - grant.since_s >= HELD_S for grant in self.held.values()):
            self._backoff_s = self._config.backoff_s  # a grant that has held ends the back-off
        if now_s < self.not_before_s or self.exhausted:
            return []
        requests = []
        asked, target = self._nodes_asked(), self._target_nodes()
        while asked < target:
            nodes = min(self._config.nodes_per_request, self._config.max_nodes - asked)
            asked += nodes
            time_min = self._time_min(asked)
            if time_min < self._shortest_min:
                break
            requests.append(Request(nodes, time_min))
        return requests

    def to_cancel(self) -> list[str]:
        """Pending requests, the newest first, that are of no use any more."""
        if self.exhausted:
            return list(self.pending)
        surplus = self._nodes_asked() - self._target_nodes()
        cancelled = []
        for job, nodes in reversed(self.pending.items()):
            if nodes > surplus:
                break
            surplus -= nodes
            cancelled.append(job)
        return cancelled

    def _nodes_asked(self) -> int:
        """Those held and those of the requests that stand."""
        return sum(grant.nodes for grant in self.held.values()) + sum(self.pending.values())

    def _target_nodes(self) -> int:
        wanted = math.ceil(self._workers / self._slots_per_node)
        useful = max(self._config.min_nodes, wanted)
        return min(self._config.max_nodes, useful + self._useless)

    def _time_min(self, nodes: int) -> int:
        """The time limit with which `nodes` nodes at once stay below the cap."""
        if self._config.node_hours is None:
            return self._config.time_min
        left_hours = self._config.node_hours - self.node_hours
        return min(self._config.time_min, int(60 * left_hours / nodes))
