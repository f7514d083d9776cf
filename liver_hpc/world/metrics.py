"""Metrics: what a recipe tells of a micro-batch beside its loss, and what it comes to for a step.

Only workers of the last stage see them, so that their names have to be told to the others, once in
a world.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from liver_hpc.errors import PlanError
from liver_hpc.recipes.base import LossFunction, Recipe

Reported = dict[str, torch.Tensor]
"""What a recipe tells of a micro-batch; see `Recipe.loss`."""
Sums = Mapping[str, tuple[float, float]]
"""Of each metric on one worker: a sum, and what the mean of it is over."""

OF_LOSS = ("loss", "tokens")


def of_forward(recipe: Recipe, given: Any) -> tuple[torch.Tensor, LossFunction]:
    """What `Recipe.loss` gave: output and loss function. Raises PlanError for anything else."""
    match given:
        case (torch.Tensor() as output, function):
            return output, function
    raise _wrong(recipe, "loss", given)


def of_micro_batch(recipe: Recipe, given: Any) -> tuple[torch.Tensor, Reported]:
    """What the loss function gave. Raises PlanError for anything but a loss and what is reported,
    that loss by name."""
    match given:
        case (torch.Tensor() as loss, {"loss": told}) if loss.numel() == 1:
            if torch.as_tensor(told).numel() == 1:
                return loss, given[1]
    raise _wrong(recipe, "the function that loss gives", given)


def _wrong(recipe: Recipe, who: str, given: Any) -> PlanError:
    return PlanError(
        f"recipe {type(recipe).__name__}: {who} gave {_kind(given)}, wanted of loss (output "
        'tensor, function of it), and of that function (mean loss, {"loss": detached mean loss})'
    )


def _kind(given: Any) -> str:
    """In few words."""
    match given:
        case torch.Tensor():
            return f"a tensor of shape {[*given.shape]}"
        case {}:
            told = [f"{name!r}: {_kind(value)}" for name, value in given.items()]
            return f"{{{', '.join(told)}}}"
        case tuple() | list():
            return f"({', '.join(map(_kind, given))})"
    return type(given).__name__


def kept(reported: Reported) -> Reported:
    """What was told, in memory of its own: Megatron scales the loss where it lies, and what is told
    may be that, or a view of it."""
    return {name: torch.as_tensor(value).detach().clone() for name, value in reported.items()}


def tokens_of(reported: Reported) -> torch.Tensor:
    """How many a mean loss is over, one int32, for `calculate_per_token_loss`: the gradients are
    those of the mean over all tokens of the global batch. Raises PlanError where it was not told.
    """
    if "tokens" not in reported:
        raise PlanError(
            'calculate_per_token_loss: the loss function tells no "tokens", the number that its '
            "mean is over"
        )
    return torch.as_tensor(reported["tokens"]).detach().to(torch.int32).reshape(())


def summed(reported: Sequence[Reported], weights: Sequence[float], counted: bool) -> Sums:
    """Over this worker's micro-batches. weights: of each, what its mean loss is over. counted:
    whether what a mean is over counts here: with context parallelism on the first rank alone.

    Raises PlanError for what is neither a mean nor a sum with what it is over.
    """
    found: dict[str, tuple[float, float]] = {}
    for each, weight in zip(reported, weights, strict=True):
        for name, value in each.items():
            if name in OF_LOSS:
                continue
            match value.flatten().tolist():
                case [mean]:
                    total, over = mean * weight, weight if counted else 0.0
                case [total, over]:
                    pass
                case values:
                    raise PlanError(
                        f"metric {name!r} of the recipe: wanted a mean, or a sum and what it is "
                        f"over, got {len(values)} values"
                    )
            before, before_over = found.get(name, (0.0, 0.0))
            found[name] = before + total, before_over + over
    return found


def in_order(sums: Sums, names: Sequence[str]) -> list[float]:
    """The two numbers of each name."""
    return [number for name in names for number in sums.get(name, (0.0, 0.0))]


def means(names: Sequence[str], numbers: Sequence[float]) -> dict[str, float]:
    """Of metrics that somebody told, from the sums of `in_order`."""
    pairs = zip(names, numbers[::2], numbers[1::2], strict=True)
    return {name: total / over for name, total, over in pairs if over}


def names_of_all(
    names: Sequence[str] | Sums, group: dist.ProcessGroup, device: torch.device
) -> set[str]:
    """What any worker of a group names. Collective."""
    own = json.dumps([*names]).encode()
    longest = torch.tensor(len(own), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX, group=group)
    padded = torch.tensor([*own.ljust(int(longest.item()))], dtype=torch.uint8, device=device)
    told = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(told, padded, group=group)
    return {str(name) for each in told for name in json.loads(bytes(each.tolist()))}
