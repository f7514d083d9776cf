"""Everything that can happen to a run: what goes into its core, and into its journal.

Workers' messages of `protocol/messages.py` are events as they are; the others are here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from liver_hpc.protocol import messages as m

# ---- the nodes that a run may hold


@dataclass(frozen=True)
class Node:
    """A node that agents can be launched on.

    allocation: the name of what it came with: a component, or a burst allocation. slots: how many
    workers it takes, None without bound. preemptible: it may be taken away again. automatic: used
    as soon as it is there; otherwise only when somebody asks for so many workers. burst: it was
    asked for while the run goes on, and goes back when it is of no use.
    """

    name: str
    allocation: str
    slots: int | None = None
    preemptible: bool = False
    automatic: bool = True
    burst: bool = False


@dataclass(frozen=True)
class Seat:
    """Where one agent is to run, and the slots of the node that its workers take."""

    node: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class NodeGranted:
    """A node is held and answers."""

    node: Node


@dataclass(frozen=True)
class NodeWarned:
    """A node is to be left.

    reason: "preempted", "time limit", "drained", "cancelled", "operator", "straggling" or "node
    hours".
    at_s: when the warning came. deadline_s: when its processes will be killed; None when nobody
    has set a time. Both in epoch seconds. A second warning of a node beats the first.
    """

    node: str
    reason: str
    at_s: float
    deadline_s: float | None = None


@dataclass(frozen=True)
class NodeGone:
    """A node is held no longer, and whatever ran there has ended."""

    node: str
    reason: str


@dataclass(frozen=True)
class EndNear:
    """The allocation in which the coordinator itself lives ends at `deadline_s`, epoch seconds."""

    reason: str
    at_s: float
    deadline_s: float


@dataclass(frozen=True)
class PoolNote:
    """Something that an operator would want to see: a refused request, a controller away."""

    text: str


@dataclass(frozen=True)
class BurstOver:
    """No burst nodes are asked for any more, for this reason: none come but those that are held.
    Another coordinator's pool tells it again."""

    reason: str


# ---- a start, and its end


@dataclass(frozen=True)
class Memory:
    """What one start of a run hands to the next.

    last_generation: the highest number of a world or an attempt; -1 before the first. ceiling: the
    most workers that the run grows to by itself; None where nobody has said. drained: nodes that
    operators keep it off. evaluated: the most steps after which there was an evaluation. agents:
    how many were started; a later one has a name of its own, as one of those may live still.
    in_vain: how many starts in a row had too few nodes, or too little time, each in a job that was
    queued again. wrote: the step of the newest checkpoint that the run has written; None before the
    first.

    Of restarts alone, one after the other in the same job: vain_restarts: how many in a row came to
    nothing; furthest: the most steps that were done when one began, -1 before the first.
    """

    last_generation: int = -1
    ceiling: int | None = None
    drained: tuple[str, ...] = ()
    evaluated: int = 0
    agents: int = 0
    in_vain: int = 0
    wrote: int | None = None
    vain_restarts: int = 0
    furthest: int = -1


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a start goes on from: a directory, the step, who had trained. weights: it
    takes the weights alone, and does not go on from anything: the step is 0."""

    path: str
    step: int
    generation: int
    layout: str
    weights: bool = False


@dataclass(frozen=True)
class CoordinatorStarted:
    """A start of the run, the first one or a restart. Always a core's first event.

    attributes: facts for the record: versions, host, and the run file as `config`; `job` is the
    start of the Slurm job that it belongs to, `boot` that of the machine of a local run.
    checkpoints: the directory that new ones are written to. epoch: the coordinator's number; the
    same one's starts follow within one job.
    """

    attributes: dict[str, str] = field(default_factory=dict)
    checkpoints: str = ""
    resumed: Resumed | None = None
    memory: Memory = Memory()
    epoch: int = 0


@dataclass(frozen=True)
class TookOver:
    """The coordinator of this start is gone, and another one, number `epoch`, has taken over while
    training goes on. Regained follows."""

    epoch: int
    pid: int
    host: str


@dataclass(frozen=True)
class Regained:
    """All workers and agents that live have been heard of again, or had the time for it. No
    deadline has come nearer since the last event before TookOver."""


@dataclass(frozen=True)
class StoodStill:
    """The coordinator's process did nothing since `since_s` (epoch): what was sent meanwhile is
    heard only now, and no deadline has come nearer."""

    since_s: float


@dataclass(frozen=True)
class LaunchAllowed:
    """The nodes that were held from the start are known: the first workers may be launched."""


@dataclass(frozen=True)
class AgentMet:
    """An agent has come to the rendezvous with workers that have booted."""

    agent: str
    workers: int


@dataclass(frozen=True)
class AgentListens:
    """An agent can be talked to; its process is `pid` on `host`."""

    agent: str
    host: str = ""
    pid: int = 0


@dataclass(frozen=True)
class AgentEnded:
    """Nothing of an agent runs any more; `exit_code` as `cluster/launcher.py` has it. said: its
    last error."""

    agent: str
    exit_code: int
    said: str = ""


@dataclass(frozen=True)
class LaunchFailed:
    """Agents that could not be launched. lost: those of them of which nothing was ever started."""

    agents: tuple[str, ...]
    lost: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class RendezvousFailed:
    """No agent can meet the coordinator any more."""

    reason: str


@dataclass(frozen=True)
class WorkerGone:
    """A worker's process or its connection has ended, or it has been silent for too long."""

    worker: int
    reason: str


@dataclass(frozen=True)
class OperatorAsked:
    """An operator's request; `number` is what the answer is found by."""

    number: int
    request: m.OperatorEvent


@dataclass(frozen=True)
class StopSignalled:
    """The coordinator's process was told to stop; `checkpoint`: with one."""

    reason: str
    checkpoint: bool = False


@dataclass(frozen=True)
class StateRestored:
    """All workers of the first world hold what the checkpoint holds."""

    generation: int


@dataclass(frozen=True)
class CheckpointDoubted:
    """What all workers of the first world hold is not what was saved: all files are read now."""

    reason: str


@dataclass(frozen=True)
class CheckpointDamaged:
    """The checkpoint that this start goes on from is not what was written, and is set aside: the
    next start goes on from the one before. again: it cannot be read now, and the next start tries
    it again."""

    reason: str
    again: bool = False


@dataclass(frozen=True)
class CheckpointWritten:
    """A checkpoint is complete in the directory `path`: bytes of its largest file, how long the
    slowest worker took from the boundary on, and bytes of all files."""

    step: int
    path: str
    largest_bytes: int
    took_s: float
    total_bytes: int


@dataclass(frozen=True)
class CheckpointFailed:
    """The checkpoint of a step has come to nothing; reason: in whole words."""

    step: int
    reason: str


@dataclass(frozen=True)
class JournalFailed:
    """The journal cannot be written; empty once it can be again."""

    reason: str


@dataclass(frozen=True)
class HeldUp:
    """No step is done, as some workers do something else than the others, which wait for them."""

    workers: tuple[int, ...]
    text: str


@dataclass(frozen=True)
class NodeStraggles:
    """A node is slower than others that do the same (`pace.py`).

    ratio: of the time of its slowest worker's forward passes to the others', the mean over `for_s`
    seconds. worker: the slowest at the end. compared: how many nodes could be compared.
    """

    node: str
    ratio: float
    for_s: float
    worker: int
    compared: int


@dataclass(frozen=True)
class NodeKeepsUp:
    """A node that was named as a straggler has been none for `for_s` seconds."""

    node: str
    for_s: float


@dataclass(frozen=True)
class ShellFailed:
    """Something outside of the core went wrong that the run cannot go on after."""

    reason: str


@dataclass(frozen=True)
class Tick:
    """Time has passed: deadlines, and what waits for its time. Does nothing where none is due."""


@dataclass(frozen=True)
class SaidTogether:
    """What workers of one node have said at once of a handoff or a recovery: one event for the
    journal, as many for the core. numbers: of each message among all of its worker's."""

    messages: tuple[m.OfManyAtOnce, ...]
    numbers: tuple[int, ...]


PoolEvent = NodeGranted | NodeWarned | NodeGone | EndNear | PoolNote | BurstOver
Event = (
    m.WorkerEvent
    | SaidTogether
    | PoolEvent
    | CoordinatorStarted
    | TookOver
    | Regained
    | StoodStill
    | LaunchAllowed
    | AgentMet
    | AgentListens
    | AgentEnded
    | LaunchFailed
    | RendezvousFailed
    | WorkerGone
    | OperatorAsked
    | StopSignalled
    | StateRestored
    | CheckpointDoubted
    | CheckpointDamaged
    | CheckpointWritten
    | CheckpointFailed
    | JournalFailed
    | HeldUp
    | NodeStraggles
    | NodeKeepsUp
    | ShellFailed
    | Tick
)
