"""Pure: the allocations that the run holds, and what Slurm's answers mean for their nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from liver_hpc.cluster.slurm.replies import COMPLETING, RUNNING, JobInfo, is_down, is_drained
from liver_hpc.errors import LiverError
from liver_hpc.run.events import EndNear, Node, NodeGone, NodeGranted, NodeWarned, PoolEvent

PREEMPTED = "preempted"
TIME_LIMIT = "time limit"
DRAINED = "drained"
CANCELLED = "cancelled"
NODE_HOURS = "node hours"

_TAKEN = frozenset({PREEMPTED, TIME_LIMIT, CANCELLED, NODE_HOURS})
_SAME_S = 1.5
"""Slurm's times are whole seconds; ends closer together than this are one."""


@dataclass(frozen=True)
class Place:
    """How Slurm calls the allocation of a node.

    job_id: what srun wants, for a component its leader's. het_group: the component's index, None
    in a plain job. own_id: the component's own job id, under which squeue lists its steps. burst:
    whether it is an allocation that was asked for while the run goes on. gpus_per_node: what
    steps ask for.
    """

    job_id: str
    het_group: int | None = None
    own_id: str = ""
    burst: bool = False
    gpus_per_node: int = 0

    @property
    def steps_of(self) -> str:
        """The job whose steps run on the node."""
        return self.own_id or self.job_id


@dataclass
class Holding:
    """One allocation: a component of the own job, or a burst job.

    own: the coordinator runs in it. automatic: its nodes are used without being asked for.
    grace_s: what its partition grants the preempted; None where nobody is preempted. ends_s: when
    its time is up as long as nothing shortens it; None without a limit, or before that is known.
    """

    name: str
    place: Place
    nodes: tuple[str, ...]
    slots: int
    own: bool = False
    automatic: bool = True
    partition: str = ""
    grace_s: float | None = None
    ends_s: float | None = None
    warned: dict[str, NodeWarned] = field(default_factory=dict)
    end_told: tuple[str, float] | None = None
    given_back: set[str] = field(default_factory=set)
    returning: bool = False

    @property
    def job(self) -> str:
        """Its own id."""
        return self.place.steps_of

    def node(self, name: str) -> Node:
        burst = self.place.burst
        preemptible = not self.own and (burst or self.grace_s is not None)
        return Node(name, self.name, self.slots, preemptible, self.automatic, burst)


class Holdings:
    """The book of allocations. Every change returns the events that follow from it.

    end_window_s: how long before a time limit it is told. kill_s: between the SIGTERM and the
    SIGKILL of a job that ends (KillWait).
    """

    def __init__(self, end_window_s: float, kill_s: float) -> None:
        self._end_window_s = end_window_s
        self._kill_s = kill_s
        self._held: dict[str, Holding] = {}

    # ---- what is held

    @property
    def jobs(self) -> list[str]:
        return list(self._held)

    def burst_jobs(self) -> list[str]:
        return [job for job, holding in self._held.items() if holding.place.burst]

    def node_names(self) -> list[str]:
        return sorted({node for holding in self._held.values() for node in holding.nodes})

    def of(self, node: str) -> Holding | None:
        """The newest allocation that holds the node."""
        for holding in reversed(self._held.values()):
            if node in holding.nodes:
                return holding
        return None

    def place_of(self, node: str) -> Place:
        """Where steps on the node belong; it is in use again. Raises LiverError when not held."""
        holding = self.of(node)
        if holding is None or holding.returning:
            held = ", ".join(self.node_names()) or "none"
            raise LiverError(f"node {node!r} is not held (any more); nodes are {held}")
        holding.given_back.discard(node)
        return holding.place

    def enter(self, holding: Holding) -> list[PoolEvent]:
        self._held[holding.job] = holding
        return [NodeGranted(holding.node(name)) for name in holding.nodes]

    def strike(self, job: str, reason: str) -> list[PoolEvent]:
        """The allocation has ended."""
        holding = self._held.pop(job, None)
        if holding is None:
            return []
        return [NodeGone(node, reason) for node in holding.nodes]

    # ---- what Slurm says when it is asked now and then

    def observe(self, jobs: Mapping[str, JobInfo], now_s: float) -> list[PoolEvent]:
        """Takes in an answer about all held jobs; a job that is absent from it is over."""
        events: list[PoolEvent] = []
        for job, holding in list(self._held.items()):
            info = jobs.get(job)
            if info is None or info.over:
                events += self.strike(job, _end_reason(holding, info))
            elif info.state == COMPLETING:
                events += self._ending(holding, now_s)
            elif info.state == RUNNING:
                events += self._shrunk(holding, info)
                events += self._end_moved(holding, info.ends_s, now_s)
        return events

    def _ending(self, holding: Holding, now_s: float) -> Iterator[PoolEvent]:
        """Its processes are being ended. Whoever ends the own job tells the coordinator itself."""
        for node in holding.nodes:
            warning = holding.warned.get(node)
            if not holding.own and (warning is None or warning.reason not in _TAKEN):
                yield from _warn_node(holding, node, CANCELLED, now_s, now_s + self._kill_s)

    def _shrunk(self, holding: Holding, info: JobInfo) -> Iterator[PoolEvent]:
        for node in holding.nodes:
            if info.nodes and node not in info.nodes:
                yield _remove(holding, node, "taken out of its allocation")

    def _end_moved(
        self, holding: Holding, ends_s: float | None, now_s: float
    ) -> Iterable[PoolEvent]:
        if ends_s is None:
            return []
        if _is_preemption(holding, ends_s, now_s):
            return _warn_all(holding, PREEMPTED, now_s, ends_s)
        holding.ends_s = ends_s
        if ends_s - now_s <= self._end_window_s:
            return _warn_all(holding, TIME_LIMIT, now_s, ends_s)
        # Somebody has extended the limit.
        holding.end_told = None
        return _lift(holding, holding.nodes, TIME_LIMIT)

    def observe_nodes(self, states: Mapping[str, str], now_s: float) -> list[PoolEvent]:
        """Takes in the states of nodes; those that are not mentioned are as before."""
        events: list[PoolEvent] = []
        for holding in self._held.values():
            for node in holding.nodes:
                state = states.get(node, "")
                if is_down(state):
                    events.append(_remove(holding, node, f"Slurm says {state}"))
                elif is_drained(state) and node not in holding.warned:
                    events += _warn_node(holding, node, DRAINED, now_s, None)
                elif state and not is_drained(state):
                    events += _lift(holding, [node], DRAINED)
        return events

    # ---- what a signal means

    def signalled(
        self, node: str, signal: str, at_s: float, info: JobInfo | None
    ) -> list[PoolEvent]:
        """An agent on the node got `signal`; `info` is Slurm's word on the job after that."""
        holding = self.of(node)
        if holding is None:
            return []
        kill_s = at_s + self._kill_s
        if info is None or info.state != RUNNING:
            return [] if holding.own else list(_warn_all(holding, CANCELLED, at_s, kill_s))
        ends_s = info.ends_s
        if ends_s is not None and _is_preemption(holding, ends_s, at_s):
            # The second SIGTERM comes when the grace time is over.
            deadline_s = ends_s if ends_s > at_s else kill_s
            return list(_warn_all(holding, PREEMPTED, at_s, deadline_s))
        if ends_s is not None and (signal != "SIGTERM" or ends_s <= at_s + _SAME_S):
            return list(_warn_all(holding, TIME_LIMIT, at_s, max(ends_s, kill_s)))
        if signal != "SIGTERM":
            return self.unanswered(node, at_s)
        # The job goes on unchanged: somebody cancels this one step.
        return list(_warn_node(holding, node, CANCELLED, at_s, kill_s))

    def unanswered(self, node: str, at_s: float) -> list[PoolEvent]:
        """An agent on the node got a signal, and Slurm does not say why: the worst is assumed."""
        holding = self.of(node)
        if holding is None:
            return []
        if holding.grace_s is None:
            kill_s = at_s + self._kill_s
            return list(_warn_node(holding, node, CANCELLED, at_s, kill_s))
        return list(_warn_all(holding, PREEMPTED, at_s, at_s + holding.grace_s))

    # ---- what the run decides

    def spent(self, now_s: float, deadline_s: float) -> list[PoolEvent]:
        """The cap of node hours is reached: burst nodes have to be left."""
        events: list[PoolEvent] = []
        for holding in self._held.values():
            if holding.place.burst and not holding.warned:
                events += _warn_all(holding, NODE_HOURS, now_s, deadline_s)
        return events

    def give_back(self, node: str) -> str | None:
        """The job to be cancelled now that nothing of the run is on the node any more.

        A burst allocation goes back once all its nodes are empty, a component of the own job only
        when Slurm takes it anyway.
        """
        holding = self.of(node)
        if holding is None:
            return None
        holding.given_back.add(node)
        if holding.own or not holding.given_back >= set(holding.nodes):
            return None
        warnings = [holding.warned.get(name) for name in holding.nodes]
        taken = all(warning and warning.reason in _TAKEN for warning in warnings)
        if not holding.place.burst and not taken:
            return None
        holding.returning = True
        return holding.job


def _is_preemption(holding: Holding, ends_s: float, now_s: float) -> bool:
    """Preemption moves a job's end to the end of its grace time; a time limit stays."""
    if holding.grace_s is None:
        return False
    shortened = holding.ends_s is None or ends_s < holding.ends_s - _SAME_S
    return shortened and ends_s <= now_s + holding.grace_s + _SAME_S


def _warn_all(holding: Holding, reason: str, at_s: float, deadline_s: float) -> Iterator[PoolEvent]:
    """Warns of every node of the allocation; the end of the own one is the end of the run."""
    if not holding.own:
        for node in holding.nodes:
            yield from _warn_node(holding, node, reason, at_s, deadline_s)
    elif not _same(holding.end_told, (reason, deadline_s)):
        holding.end_told = (reason, deadline_s)
        yield EndNear(reason, at_s, deadline_s)


def _warn_node(
    holding: Holding, node: str, reason: str, at_s: float, deadline_s: float | None
) -> Iterator[PoolEvent]:
    known = holding.warned.get(node)
    if known is not None and known.deadline_s is not None:
        if deadline_s is None or _same((known.reason, known.deadline_s), (reason, deadline_s)):
            return
        at_s = min(at_s, known.at_s) if known.reason == reason else at_s
    warning = NodeWarned(node, reason, at_s, deadline_s)
    if known is None or (known.reason, known.deadline_s) != (reason, deadline_s):
        holding.warned[node] = warning
        yield warning


def _same(told: tuple[str, float] | None, now: tuple[str, float]) -> bool:
    return told is not None and told[0] == now[0] and abs(told[1] - now[1]) < 0.1


def _lift(holding: Holding, nodes: Iterable[str], reason: str) -> Iterator[PoolEvent]:
    """The warning is withdrawn: the node is as new."""
    for node in nodes:
        warning = holding.warned.get(node)
        if warning is not None and warning.reason == reason:
            del holding.warned[node]
            holding.given_back.discard(node)
            yield NodeGranted(holding.node(node))


def _remove(holding: Holding, node: str, reason: str) -> NodeGone:
    holding.nodes = tuple(name for name in holding.nodes if name != node)
    return NodeGone(node, reason)


def _end_reason(holding: Holding, info: JobInfo | None) -> str:
    reasons = sorted({warning.reason for warning in holding.warned.values()})
    how = f" ({', '.join(reasons)})" if reasons else ""
    state = f": {info.state}" if info is not None else ""
    return f"job {holding.job} has ended{how}{state}"
