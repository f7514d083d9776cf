"""Which micro-batches of a global batch each data-parallel rank computes, and what each weighs.

The global batch of a step is the same in every layout, also where dp does not divide it: then
some ranks compute one micro-batch more than others. Megatron divides a rank's gradients by its
number m of micro-batches and takes the mean over dp ranks; with a weight of dp m / M, each of the M
micro-batches of the batch counts 1 / M.

The ranks that share experts talk within each micro-batch, so they all compute equally many: who
has less computes some more whose weight is zero. So do all ranks of a recipe whose loss may talk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from liver_hpc.config.schema import TrainSection
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ramp import Stretch, batches_of


class Share(NamedTuple):
    """What one data-parallel rank computes of a step.

    numbers: of its micro-batches in the global batch, in order. padding: how many more it computes,
    whose weight is zero. weight: of each of the others, so that all of the batch count alike.
    """

    numbers: range
    padding: int
    weight: float

    @property
    def computed(self) -> int:
        return len(self.numbers) + self.padding


def share_of(count: int, layout: Layout, dp_rank: int, together: bool = False) -> Share:
    """The i-th micro-batch of a rank is number i * dp + rank of the `count` of the whole batch.
    together: whether all ranks compute equally many."""
    dp = layout.dp
    group = dp if together else _dp_ranks_in_step(layout)
    first = dp_rank // group * group
    numbers = range(dp_rank, count, dp)
    computed = len(range(first, count, dp))
    return Share(numbers, computed - len(numbers), dp * computed / count)


def _dp_ranks_in_step(layout: Layout) -> int:
    """How many neighbouring dp ranks share experts, and so compute together."""
    if layout.cp % layout.ep == 0:
        return 1
    return layout.ep // layout.cp if layout.ep % layout.cp == 0 else layout.dp


def most_micro_batches(count: int, layout: Layout) -> int:
    """Of the data-parallel rank that computes most, of `count` in the whole batch."""
    return math.ceil(count / layout.dp)


def batch_fault(train: TrainSection, layout: Layout) -> str:
    """Why a layout cannot share the global batch of every step; empty when it can. Of a ramp-up the
    first batch that it cannot is named, and how many such there are."""
    *ramp, last = batches_of(train)
    faults = [*_faults(ramp, train, layout)]
    if faults:
        more = f"; {len(faults) - 1} further batches cannot be shared either" if faults[1:] else ""
        return f"{faults[0]}{more}"
    fault = _fault(last.batch, train, layout)
    if last.batch % train.micro_batch:
        return f"train.global_batch {fault}"
    return fault


def _faults(ramp: list[Stretch], train: TrainSection, layout: Layout) -> Iterator[str]:
    for stretch in ramp:
        if fault := _fault(stretch.batch, train, layout):
            if stretch.batch % train.micro_batch == 0:
                fault = f"{stretch.batch}: {fault}"
            yield f"train.rampup: global batch of step {stretch.first_step}, {fault}"


def _fault(batch: int, train: TrainSection, layout: Layout) -> str:
    if batch % train.micro_batch:
        return f"{batch} is not a multiple of micro_batch {train.micro_batch}"
    count = batch // train.micro_batch
    if count < layout.dp:
        return f"{count} micro-batches in the global batch are too few for dp={layout.dp}"
    if layout.vpp > 1 and count % (layout.dp * layout.pp):
        return (
            f"an interleaved pipeline wants {count} micro-batches in the global batch to be a "
            f"multiple of dp x pp = {layout.dp} x {layout.pp}"
        )
    return ""
