"""What is recorded of a run: one row a step, one row a handoff attempt. Times are epoch seconds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One training step, as rank 0 of its world saw it.

    `phase` is empty for an undisturbed step; "prepare" when a target world was being prepared
    beside it (from the notice to the boundary), "first" for a world's first step, "release" while
    the old world was being freed.
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


@dataclass(frozen=True)
class ReconfigurationRecord:
    """One handoff attempt. A time that was never reached is NaN.

    The pause is wall time in which neither world trains: `first_step_started_s -
    source_last_step_ended_s`, the largest over workers that were in both worlds.
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


@dataclass(frozen=True)
class NoticeRecord:
    """One node that had to be left, or came. A time that was never reached is NaN.

    kind: "granted", "preempted", "time limit", "drained", "cancelled", "operator", "node hours" or
    "lost"; "restart" or "requeue", of no node, where the run went on from the disk. at_s: when the
    notice came. deadline_s: when the node's processes are killed. estimate_s: what leaving it live
    was estimated to take. action: what was done about it. generation: the handoff that did it, -1
    for none. left_s: end of the last process there. outcome: "in time", "late", "lost", "in use",
    "not needed", "to disk", or "open" when the run ended first.
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
class WorkerPhaseRecord:
    """What one worker did in one phase of a handoff attempt; between two of them it trained on in
    the source, or waited. A time that was never reached is NaN.

    phase: "boot" (a joiner, until it could join), "prepare" (the target world, alone), "connect"
    (its groups, where each waits for the last), "transfer" (the parameters, digests included),
    "first step" (forward and backward, with the optimizer's state arriving), "update" (from the
    commit to the end of that step), "release" (the source world's memory and groups).
    """

    generation: int
    worker: int
    node: str
    phase: str
    started_s: float
    ended_s: float


@dataclass(frozen=True)
class TrafficRecord:
    """Bytes that a handoff's plan sends from one worker to another; nothing for a pair without."""

    generation: int
    sender: int
    receiver: int
    bytes: int


@dataclass(frozen=True)
class NetworkRecord:
    """A transport that a world's collectives really use: "gloo tcp", or as NCCL says "NET/IB",
    "NET/Socket", "P2P (NVLink)", "P2P (PCIe)", "SHM".

    hosts: where, with commas. detail: over which interfaces, adapters and ways.
    """

    generation: int
    transport: str
    hosts: str
    detail: str


@dataclass(frozen=True)
class BaselineRecord:
    """One checkpoint/restart measurement; every phase in seconds.

    total_s: all phases, from the end of the source's last step to the end of the target's first.
    lost_s: that less the target's median step, as a handoff's lost time; NaN where not known.
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


TABLES: dict[str, type[Any]] = {
    "steps": StepRecord,
    "reconfigurations": ReconfigurationRecord,
    "baselines": BaselineRecord,
    "notices": NoticeRecord,
    "networks": NetworkRecord,
    "worker_phases": WorkerPhaseRecord,
    "traffic": TrafficRecord,
}
"""The kinds of records by the names of their lists."""
