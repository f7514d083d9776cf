"""Megatron's distributed optimizer: built, its state made, and found again by parameter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from liver_hpc.layout.ramp import decay_steps
from liver_hpc.layout.tensors import MAIN, MOMENTS
from liver_hpc.recipes.base import Recipe
from liver_hpc.world import megatron


class Holding(NamedTuple):
    """What this rank's optimizer holds of a parameter: a flat interval of its local share; the copy
    of that which Adam updates, in fp32 a view of the parameter; and Adam's state, by kind. Of an
    empty interval there is no copy and no state."""

    interval: tuple[int, int]
    main: torch.Tensor | None
    state: dict[str, Any]

    def by_kind(self) -> dict[str, torch.Tensor]:
        """Kind of optimizer state -> 1-D tensor of the interval's length."""
        if self.main is None:
            return {}
        return {MAIN: self.main.data} | {kind: self.state[kind] for kind in MOMENTS}


NOTHING = Holding((0, 0), None, {})
"""Of a tensor that is not trained."""


def build(recipe: Recipe, chunks: Sequence[Any], groups: Any) -> Any:
    """The chained optimizer of a world's chunks."""
    options, train = recipe.config.optimizer, recipe.config.train
    bf16 = recipe.spec.parameter_bytes == 2
    with torch.no_grad():  # views of fp32 parameters with a graph would keep its first nodes
        chained = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.min_lr,
                decoupled_lr=options.decoupled_lr,
                decoupled_min_lr=options.decoupled_min_lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.beta1,
                adam_beta2=options.beta2,
                adam_eps=options.eps,
                clip_grad=options.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=True,
                overlap_param_gather=train.overlap_param_gather,
            ),
            chunks,
            use_gloo_process_groups=False,
            pg_collection=groups,
        )
    megatron.answer_norm_groups(chained, chunks)
    return chained


def build_scheduler(recipe: Recipe, chained: Any) -> OptimizerParamScheduler:
    """The learning rate's schedule by the run file."""
    options, schedule = recipe.config.optimizer, recipe.config.schedule
    return OptimizerParamScheduler(
        chained,
        init_lr=schedule.warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=decay_steps(schedule, recipe.config.train),
        lr_decay_style=schedule.style,
        wsd_decay_steps=schedule.wsd_decay_steps,
        lr_wsd_decay_style=schedule.wsd_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )


def create_state(optimizers: Iterable[Any]) -> None:
    """Makes Adam's state now, and touches its memory.

    torch's Adam counts steps in one tensor a parameter; the fused ones count in the parameter
    group. (megatron's fallback shares one tensor, which then advances once a parameter.)
    """
    for adam in (one.optimizer for one in optimizers):
        counts_by_parameter = isinstance(adam, torch.optim.Adam)
        for group in adam.param_groups:
            if not counts_by_parameter:
                group["step"] = 0
            for parameter in group["params"]:
                moments: dict[str, Any] = {
                    # Not zeros_like, whose pages are there once they are written to.
                    kind: torch.empty_like(parameter.data).zero_()
                    for kind in MOMENTS
                }
                state = adam.state[parameter] = moments
                if counts_by_parameter:
                    state["step"] = torch.tensor(0.0)


def step_counters(optimizers: Iterable[Any]) -> list[dict[str, Any]]:
    """What Adam counts its steps in, under "step"; see `create_state`. Fused ones do not count in a
    group of which this rank owns nothing."""
    return [
        held
        for adam in (one.optimizer for one in optimizers)
        for held in (
            *adam.state.values(),
            *(group for group in adam.param_groups if group["params"]),
        )
        if "step" in held
    ]


def holdings(optimizers: Iterable[Any]) -> dict[torch.Tensor, Holding]:
    """Of every local parameter that it trains: what this rank really owns of it."""
    return {
        parameter: _holding(one, parameter, ranges["param"].start, ranges["param"].end)
        for one in optimizers
        for buffer in one.gbuf_ranges
        for buckets in buffer.values()
        for bucket in buckets
        for parameter, ranges in bucket["param_map"].items()
    }


def _holding(one: Any, parameter: torch.Tensor, start: int, end: int) -> Holding:
    if start >= end:
        return Holding((start, end), None, {})
    group, position = one.model_param_group_index_map[parameter]
    main = one.optimizer.param_groups[group]["params"][position]
    return Holding((start, end), main, one.optimizer.state[main])
