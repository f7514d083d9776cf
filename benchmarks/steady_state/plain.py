"""The plain Megatron loop: torch.distributed's own init, parallel_state, DDP, optimizer, schedule.

Nothing of liver_hpc runs here but the recipe's model and samples, which both sides train, and what
lets megatron-core run on a CPU at all.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ownership import stage_shards
from liver_hpc.layout.tensors import MAIN
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.recipes.specs import load_run_recipe

LIMIT = timedelta(minutes=30)


def run_rank(rank: int, layout: Layout, config: RunConfig, directory: Path) -> None:
    """One process of the loop; trains until it is killed. Rank 0 writes a line a step."""
    import torch
    import torch.distributed as dist

    from liver_hpc.world.device import open_device

    device = open_device(rank)
    dist.init_process_group(
        device.backend_name,
        init_method=f"file://{directory}/store",
        rank=rank,
        world_size=layout.workers,
        timeout=LIMIT,
    )
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(layout.tp, layout.pp)
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)
    recipe = load_run_recipe(config, directory)
    recipe.open(directory / f"rank-{rank}")
    loop = _Loop(recipe, layout, device.torch_device)
    log = os.open(directory / "steps", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for step in range(config.train.steps):
        loss = loop.step(step)
        if rank == 0:
            os.write(log, f"{step} {time.time()!r} {loss!r}\n".encode())
    torch.distributed.destroy_process_group()


class _Loop:
    """Model, optimizer and scheduler as a training script of Megatron's makes them."""

    def __init__(self, recipe: Recipe, layout: Layout, device: Any) -> None:
        import torch
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self._recipe = recipe
        self._device = device
        self._dp_rank = parallel_state.get_data_parallel_rank()
        self._dp = layout.dp
        self._layout, self._at = layout, layout.coordinate(torch.distributed.get_rank())
        self._dp_group = parallel_state.get_data_parallel_group()
        module, mains = filled_module(recipe, layout)
        self._model = _wrapped(module.to(device))
        self._optimizer, self._scheduler = _optimizer_of(recipe.config, self._model)
        for parameter, main in mains.items():  # else they are the parameters, rounded
            if len(main):
                parameter.main_param.copy_(main)
        self._forward_backward = get_forward_backward_func()
        self._seq_length = recipe.hidden_shape()[0] if layout.pp > 1 else 1

    def step(self, step: int) -> float:
        """One global batch; returns its mean loss, NaN where the last stage is elsewhere."""
        train = self._recipe.config.train
        count = train.global_batch // (train.micro_batch * self._dp)
        self._model.zero_grad_buffer()
        self._optimizer.zero_grad()
        outputs = self._forward_backward(
            forward_step_func=lambda samples, model: self._recipe.loss(model, next(samples)),
            data_iterator=self._micro_batches(step, count),
            model=[self._model],
            num_microbatches=count,
            seq_length=self._seq_length,
            micro_batch_size=train.micro_batch,
            forward_only=False,
        )
        self._scheduler.num_steps = step
        self._scheduler.step(0)
        self._optimizer.step()
        return self._mean_loss(outputs)

    def _micro_batches(self, step: int, count: int) -> Iterator[Sequence[Any]]:
        size, batch = self._recipe.config.train.micro_batch, self._recipe.batch(step)
        for number in range(self._dp_rank, count * self._dp, self._dp):
            samples = batch[number * size : (number + 1) * size]
            yield self._recipe.fetch(samples, self._layout, self._at)

    def _mean_loss(self, outputs: list[dict[str, Any]]) -> float:
        import torch

        if not outputs:
            return float("nan")
        mean = torch.stack([output["loss"] for output in outputs]).mean()
        torch.distributed.all_reduce(mean, group=self._dp_group)
        return float(mean) / self._dp


def filled_module(recipe: Recipe, layout: Layout) -> tuple[Any, dict[Any, Any]]:
    """The recipe's module at this rank's seat, with the values that a run starts with; and in low
    precision those of the optimizer's copies, by parameter."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from liver_hpc.world.megatron import complete_for_schedules, mark_tensor_parallel
    from liver_hpc.world.state import HeldTensor, WorldState

    at = layout.coordinate(torch.distributed.get_rank())
    groups = ProcessGroupCollection.use_mpu_process_groups()
    module = recipe.build(BuildContext(layout, at, groups))
    complete_for_schedules(module)
    shards = stage_shards(recipe.spec, layout, at.pp)
    indices, held, mains = recipe.spec.held_tensors(layout, at), {}, {}
    for index, parameter in zip(indices, module.parameters(), strict=True):
        mark_tensor_parallel(parameter, recipe.spec.tensors[index])
        interval = shards.interval(index, at.replica)
        optimizer = {}
        if not recipe.spec.main_is_parameter:  # the loop's optimizer takes the parameters again
            optimizer[MAIN] = mains[parameter] = torch.empty(interval[1] - interval[0])
        held[index] = HeldTensor(parameter.data, interval, optimizer)
    state = WorldState(recipe.spec, layout, at, held)
    state.initialize(recipe.initial, recipe.config.train.seed)
    return module, mains


def _wrapped(module: Any) -> Any:
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.transformer.module import Float16Module

    module.config.finalize_model_grads_func = finalize_model_grads
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=True
    )
    if module.config.bf16:
        module = Float16Module(module.config, module)
    return DistributedDataParallel(module.config, options, module)


def _optimizer_of(config: RunConfig, model: Any) -> tuple[Any, Any]:
    import torch
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    options, schedule = config.optimizer, config.schedule
    bf16 = model.config.params_dtype is torch.bfloat16
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=options.lr,
            min_lr=options.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.beta1,
            adam_beta2=options.beta2,
            adam_eps=options.eps,
            clip_grad=options.clip_grad,
            bf16=bf16,
            params_dtype=model.config.params_dtype,
            use_distributed_optimizer=True,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=schedule.warmup_steps,
        lr_decay_steps=schedule.decay_steps or config.train.steps,
        lr_decay_style=schedule.style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler
