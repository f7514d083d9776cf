"""What is recorded of a run: one row a step, one row a handoff attempt. Times are epoch seconds.

The docstrings say of each column what it holds; docs/reference/metrics.md is made from them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as rank 0 of its world saw it.

    step: its number, from 0. generation: the world that did it. loss, grad_norm: of
    the global batch. learning_rate: that of this step's update. tokens: of the global batch.
    started_s, ended_s: its bounds; it begins where the step, evaluation or save before it ended.
    phase: empty for an undisturbed step; "prepare" when a target
    world was being prepared beside it (from the notice to the boundary), "first" for a world's
    first step, "release" while the old world was being freed.
    """

    step: int
    generation: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    started_s: float
    ended_s: float
    phase: str

    @property
    def is_finite(self) -> bool:
        """Whether both the loss and the gradient norm are numbers that a curve can show."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class MetricRecord:
    """One value that the recipe told beside the loss of a step; see `Recipe.loss`.

    step, generation: as of the step. name: as the recipe has it. value: the mean over the global
    batch.
    """

    step: int
    generation: int
    name: str
    value: float


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation.

    step: how many steps were done. generation: the world that evaluated. loss: the mean over its
    validation batches. batches: how many global batches those were. started_s, ended_s: its bounds.
    """

    step: int
    generation: int
    loss: float
    batches: int
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class ReconfigurationRecord:
    """One handoff attempt. A time that was never reached is NaN.

    generation: that of the target world. source_generation: that of the source world. source,
    target: the layout, as "tp2 pp1 dp2". source_workers, target_workers: ids in the order of ranks,
    with commas. notice: why. outcome: "completed", "aborted" or "failed". detail: what went wrong.
    step: how many were done at the boundary, or, without one, when the attempt ended. digest_equal:
    whether both sides held the same state. bytes_moved: between workers, by the plan. bytes_local:
    copied within them; what goes on in the same memory is in neither. notice_s: when the reason
    came. began_s: when the attempt did, which may have had to wait for its turn, or for nodes.
    boot_ended_s: all joiners had booted.
    prepare_started_s: PREPARE began. prepare_ended_s: all workers had prepared.
    armed_s: they were told to stop at a boundary.
    source_last_step_ended_s: the last of the source's workers had ended its last step, and the
    evaluation that was due after it.
    transfer_ended_s: the parameters had arrived at all, in bounded memory the whole state.
    first_step_started_s: the last of the target's workers began its first step. committed_s: the
    verdict was out.
    first_step_ended_s: the last of them had ended it. released_s: the source world was freed.
    pause_s: wall time in which neither world trained, from the end of the source's last step to
    the start of the target's first; the largest over workers that were in both worlds.
    stayers_file_descriptors, stayers_resident_bytes: the largest after RELEASE over workers that
    were in both worlds. bytes_between_nodes: those of bytes_moved that go to another node.
    checkpointed_s: in bounded memory, the checkpoint of the boundary stood; NaN where both worlds
    were held.
    spares: joiners that had booted before, and so did not have to for it.
    """

    generation: int
    source_generation: int
    source: str
    target: str
    source_workers: str
    target_workers: str
    notice: str
    outcome: str
    detail: str
    step: int
    digest_equal: bool
    bytes_moved: int
    bytes_local: int
    notice_s: float
    began_s: float
    boot_ended_s: float
    prepare_started_s: float
    prepare_ended_s: float
    armed_s: float
    source_last_step_ended_s: float
    transfer_ended_s: float
    first_step_started_s: float
    committed_s: float
    first_step_ended_s: float
    released_s: float
    pause_s: float
    stayers_file_descriptors: int
    stayers_resident_bytes: int
    bytes_between_nodes: int = 0
    checkpointed_s: float = math.nan
    spares: int = 0


@dataclass(frozen=True)
class RecoveryRecord:
    """One world that lost a worker, and the one that was filled from snapshots in its place.

    generation: that of the new world. source_generation: that of the lost one. source, target:
    their layouts. lost: the workers that were, with commas; none where connections alone broke.
    reason: why. step: how many steps are done at the boundary that was gone back to. steps_redone:
    how many more had been. rounds: how often it was begun. noticed_s: when the loss was known.
    halted_s: all that are left had let the old world go. refilled_s: the new one was filled, and
    proved; its first step comes next.
    """

    generation: int
    source_generation: int
    source: str
    target: str
    lost: str
    reason: str
    step: int
    steps_redone: int
    rounds: int
    noticed_s: float
    halted_s: float
    refilled_s: float


@dataclass(frozen=True)
class NoticeRecord:
    """One node that had to be left, or came. A time that was never reached is NaN.

    kind: "granted", "preempted", "time limit", "drained", "cancelled", "operator", "straggling",
    "node hours" or "lost"; "restart" or "requeue", of no node, where the run went on from the disk.
    node: its name. allocation: Slurm's job that holds it. at_s: when the notice came. deadline_s:
    when the node's processes are killed. estimate_s: what leaving it live was estimated to take.
    action: what was done about it. generation: the handoff that did it, -1 for none. left_s: end of
    the last process there. returned_s: when the node was given back. outcome: "in time", "late",
    "lost", "in use", "not needed", "to disk", or "open" when the run ended first.
    """

    kind: str
    node: str
    allocation: str
    at_s: float
    deadline_s: float
    estimate_s: float
    action: str
    generation: int
    left_s: float
    returned_s: float
    outcome: str


@dataclass(frozen=True)
class HoldingRecord:
    """One node for as long as it was held without a break; of a machine with any number of slots
    one worker for as long as it was there.

    node: its name. allocation: what it came with: a component, or a burst allocation. partition:
    that of Slurm, where the run file names it. slots: how many workers it takes. granted_s: when
    the run had it. returned_s: when it had it no longer, NaN while it has.
    """

    node: str
    allocation: str
    partition: str
    slots: int
    granted_s: float
    returned_s: float


@dataclass(frozen=True)
class PlacementRecord:
    """How many workers of a world sit on one node.

    generation: the world. layout: as "tp2 pp1 dp2". node: its name. workers: how many.
    """

    generation: int
    layout: str
    node: str
    workers: int


@dataclass(frozen=True)
class ObservationRecord:
    """What a run with `policy.observe` would have done, and did not.

    at_s: when. step: how many were done. notice: why: "nodes granted", "leaving NODES: REASON",
    "burst nodes" where it would have asked for some, or "in place of what was lost". source: the
    layout that trained. target: the one that it would have gone to, or have asked nodes for. nodes:
    those that it would have left, with commas. ready_s: how long it was estimated to take until the
    target would have trained. cost_s: of training time. instead: what was done: "stays as it is",
    "to disk" or "asks for none".
    """

    at_s: float
    step: int
    notice: str
    source: str
    target: str
    nodes: str
    ready_s: float
    cost_s: float
    instead: str


@dataclass(frozen=True)
class WorkerPhaseRecord:
    """What one worker did in one phase of a handoff attempt; between two of them it trained on in
    the source, or waited. A time that was never reached is NaN.

    generation: the target world of the attempt. worker: its id. node: where it runs.
    phase: "boot" (a joiner, until it could join), "prepare" (the target world, alone), "connect"
    (its groups, where each waits for the last), "transfer" (the parameters, digests included),
    "first step" (forward and backward, with the optimizer's state arriving), "update" (from the
    commit to the end of that step), "release" (the source world's memory and groups).
    started_s, ended_s: its bounds.
    """

    generation: int
    worker: int
    node: str
    phase: str
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class CrossingRecord:
    """Where one worker's time went from the boundary to the end of the target's first step, as it
    timed itself. NaN for what it did not do, or did not say.

    generation: the target world of the attempt. worker: its id. parameter_wire_s: waiting for
    messages of parameters, of a joiner from when it was ready. parameter_pack_s: packing, unpacking
    and copying them. parameter_digest_s: their digests. started_s: when its parameters were there,
    or on a leaver gone, and its first forward began. forward_backward_s: that and the first
    backward. optimizer_wire_s, optimizer_pack_s, optimizer_digest_s: the same of the optimizer's
    state, beside them. optimizer_after_s: from their end until that state was there too. voted_s:
    when it voted. verdict_s: from then to the verdict. update_s: the first update. ended_s: when
    its first step ended.
    """

    generation: int
    worker: int
    parameter_wire_s: float
    parameter_pack_s: float
    parameter_digest_s: float
    started_s: float
    forward_backward_s: float
    optimizer_wire_s: float
    optimizer_pack_s: float
    optimizer_digest_s: float
    optimizer_after_s: float
    voted_s: float
    verdict_s: float
    update_s: float
    ended_s: float


@dataclass(frozen=True)
class TrafficRecord:
    """What a handoff's plan sends from one worker to another; nothing for a pair without.

    generation: the target world. sender, receiver: worker ids. bytes: of parameters and optimizer.
    """

    generation: int
    sender: int
    receiver: int
    bytes: int


@dataclass(frozen=True)
class NetworkRecord:
    """A transport that a world's collectives really use.

    generation: the world. transport: "gloo tcp", or as NCCL says "NET/IB", "NET/Socket",
    "P2P (NVLink)", "P2P (PCIe)", "SHM". hosts: where, with commas. detail: over which interfaces,
    adapters and ways.
    """

    generation: int
    transport: str
    hosts: str
    detail: str


@dataclass(frozen=True)
class BaselineRecord:
    """One checkpoint/restart measurement, of a benchmark's job; every phase in seconds.

    method: how it was stopped and started. source, target: the layout. save_s: writing the
    checkpoint. stop_s: until the last process had ended. launch_s: until the new ones ran.
    import_s: their imports. groups_s: process groups, model and optimizer. load_s: reading the
    checkpoint. first_step_s: the target's first step. total_s: all phases, from the end of the
    source's last step to the end of the target's first. detail: what else there is to say. lost_s:
    the total less the target's median step, as a handoff's lost time; NaN where not known.
    """

    method: str
    source: str
    target: str
    save_s: float
    stop_s: float
    launch_s: float
    import_s: float
    groups_s: float
    load_s: float
    first_step_s: float
    total_s: float
    detail: str
    lost_s: float = math.nan


@dataclass(frozen=True)
class StragglerRecord:
    """One node that was found to be slower than others that do the same.

    at_s: when. step: how many were done. generation: the world. node: its name. worker: its slowest
    one. ratio: of the time of that one's forward passes to the median of its peers', the mean since
    it began. for_s: for how long it had been so. compared: how many nodes could be compared.
    action: "named alone", "drained", "would have drained it", or "not drained: " and why.
    """

    at_s: float
    step: int
    generation: int
    node: str
    worker: int
    ratio: float
    for_s: float
    compared: int
    action: str


@dataclass(frozen=True)
class RunRecords:
    """All that was recorded of a run, each list in the order of writing."""

    steps: list[StepRecord]
    reconfigurations: list[ReconfigurationRecord]
    baselines: list[BaselineRecord]
    attributes: dict[str, str]
    notices: list[NoticeRecord] = field(default_factory=list)
    networks: list[NetworkRecord] = field(default_factory=list)
    worker_phases: list[WorkerPhaseRecord] = field(default_factory=list)
    traffic: list[TrafficRecord] = field(default_factory=list)
    crossings: list[CrossingRecord] = field(default_factory=list)
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    recoveries: list[RecoveryRecord] = field(default_factory=list)
    metrics: list[MetricRecord] = field(default_factory=list)
    holdings: list[HoldingRecord] = field(default_factory=list)
    placements: list[PlacementRecord] = field(default_factory=list)
    observations: list[ObservationRecord] = field(default_factory=list)
    stragglers: list[StragglerRecord] = field(default_factory=list)


Row = (
    ReconfigurationRecord
    | RecoveryRecord
    | NoticeRecord
    | ObservationRecord
    | StragglerRecord
    | WorkerPhaseRecord
    | TrafficRecord
    | CrossingRecord
    | NetworkRecord
    | EvaluationRecord
)
"""What the core records; all else is in the journal as it was told, or happened."""

TABLES: dict[str, type[Any]] = {
    name: get_args(kind)[0]
    for name, kind in get_type_hints(RunRecords).items()
    if get_origin(kind) is list
}
"""The kinds of records by the names of their lists."""
