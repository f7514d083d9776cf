"""Which micro-batches of a global batch each data-parallel rank computes, and what each weighs.

The global batch is the same in every layout, also where dp does not divide it: then some ranks
compute one micro-batch more than others. Megatron divides a rank's gradients by its number m of
micro-batches and takes the mean over dp ranks; with a weight of dp m / M, each of the M
micro-batches of the batch counts 1 / M.

The ranks that share experts talk within each micro-batch, so they all compute equally many: who
has less computes some more whose weight is zero.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from liver_hpc.config.schema import TrainSection
from liver_hpc.layout.coordinates import Layout


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


def share_of(train: TrainSection, layout: Layout, dp_rank: int) -> Share:
    """The i-th micro-batch of a rank is number i * dp + rank of the whole batch."""
    count, dp = micro_batches(train), layout.dp
    group = _dp_ranks_in_step(layout)
    first = dp_rank // group * group
    numbers = range(dp_rank, count, dp)
    computed = len(range(first, count, dp))
    return Share(numbers, computed - len(numbers), dp * computed / count)


def _dp_ranks_in_step(layout: Layout) -> int:
    """How many neighbouring dp ranks share experts, and so compute together."""
    if layout.cp % layout.ep == 0:
        return 1
    return layout.ep // layout.cp if layout.ep % layout.cp == 0 else layout.dp


def micro_batches(train: TrainSection) -> int:
    """Of one global batch."""
    return train.global_batch // train.micro_batch


def most_micro_batches(train: TrainSection, layout: Layout) -> int:
    """Of the data-parallel rank that computes most."""
    return math.ceil(micro_batches(train) / layout.dp)


def batch_fault(train: TrainSection, layout: Layout) -> str:
    """Why a global batch cannot be shared in a layout; empty when it can."""
    if train.global_batch % train.micro_batch:
        return (
            f"train.global_batch {train.global_batch} is not a multiple of micro_batch "
            f"{train.micro_batch}"
        )
    count = micro_batches(train)
    if count < layout.dp:
        return f"{count} micro-batches in the global batch are too few for dp={layout.dp}"
    if layout.vpp > 1 and count % (layout.dp * layout.pp):
        return (
            f"an interleaved pipeline wants {count} micro-batches in the global batch to be a "
            f"multiple of dp x pp = {layout.dp} x {layout.pp}"
        )
    return ""
