"""What the workers of a handoff send and receive, by the plan; of large worlds, of a sample."""

from __future__ import annotations

from dataclasses import dataclass

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.memory import bytes_by_receiver, move_bytes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, ModelSpec, Move


@dataclass(frozen=True)
class WorkerTraffic:
    """Bytes of one worker; a link carries both directions at once, so the larger one counts."""

    parameters: int
    state: int
    received: int
    bytes_to: dict[int, int]


@dataclass(frozen=True)
class SampledTraffic:
    """The busiest sampled worker's parameters and optimizer state, in bytes; what all workers
    together receive, scaled up from the sample; and one sampled worker's receivers."""

    busiest_parameters: int
    busiest_state: int
    moved_bytes: int
    bytes_to: dict[int, int]


def sampled_traffic(
    model: ModelSpec, source: RankMap, target: RankMap, sample: int
) -> SampledTraffic:
    """Plans `sample` workers of the two rank maps at even distances, or all where they are few."""
    everybody = sorted({*source.workers, *target.workers})
    count = min(sample, len(everybody))
    chosen = [everybody[number * len(everybody) // count] for number in range(count)]
    found = [_worker_traffic(model, source, target, worker) for worker in chosen]
    return SampledTraffic(
        max(one.parameters for one in found),
        max(one.state for one in found),
        sum(one.received for one in found) * len(everybody) // count,
        max((one.bytes_to for one in found), key=len),
    )


def _worker_traffic(
    model: ModelSpec, source: RankMap, target: RankMap, worker: int
) -> WorkerTraffic:
    plan = transfer_plan(model, source, target, worker)

    def busier(parameters: bool) -> int:
        return max(
            move_bytes(model, _of(plan.sends, parameters)),
            move_bytes(model, _of(plan.receives, parameters)),
        )

    return WorkerTraffic(
        busier(True),
        busier(False),
        move_bytes(model, plan.receives),
        bytes_by_receiver(model, plan.sends),
    )


def _of(moves: tuple[Move, ...], parameters: bool) -> tuple[Move, ...]:
    return tuple(move for move in moves if (move.kind == PARAMETER) == parameters)
