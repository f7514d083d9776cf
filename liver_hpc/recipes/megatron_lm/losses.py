"""A script's loss function as the runtime has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from liver_hpc.recipes.base import LossFunction
from liver_hpc.world import thread


def mean_of(loss_function: Callable[[torch.Tensor], Any]) -> LossFunction:
    """Megatron-LM's loss functions give (sum over tokens, number of tokens, report), earlier ones
    (mean, report).

    The mean is over the tokens of whole samples: with context parallelism each rank counts those of
    its share, and the counts are summed over the group, in which this is collective.
    """

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, *counted, _report = loss_function(output)
        if not counted:
            return loss, {"loss": loss.detach().clone()}
        tokens = counted[0].detach().clone()
        group = thread.here.groups.cp
        if group.size() > 1:
            dist.all_reduce(tokens, group=group)
        mean = loss / tokens.clamp(min=1)
        return mean, {"loss": mean.detach().clone(), "tokens": tokens}

    return mean_loss
