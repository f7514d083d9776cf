"""Pure: the allocations that the run holds, and what Slurm's answers mean for their nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

from liver_hpc.cluster.slurm.replies import COMPLETING, RUNNING, JobInfo
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.run.events import (
    EndNear,
    Node,
    NodeGone,
    NodeGranted,
    NodeWarned,
    PoolEvent,
    PoolNote,
)
from liver_hpc.run.outcome import PREEMPTED

TIME_LIMIT = "time limit"
DRAINED = "drained"
CANCELLED = "cancelled"
NODE_HOURS = "node hours"
REASONS = {PREEMPTED, TIME_LIMIT, DRAINED, CANCELLED, NODE_HOURS}
"""Of warnings that are of Slurm's, or for its sake; operators have another one."""

GIVEN_BACK = "given back"

_SAME_S = 1.5
"""Slurm's times are whole seconds; ends closer together than this are one."""
_CUT_S = 60.0
"""An end that was moved, and a SIGTERM, are of one preemption if no more time is between them."""
_DRAINED_FLAGS = {"drain", "draining", "drained", "drng", "fail", "failing", "failg"}
"""Jobs that are there go on, also on a node that was set to FAIL. "power_down" is none of these: it
waits for their end, and each node of a partition with PowerDownOnIdle has it."""
_DOWN_FLAGS = {"down", "powering_down", "powered_down"}


@dataclass
class Allocation:
    """Nodes that Slurm gave together: a component of the own job, all of a plain one, or a burst
    job, which was asked for while the run goes on.

    job: its own id, under which squeue lists its steps. het: of a component, the id of its leader,
    which srun wants, and its index. gpus_per_node: what steps ask for. own: the coordinator runs in
    it. automatic: its nodes are used without being asked for. grace_s, most_grace_s: what its
    partition grants the preempted, of several the least and the most; None where nobody is. ends_s:
    when its time is up as long as nothing shortens it; None without a limit, or before that is
    known. cut: to when that was moved last from a later time, and when that was seen. guessed_s:
    when it was last warned without Slurm's word. returning: why it is to be cancelled; empty as
    long as it is not.
    """

    name: str
    job: str
    nodes: tuple[str, ...]
    slots: int
    het: tuple[str, int] | None = None
    gpus_per_node: int | str = 0
    partition: str = ""
    own: bool = False
    burst: bool = False
    automatic: bool = True
    grace_s: float | None = None
    most_grace_s: float | None = None
    ends_s: float | None = None
    cut: tuple[float, float] | None = None
    guessed_s: float | None = None
    warned: dict[str, NodeWarned] = field(default_factory=dict)
    end_told: EndNear | None = None
    given_back: set[str] = field(default_factory=set)
    returning: str = ""

    def node(self, name: str) -> Node:
        preemptible = not self.own and (self.burst or self.grace_s is not None)
        return Node(name, self.name, self.slots, preemptible, self.automatic, self.burst)

    def is_preemption(self, ends_s: float, now_s: float) -> bool:
        """Preemption moves a job's end to the end of its grace time; a time limit stays."""
        if self.most_grace_s is None:
            return False
        return self.is_shortened(ends_s) and ends_s <= now_s + self.most_grace_s + _SAME_S

    def is_shortened(self, ends_s: float) -> bool:
        """Whether its time is up earlier than was known."""
        return self.ends_s is None or ends_s < self.ends_s - _SAME_S

    def was_cut(self, ends_s: float, at_s: float) -> bool:
        """Whether its end was moved to `ends_s` at about that time."""
        if self.cut is None:
            return False
        cut_s, seen_s = self.cut
        return abs(cut_s - ends_s) <= _SAME_S and abs(seen_s - at_s) <= _CUT_S

    def granted_by(self, grace_s: Mapping[str, float]) -> None:
        """Notes what its partitions, by name, grant the preempted; a job is in one of several."""
        granted = [grace_s[name] for name in self.partition.split(",") if name in grace_s]
        self.grace_s = min(granted, default=None)
        self.most_grace_s = max(granted, default=None)

    def is_taken(self, node: str, by_s: float = math.inf) -> bool:
        """Whether Slurm takes the node anyway, by that time as far as is known."""
        warning = self.warned.get(node)
        deadline_s = None if warning is None else warning.deadline_s
        return deadline_s is not None and deadline_s <= by_s

    def warn(self, reason: str, at_s: float, deadline_s: float) -> list[PoolEvent]:
        """Warns of every node; the end of the own allocation is the end of the run."""
        if not self.own:
            told = [self.warn_node(node, reason, at_s, deadline_s) for node in self.nodes]
            return [event for events in told for event in events]
        if _is_told(self.end_told, reason, deadline_s):
            return []
        self.end_told = EndNear(reason, at_s, deadline_s)
        return [self.end_told]

    def warn_node(self, node: str, reason: str, at_s: float, deadline_s: float) -> list[PoolEvent]:
        known = self.warned.get(node)
        if _is_told(known, reason, deadline_s):
            return []
        if known is not None and known.reason == reason:
            at_s = min(at_s, known.at_s)
        self.warned[node] = NodeWarned(node, reason, at_s, deadline_s)
        return [self.warned[node]]

    def lift(self, reason: str, nodes: Iterable[str]) -> list[PoolEvent]:
        """Withdraws the warnings of these nodes that have this reason: they are as new."""
        lifted = [n for n in nodes if n in self.warned and self.warned[n].reason == reason]
        for node in lifted:
            del self.warned[node]
            self.given_back.discard(node)
        return [NodeGranted(self.node(node)) for node in lifted]

    def remove(self, node: str, reason: str) -> NodeGone:
        self.nodes = tuple(name for name in self.nodes if name != node)
        if self.burst and self.given_back and self.given_back >= {*self.nodes}:
            self.returning = GIVEN_BACK
        return NodeGone(node, reason)


def _is_told(told: NodeWarned | EndNear | None, reason: str, deadline_s: float) -> bool:
    if told is None or told.deadline_s is None:
        return False
    return told.reason == reason and abs(told.deadline_s - deadline_s) < 0.1


class Holdings:
    """The book of allocations. Every change returns the events that follow from it.

    end_window_s: how long before a time limit it is told. kill_s: between the SIGTERM and the
    SIGKILL of a job that ends (KillWait). grace_s: of every partition whose jobs are preempted,
    the seconds that they have to leave.
    """

    def __init__(
        self, end_window_s: float, kill_s: float, grace_s: Mapping[str, float] | None = None
    ) -> None:
        self.kill_s = kill_s
        self.grace_s = grace_s or {}
        self._end_window_s = end_window_s
        self._held: dict[str, Allocation] = {}

    def learn(self, kill_s: float, grace_s: Mapping[str, float]) -> None:
        """What Slurm says of these; also of what is held already."""
        self.kill_s, self.grace_s = kill_s, grace_s
        for held in self._held.values():
            held.granted_by(grace_s)

    # ---- what is held

    @property
    def jobs(self) -> list[str]:
        return list(self._held)

    def node_names(self) -> list[str]:
        return sorted({node for held in self._held.values() for node in held.nodes})

    def returning(self) -> list[Allocation]:
        """Those that are to be cancelled."""
        return [held for held in self._held.values() if held.returning]

    def of(self, node: str) -> Allocation | None:
        """The allocation that holds the node."""
        return next((held for held in self._held.values() if node in held.nodes), None)

    def useful(self, avoided: Container[str]) -> int:
        """How many nodes of burst allocations need not be left; those that are taken anyway, and
        soon, are not told from them."""
        return sum(
            node not in avoided and (node not in held.warned or held.is_taken(node))
            for held in self._held.values()
            if held.burst
            for node in held.nodes
        )

    def use(self, node: str) -> Allocation:
        """Where steps on the node belong; it is in use again. Raises LiverError when not held."""
        held = self.of(node)
        if held is None or held.returning:
            names = ", ".join(self.node_names()) or "none"
            raise LiverError(f"node {node!r} is not held (any more); nodes are {names}")
        held.given_back.discard(node)
        return held

    def enter(self, new: Allocation) -> list[PoolEvent]:
        """A burst job goes back when some of its nodes are held already."""
        new.granted_by(self.grace_s)
        shared = sorted({*new.nodes} & {*self.node_names()}) if new.burst else []
        self._held[new.job] = new
        if not shared:
            return [NodeGranted(new.node(name)) for name in new.nodes]
        new.nodes, new.returning = (), "its nodes are held already"
        return [
            PoolNote(
                f"burst job {new.job} goes back: {', '.join(shared)} held already; "
                "cluster.slurm.burst.options wants exclusive: true"
            )
        ]

    def strike(self, job: str, reason: str) -> list[PoolEvent]:
        """The allocation has ended."""
        held = self._held.pop(job, None)
        return [NodeGone(node, reason) for node in held.nodes] if held is not None else []

    # ---- what Slurm says when it is asked now and then

    def observe(self, jobs: Mapping[str, JobInfo], now_s: float) -> list[PoolEvent]:
        """Takes in an answer about all held jobs; a job that is absent from it is over."""
        events: list[PoolEvent] = []
        for job, held in list(self._held.items()):
            info = jobs.get(job)
            if info is None or info.over:
                events += self.strike(job, _end_reason(held, info))
            elif held.burst and info.queued:  # against --no-requeue: ForceRequeueOnFail
                held.returning = "Slurm has queued it again"
            elif info.state == COMPLETING and not held.own:  # who ends the own job says so himself
                for node in held.nodes:
                    if not held.is_taken(node, now_s + self.kill_s):
                        events += held.warn_node(node, CANCELLED, now_s, now_s + self.kill_s)
            elif info.state == RUNNING:
                lost = [n for n in held.nodes if info.nodes and n not in info.nodes]
                events += [held.remove(node, "taken out of its allocation") for node in lost]
                if info.ends_s is not None:
                    events += self._end_moved(held, info.ends_s, now_s)
        return events

    def _end_moved(self, held: Allocation, ends_s: float, now_s: float) -> list[PoolEvent]:
        shortened = held.ends_s is not None and held.is_shortened(ends_s)
        if held.is_preemption(ends_s, now_s) or (shortened and held.guessed_s is not None):
            return held.warn(PREEMPTED, now_s, ends_s)
        if held.guessed_s is not None and now_s > held.guessed_s + _CUT_S:
            held.guessed_s = None  # it was no preemption
        if shortened:
            held.cut = ends_s, now_s  # by somebody, or by a preemption whose signal comes next
        held.ends_s = ends_s
        if ends_s - now_s <= self._end_window_s:
            return held.warn(TIME_LIMIT, now_s, ends_s)
        # Somebody has extended the limit.
        held.end_told = None
        return held.lift(TIME_LIMIT, held.nodes)

    def observe_nodes(self, states: Mapping[str, str], now_s: float) -> list[PoolEvent]:
        """Takes in the states of nodes; those that are not mentioned are as before."""
        events: list[PoolEvent] = []
        for held in self._held.values():
            for node in held.nodes:
                state = states.get(node, "")
                flags = {flag.rstrip("*~#!%$@^-") for flag in state.split("+")}
                if flags & _DOWN_FLAGS:
                    events.append(held.remove(node, f"Slurm says {state}"))
                elif flags & _DRAINED_FLAGS:  # the node is up, somebody wants its work to end
                    if node not in held.warned:
                        held.warned[node] = NodeWarned(node, DRAINED, now_s, None)
                        events.append(held.warned[node])
                elif state:
                    events += held.lift(DRAINED, [node])
        return events

    # ---- what a signal means

    def signalled(
        self, node: str, signal: str, at_s: float, jobs: Mapping[str, JobInfo] | None
    ) -> list[PoolEvent]:
        """An agent on the node got `signal`; `jobs` is Slurm's answer about the job after that,
        None where it gave none."""
        held = self.of(node)
        if held is None or held.returning:  # that the job ends may be our own doing by now
            return []
        if jobs is None:
            return self._unexplained(held, node, at_s)
        info, kill_s = jobs.get(held.job), at_s + self.kill_s
        if info is None or info.state != RUNNING:
            return [] if held.own else held.warn(CANCELLED, at_s, kill_s)
        ends_s = info.ends_s
        if ends_s is not None and held.is_preemption(ends_s, at_s):
            # The second SIGTERM comes when the grace time is over.
            return held.warn(PREEMPTED, at_s, ends_s if ends_s > at_s else kill_s)
        if ends_s is not None and (signal != "SIGTERM" or ends_s <= at_s + _SAME_S):
            return held.warn(TIME_LIMIT, at_s, max(ends_s, kill_s))
        shortened = ends_s is not None and held.ends_s is not None and held.is_shortened(ends_s)
        if ends_s is not None and (shortened or held.was_cut(ends_s, at_s)):
            return held.warn(PREEMPTED, at_s, ends_s)  # the grace time may be that of a QOS
        if signal != "SIGTERM":
            return self._unexplained(held, node, at_s)
        # The job goes on unchanged: somebody cancels this one step.
        return held.warn_node(node, CANCELLED, at_s, kill_s)

    def _unexplained(self, held: Allocation, node: str, at_s: float) -> list[PoolEvent]:
        """Slurm does not say why: the worst is assumed, until it is asked again."""
        held.guessed_s = at_s
        if not held.grace_s:  # none, or as a QOS says
            return held.warn_node(node, CANCELLED, at_s, at_s + self.kill_s)
        return held.warn(PREEMPTED, at_s, at_s + held.grace_s)

    # ---- what the run decides

    def spent(self, now_s: float, deadline_s: float) -> list[PoolEvent]:
        """The cap of node hours is reached: burst nodes have to be left."""
        events: list[PoolEvent] = []
        for held in self._held.values():
            for node in held.nodes if held.burst else ():
                if not held.is_taken(node):
                    events += held.warn_node(node, NODE_HOURS, now_s, deadline_s)
        return events

    def reject(self, node: str, why: str) -> list[PoolEvent]:
        """Nothing of the run is ever to be on the node; a burst allocation without any other goes
        back."""
        held = self.of(node)
        if held is None:
            return []
        gone = held.remove(node, why)
        if held.burst and held.given_back >= set(held.nodes):
            held.returning = GIVEN_BACK
        return [gone]

    def give_back(self, node: str) -> None:
        """Nothing of the run is on the node any more.

        A burst allocation goes back once all its nodes are empty, a component of the own job only
        when Slurm takes it anyway.
        """
        held = self.of(node)
        if held is None:
            return
        held.given_back.add(node)
        if held.own or not held.given_back >= set(held.nodes):
            return
        if held.burst or all(map(held.is_taken, held.nodes)):
            held.returning = GIVEN_BACK


def _end_reason(held: Allocation, info: JobInfo | None) -> str:
    reasons = sorted({warning.reason for warning in held.warned.values()})
    how = f" ({', '.join(reasons)})" if reasons else ""
    state = f": {info.state}" if info is not None else ""
    return f"job {held.job} has ended{how}{state}"


def own_allocations(
    environ: Mapping[str, str],
    config: RunConfig,
    hostnames: Callable[[str], tuple[str, ...]],
    nodes_of: Callable[[str], tuple[str, ...]],
) -> tuple[Allocation, ...]:
    """The job that this process runs in: a component each, or the whole of a plain job; the first
    is the one that we are in.

    Read from what Slurm tells the batch script; `hostnames` expands "n[1-3]". A step that was
    started from outside of the job (`srun --jobid`) is told its own nodes for the job's: then
    `nodes_of` asks Slurm for those of a plain job. Raises ConfigError outside of a job, or when
    its components are not those of the run file.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise ConfigError(
            "cluster.kind is slurm, but this is no Slurm job (SLURM_JOB_ID is not set); "
            "start the run with `liver submit` or sbatch"
        )

    def told(name: str) -> str:
        if value := environ.get(name, ""):
            return value
        raise ConfigError(f"job {job_id}: Slurm has not set {name}")

    def nodes(suffix: str) -> tuple[str, ...]:
        listed = told(f"SLURM_JOB_NODELIST{suffix}")
        from_outside = not suffix and "SLURM_JOB_NUM_NODES" not in environ
        return nodes_of(job_id) if from_outside else hostnames(listed)

    suffixes, sections = [""], config.cluster.slurm.components
    # What Slurm told a job from within which this one was submitted may be left.
    if "SLURM_HET_SIZE" in environ and environ.get("SLURM_JOB_ID_HET_GROUP_0", job_id) == job_id:
        suffixes = [f"_HET_GROUP_{index}" for index in range(int(told("SLURM_HET_SIZE")))]
    if len(suffixes) != len(sections):
        raise ConfigError(
            f"cluster.slurm.components: job {job_id} has {len(suffixes)} components, the "
            f"run file {len(sections)} ({', '.join(section.name for section in sections)})"
        )
    return tuple(
        Allocation(
            name=section.name,
            job=told(f"SLURM_JOB_ID{suffix}"),
            nodes=nodes(suffix),
            slots=config.cluster.slots(section),
            het=(job_id, index) if len(suffixes) > 1 else None,
            gpus_per_node=section.gpus_per_node,
            partition=environ.get(f"SLURM_JOB_PARTITION{suffix}", ""),
            own=index == 0,
            automatic=index == 0 or section.join == "auto",
        )
        for index, (suffix, section) in enumerate(zip(suffixes, sections, strict=True))
    )
