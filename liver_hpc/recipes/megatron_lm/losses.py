"""A script's loss function as the runtime has it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from liver_hpc.errors import PlanError
from liver_hpc.recipes.base import LossFunction
from liver_hpc.world import thread


def mean_of(loss_function: Callable[[torch.Tensor], Any]) -> LossFunction:
    """Megatron-LM's loss functions give (sum over tokens, number of tokens, report), earlier ones
    (mean, report), of which PlanError is raised with context parallelism.

    The mean is over the tokens of whole samples: with context parallelism each rank counts those of
    its share, and the counts are summed over the group, in which this is collective. What the
    report has are metrics: (sum, number of tokens), of this rank's share, or a mean that the
    script has taken over all ranks itself.
    """

    def mean_loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, *counted, report = loss_function(output)
        group = thread.here.groups.cp
        metrics = {name: _metric(value, group.size()) for name, value in (report or {}).items()}
        if not counted:
            if group.size() > 1:
                raise PlanError(
                    "the script's loss function gives (mean, report): whether its mean is over the "
                    "tokens of this context-parallel rank or of all is not known; with cp give "
                    "(sum over tokens, number of tokens, report)"
                )
            return loss, metrics | {"loss": loss.detach().clone()}
        tokens = counted[0].detach().clone()
        if group.size() > 1:
            dist.all_reduce(tokens, group=group)
        mean = loss / tokens.clamp(min=1)
        return mean, metrics | {"loss": mean.detach().clone(), "tokens": tokens}

    return mean_loss


def _metric(value: Any, shares: int) -> torch.Tensor:
    """Of a mean each context-parallel rank has all, and is asked for its share."""
    held = torch.as_tensor(value).detach().flatten()
    return held if held.numel() == 2 else held / shares
