"""One world on one worker: process groups, model, optimizer, and the training step."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_without_interleaving,
)
from megatron.core.transformer.module import Float16Module

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.tensors import MAIN, MOMENTS
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.world import megatron
from liver_hpc.world.described import described_parameters
from liver_hpc.world.device import Device
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.state import HeldTensor, WorldState


class Flags(NamedTuple):
    """What one worker tells the others at the end of a step: it is armed, it was asked to stop."""

    ready: bool = False
    stop: bool = False


@dataclass(frozen=True)
class StepResult:
    """What all workers of a world know after a step. ready, stop: how many raised that flag."""

    loss: float
    grad_norm: float
    learning_rate: float
    ready: int
    stop: int


@dataclass(frozen=True)
class Gradients:
    """What a forward and backward pass gave on this worker: the sum of its micro-batches' losses,
    and their number. Both are 0 except on the last stage's first tensor-parallel rank."""

    loss_sum: float
    micro_batches: int


class World:
    """A layout's groups, model and optimizer on one worker.

    Construction does not communicate: groups carry stand-in backends until `book.connect`.
    Weights are undefined until `state` has been filled. Raises PlanError where the recipe's model
    is not what the recipe describes, or has state that is not moved.
    """

    def __init__(
        self, recipe: Recipe, rank_map: RankMap, worker: int, generation: int, device: Device
    ) -> None:
        at = rank_map.coordinate_of(worker)
        if at is None:
            raise PlanError(f"worker {worker} has no seat in {rank_map}")
        self.recipe = recipe
        self.rank_map = rank_map
        self.at = at
        self.generation = generation
        self.device = device
        self.worker = worker
        self.book = GroupBook(generation, worker, device)
        try:
            self._build()
        except BaseException:
            self.book.close()
            raise

    # ---- building

    def _build(self) -> None:
        self.groups = megatron.group_collection(self.rank_map, self.at, self.book)
        with megatron.rehearsal(), megatron.groups_in_use(self.groups):
            self.model = self._build_model()
            self.optimizer = self._build_optimizer()
        self._adam = self.optimizer.chained_optimizers[0]
        self._create_optimizer_state()
        self._scheduler = self._build_scheduler()
        if self.rank_map.layout.pp > 1:
            self._schedule: Any = partial(
                forward_backward_pipelining_without_interleaving,
                p2p_communicator=P2PCommunicator(self.groups.pp, self.model.config),
                seq_length=self.recipe.hidden_shape()[0],
            )
        else:
            self._schedule = partial(forward_backward_no_pipelining, seq_length=1)
        self.refresh_state()

    def _build_model(self) -> DistributedDataParallel:
        seed_dropout = partial(megatron.seed_dropout, tp_rank=self.at.tp)
        context = BuildContext(self.rank_map.layout, self.at, self.groups, seed_dropout)
        spec = self.recipe.spec
        with megatron.NoDraws():
            module = described = self.recipe.build(context).to(self.device.torch_device)
        config = module.config
        megatron.complete_for_schedules(module)
        if not spec.main_is_parameter:
            module = Float16Module(config, described)
        self._parameters = described_parameters(spec, context.layout, self.at.pp, described)
        for index, parameter in self._parameters.items():
            megatron.mark_tensor_parallel(parameter, spec.tensors[index])
        config.finalize_model_grads_func = finalize_model_grads
        return DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True),
            module,
            pg_collection=self.groups,
        )

    def _build_optimizer(self) -> Any:
        options = self.recipe.config.optimizer
        bf16 = self.recipe.spec.parameter_bytes == 2
        return get_megatron_optimizer(
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
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=True,
            ),
            [self.model],
            use_gloo_process_groups=False,
            pg_collection=self.groups,
        )

    def _create_optimizer_state(self) -> None:
        """Makes Adam's state now, and touches its memory.

        torch's Adam counts steps in one tensor a parameter; the fused ones count in the parameter
        group. (megatron's fallback shares one tensor, which then advances once a parameter.)
        """
        adam = self._adam.optimizer
        counts_by_parameter = isinstance(adam, torch.optim.Adam)
        for group in adam.param_groups:
            if not counts_by_parameter:
                group["step"] = 0
            for parameter in group["params"]:
                moments: dict[str, Any] = {k: torch.zeros_like(parameter.data) for k in MOMENTS}
                state = adam.state[parameter] = moments
                if counts_by_parameter:
                    state["step"] = torch.tensor(0.0)

    def _build_scheduler(self) -> OptimizerParamScheduler:
        options, schedule = self.recipe.config.optimizer, self.recipe.config.schedule
        return OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=schedule.warmup_steps,
            lr_decay_steps=schedule.decay_steps or self.recipe.config.train.steps,
            lr_decay_style=schedule.style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def refresh_state(self) -> None:
        """Makes the view of the state anew; needed once other tensors are in the optimizer."""
        adam, intervals = self._adam.optimizer, self._optimizer_intervals()
        held = {}
        for index, parameter in self._parameters.items():
            start, end = intervals.get(parameter, (0, 0))
            optimizer = {}
            if start < end:
                group, position = self._adam.model_param_group_index_map[parameter]
                main = adam.param_groups[group]["params"][position]
                optimizer = {MAIN: main.data} | {kind: adam.state[main][kind] for kind in MOMENTS}
            held[index] = HeldTensor(parameter.data, (start, end), optimizer)
        self.state = WorldState(self.recipe.spec, self.rank_map.layout, self.at, held)

    def _optimizer_intervals(self) -> dict[torch.nn.Parameter, tuple[int, int]]:
        """The flat interval of every local parameter that this dp rank's optimizer really owns."""
        return {
            parameter: (ranges["param"].start, ranges["param"].end)
            for buffer in self._adam.gbuf_ranges
            for buckets in buffer.values()
            for bucket in buckets
            for parameter, ranges in bucket["param_map"].items()
        }

    # ---- rehearsal and end

    def warm_up(self) -> None:
        """Rehearses a step before the groups are connected: nothing is sent, and weights and state
        become garbage. Safe beside a training thread of this process.
        """
        with megatron.rehearsal():
            self.model.eval()
            self.forward_backward(0)
            self.update(0)
            self.model.train()
            self.model.zero_grad_buffer()
        self.device.synchronize()

    def close(self) -> None:
        """Frees memory and forgets the groups. The world must not be used any more."""
        self.abandon().release()

    def abandon(self) -> WorldState:
        """Forgets the groups and everything else but the state's tensors, and returns those.

        The world must not be used any more. Peers that are blocked in a collective of one of its
        groups fail promptly, because nothing here holds the group's connections any longer.
        """
        for buffer in self.model.buffers:
            buffer.grad_data.untyped_storage().resize_(0)
        self.book.close()
        self.groups = self.model = self.optimizer = self._adam = None
        self._parameters = {}
        self._scheduler = self._schedule = None
        gc.collect()
        return self.state

    # ---- training

    def forward_backward(self, step: int) -> Gradients:
        """Gradients of global batch `step`, summed over micro-batches. Collective."""
        config, layout = self.recipe.config.train, self.rank_map.layout
        micro_batches = config.global_batch // (config.micro_batch * layout.dp)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        with megatron.groups_in_use(self.groups):
            outputs = self._schedule(
                forward_step_func=lambda samples, model: self.recipe.loss(model, next(samples)),
                data_iterator=self._micro_batches(step, micro_batches),
                model=[self.model],
                num_microbatches=micro_batches,
                micro_batch_size=config.micro_batch,
                forward_only=False,
                pg_collection=self.groups,
            )
        if self.at.pp != layout.pp - 1 or self.at.tp != 0:
            return Gradients(0.0, 0)
        return Gradients(sum(output["loss"].item() for output in outputs), len(outputs))

    def _micro_batches(self, step: int, count: int) -> Iterator[Sequence[Any]]:
        """This dp rank's micro-batches: its i-th is number i * dp + rank of the whole step."""
        size, dp = self.recipe.config.train.micro_batch, self.rank_map.layout.dp
        batch = self.recipe.batch(step)
        for number in range(self.at.dp, count * dp, dp):
            yield batch[number * size : (number + 1) * size]

    def update(self, step: int) -> tuple[float, float]:
        """The optimizer's step `step`; returns (gradient norm, learning rate). Collective."""
        self._scheduler.num_steps = step
        self._scheduler.step(0)
        _, grad_norm, _ = self.optimizer.step()
        learning_rate = self.optimizer.param_groups[0]["lr"]
        return float(grad_norm or 0.0), float(learning_rate)

    def train_step(self, step: int) -> tuple[Gradients, tuple[float, float]]:
        """Trains step `step` up to its end, which is `agree`. Collective over the world."""
        gradients = self.forward_backward(step)
        return gradients, self.update(step)

    def agree(self, gradients: Gradients, update: tuple[float, float], flags: Flags) -> StepResult:
        """Ends a step: one reduction gives all workers the mean loss and the raised flags.
        Collective.

        The caller reads its flags just before, so that a flag raised while the step runs counts
        at this step's end and not at the next one's.
        """
        numbers = torch.tensor(
            [gradients.loss_sum, gradients.micro_batches, *map(float, flags)],
            dtype=torch.float64,
            device=self.device.torch_device,
        )
        dist.all_reduce(numbers, group=self.groups.intra_dist_opt)
        loss_sum, count, readies, stops = numbers.tolist()
        return StepResult(loss_sum / count, update[0], update[1], int(readies), int(stops))

    # ---- state that is not a tensor

    def _step_counters(self) -> list[dict[str, Any]]:
        """What Adam counts its steps in, under "step"; see `_create_optimizer_state`."""
        adam = self._adam.optimizer
        return [held for held in (*adam.state.values(), *adam.param_groups) if "step" in held]

    def scalar_state(self, step: int) -> ScalarState:
        """The state that is in no tensor, at the boundary after `step` steps."""
        counts = {int(held["step"]) for held in self._step_counters()}
        if len(counts) > 1:
            raise PlanError(f"Adam's step counters differ: {sorted(counts)}")
        return ScalarState(
            step=step,
            consumed_samples=step * self.recipe.config.train.global_batch,
            optimizer_step=counts.pop() if counts else step,
            loss_scale=float(self.optimizer.get_loss_scale().item()),
            seed=self.recipe.config.train.seed,
        )

    def load_scalar_state(self, scalars: ScalarState) -> None:
        """Takes over the state that is in no tensor."""
        for held in self._step_counters():
            if isinstance(held["step"], torch.Tensor):
                held["step"].fill_(float(scalars.optimizer_step))
            else:
                held["step"] = scalars.optimizer_step
