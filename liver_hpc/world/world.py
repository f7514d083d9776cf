"""One world on one worker: process groups, model, optimizer, and the training step."""

from __future__ import annotations

import gc
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
)

from liver_hpc.errors import PlanError, TransferError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.ramp import samples_before, schedule_steps
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.transport import gloo_waits
from liver_hpc.transport.digest import box_digest, signed
from liver_hpc.world import (
    auxiliary,
    buffers,
    dropout,
    experts,
    megatron,
    metrics,
    optimizer,
    rehearsed,
    thread,
)
from liver_hpc.world.batches import Batches
from liver_hpc.world.chunks import Allocating, clear_caches, forget, undisturbed, wrapped
from liver_hpc.world.device import Device
from liver_hpc.world.forward_times import new_timer
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.sharded import state_tensors
from liver_hpc.world.state import HeldTensor, WorldState
from liver_hpc.world.steps import Flags, Gradients, StepResult
from liver_hpc.world.thread import MicroBatch

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _in_its_groups(method: Callable[P, R]) -> Callable[P, R]:
    """Of a world: what waits in its groups ends with them (transport/gloo_waits.py)."""

    @wraps(method)
    def collective(*args: P.args, **kwargs: P.kwargs) -> R:
        world: Any = args[0]
        with gloo_waits.within(world.book):
            return method(*args, **kwargs)

    return collective


class World:
    """A layout's groups, model and optimizer on one worker.

    Construction does not communicate: groups carry stand-in backends until `book.connect`.
    Weights are undefined until `state` has been filled. Raises PlanError where the recipe's model
    is not what the run's spec says, or has state that is not moved, ConfigError for a layout that
    the spec does not know.

    allocating: what its state and gradients are made in: `untouched.Untouched` where values come
    later, `memoryless.Memoryless` where memory does, too (`world/hollow.py`). batches: what it
    computes of global batches. tensors: parameters and persistent buffers by tensor index. taken:
    the memory that it has from another world which still stands (world/take_over.py), by address.
    forward_times: what its forward passes take on this worker. gradients_are_clear: they are all
    zeros.
    """

    def __init__(
        self,
        recipe: Recipe,
        rank_map: RankMap,
        worker: int,
        generation: int,
        device: Device,
        *,
        allocating: Allocating = nullcontext,
    ) -> None:
        at = rank_map.coordinate_of(worker)
        if at is None:
            raise PlanError(f"worker {worker} has no seat in {rank_map}")
        recipe.spec.check_layout(rank_map.layout)
        self.recipe = recipe
        self.rank_map = rank_map
        self.at = at
        self.generation = generation
        self.device = device
        self.worker = worker
        self.taken: frozenset[int] = frozenset()
        self._uncounted = 0  # steps that Adam has not counted, where nothing is trained here
        self._unscheduled = 0  # samples that the schedule has not counted
        gathers = recipe.config.train.overlap_param_gather
        self.forward_times = new_timer(device.torch_device, skips_first=gathers)
        self._allocating = allocating
        self.gradients_are_clear = allocating is nullcontext  # as megatron allocates them
        self._looked_at = False  # what a forward has left behind
        self._compared = False  # buffers, with those of other replicas
        self.book = GroupBook(generation, worker, device)
        try:
            self._build()
        except BaseException:
            self.book.close()
            raise

    # ---- building

    def _build(self) -> None:
        experts.redirect()
        auxiliary.redirect()
        recipe, layout, at = self.recipe, self.rank_map.layout, self.at
        self.groups = megatron.group_collection(self.rank_map, at, self.book)
        with thread.rehearsal(), thread.groups_in_use(self.groups):
            seat = BuildContext(layout, at, self.groups)
            built = wrapped(recipe, seat, self.device.torch_device, self.worker, self._allocating)
            self.chunks, self.tensors, self._buffers = built
            self._per_token = self.chunks[0].config.calculate_per_token_loss
            self._seed_before = dropout.seed_before(self.chunks, recipe.config.train.seed, at.tp)
            enter, per_token = self.device.enter, self._per_token
            self.batches = Batches(recipe, layout, at, self.groups, enter, per_token)
            with self._allocating():
                self.optimizer = optimizer.build(recipe, self.chunks, self.groups)
        self.optimizers = [
            one for one in self.optimizer.chained_optimizers if one.optimizer is not None
        ]
        with self._allocating():
            optimizer.create_state(self.optimizers)
        self._scheduler = optimizer.build_scheduler(self.recipe, self.optimizer)
        self._schedule = self._build_schedule()
        self._metrics: tuple[str, ...] = ()  # names that all workers know
        self.refresh_state()

    def _build_schedule(self) -> Any:
        layout = self.rank_map.layout
        if layout.pp == 1:
            return partial(forward_backward_no_pipelining, seq_length=1)
        pipelining = forward_backward_pipelining_without_interleaving
        if layout.vpp > 1:
            pipelining = forward_backward_pipelining_with_interleaving
        return partial(
            pipelining,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.chunks[0].config),
            seq_length=self.recipe.hidden_shape()[0],
        )

    def refresh_state(self) -> None:
        """Makes the view of the state anew; needed once other tensors are in the optimizer."""
        holdings = optimizer.holdings(self.optimizers)
        held = {}
        for index, tensor in self.tensors.items():
            ours = holdings.get(tensor, optimizer.NOTHING)
            held[index] = HeldTensor(tensor.data, ours.interval, ours.by_kind())
        self.state = WorldState(self.recipe.spec, self.rank_map.layout, self.at, held)

    # ---- rehearsal and end

    def warm_up(self, again: bool = True) -> None:
        """Rehearses a step before the groups are connected: nothing is sent, parameters and
        optimizer state become garbage, buffers stay. Safe beside a training thread of this process.

        It computes one micro-batch, in an interleaved pipeline the fewest that its schedule takes.
        again: False where a seat is not to be rehearsed from which this process has nothing left to
        learn (`world/rehearsed.py`).
        """
        recipe, layout = self.recipe, self.rank_map.layout
        micro_batch = recipe.config.train.micro_batch
        shapes = rehearsed.shapes_of(recipe.spec, micro_batch, layout, self.at)
        if again or not rehearsed.known(shapes, self.device.torch_device):
            self._rehearse(layout.pp if layout.vpp > 1 else 1)
            rehearsed.remember(shapes)

    @property
    def allows_rehearsal_beside(self) -> bool:
        """Whether another world may be rehearsed in this process while this one trains."""
        return not megatron.computes_by_transformer_engine(self.chunks)

    def accumulate_in_training_lane(self) -> None:
        """Gradients are added up where training computes, not in the lane of who has built this."""
        with self.device.in_training_lane():
            stay = sum(megatron.renew_accumulators(chunk) for chunk in self.chunks)
        if stay and self.device.late:
            log.warning("gradients of %d parameters are added up in PREPARE's lane", stay)

    def _clear_gradients(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.gradients_are_clear = True

    def _rehearse(self, micro_batches: int) -> None:
        with buffers.kept(self.chunks):
            filled = []
            with torch.no_grad():  # may be NaN as yet, and a model may look at what it computes
                for parameter in itertools.chain(*(chunk.parameters() for chunk in self.chunks)):
                    parameter.fill_(1 / max([1, *parameter.shape[1:]]))
                    first = parameter.flatten()[:1].clone()
                    filled.append((parameter, first, parameter._version, parameter.data_ptr()))
            with thread.rehearsal(), dropout.no_dropout(self.chunks):
                self.forward_backward(0, most=micro_batches)
                self._refuse_written_parameters(filled)
                self.update(0)
            clear_caches(self.chunks)
            megatron.begin_again(self.chunks)
            self.renew_untrained()  # raises where a step leaves other buffers than it found
            self._clear_gradients()
        self.renew_untrained()

    def _refuse_written_parameters(
        self, filled: Sequence[tuple[Any, torch.Tensor, int, int]]
    ) -> None:
        """Raises PlanError by name for parameters that a forward has written to. filled: each with
        the number in it, its version and its memory as it was filled.

        A replica would do so to its own copy, from its own samples, and the optimizer would keep of
        it what lies in the shard that is updated there, which another layout has elsewhere; and
        what a forward computes with is copied, or moved, beside it.
        """
        gathers = any(chunk.ddp_config.overlap_param_gather for chunk in self.chunks)
        modules = map(megatron.as_built, self.chunks)
        names = {id(p): name for module in modules for name, p in module.named_parameters()}
        for parameter, first, version, memory in filled:
            moved = parameter.data_ptr() != memory
            if moved and not parameter.requires_grad:
                continue  # another tensor in its place
            written = parameter._version != version
            if not gathers:  # which write, too, and leave the version
                written |= bool((parameter != first).any())
            if moved or written:
                raise PlanError(
                    f"a forward writes to {names[id(parameter)]}: what is trained is changed by "
                    "the optimizer alone, what is frozen by another tensor in its place "
                    "(`p.data = ...`)"
                )

    def close(self, spared: frozenset[int] = frozenset()) -> None:
        """Frees memory and forgets the groups. The world must not be used any more.

        spared: memory that another world has taken over, see `taken`, or is to have.
        """
        self.abandon(spared).release(self.taken | spared)

    def abandon(
        self, spared: frozenset[int] = frozenset(), *, written_to: bool = False
    ) -> WorldState:
        """Forgets the groups and everything else but the state's tensors, and returns those; of the
        gradients only what is `spared` stays, as `close` has it. written_to: the device may still
        write to gradients and state, which stay until it has ended then (`Device.park`).

        The world must not be used any more. Peers that are blocked in a collective of one of its
        groups fail promptly, because nothing here holds the group's connections any longer.
        """
        self.batches.close()
        self._end_reductions()
        gradients = [
            buffer.grad_data
            for chunk in self.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        if written_to:
            self.device.park((self.state, gradients))
        else:
            for storage in (each.untyped_storage() for each in gradients):
                if storage.data_ptr() not in spared:
                    storage.resize_(0)
        forget(self.chunks, self.groups)
        self.book.close()
        self.groups = self.optimizer = None
        self.chunks, self.optimizers, self.tensors, self._buffers = [], [], {}, {}
        self._scheduler = self._schedule = None
        gc.collect()
        return self.state

    def _end_reductions(self) -> None:
        """Of gloo's groups that were aborted in the middle of a step: what Megatron still reduces
        or gathers in them beside it fails, or never ends, which they are told then."""
        works = [
            work
            for chunk in (self.chunks if self.book.aborted and not self.device.late else ())
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)
            for handle in (group.grad_reduce_handle, group.param_gather_handle)
            if handle is not None
            for work in getattr(handle, "works", [handle])
        ]
        with gloo_waits.within(self.book):
            for work in works:
                with suppress(RuntimeError, TransferError):
                    work.wait()

    # ---- training

    @_in_its_groups
    def forward_backward(
        self, step: int, most: int | None = None, *, gathered: bool = False
    ) -> Gradients:
        """Gradients of global batch `step`, summed over micro-batches. Collective.

        most: how many micro-batches are computed at most; None: all. gathered: all parameters are
        up to date, which may lie in another world's memory, and nothing is written to them.
        """
        if not self.gradients_are_clear:
            self._clear_gradients()
        self.gradients_are_clear = False
        if most is None:
            as_they_are = megatron.without_gathers(self.chunks) if gathered else nullcontext()
            with as_they_are:
                gradients = self._compute(self.batches.begin(step))
            self._refuse_buffers_apart()
            return gradients
        return self._compute(self.batches.of_step(step)[:most])

    @_in_its_groups
    def evaluate(self, numbers: Iterable[int]) -> float:
        """The mean loss over validation batches, by their numbers. Changes nothing of the state.
        Collective, at a step's end."""
        self.settle()
        loss_sum, weight = 0.0, 0.0
        with undisturbed(self.chunks):
            for number in numbers:
                batch = self.recipe.validation_batch(number)
                first = number * self.recipe.config.train.global_batch
                found = self._compute(self.batches.part_of(batch, first), forward_only=True)
                loss_sum, weight = loss_sum + found.loss_sum, weight + found.weight
        loss_sum, weight = self._summed(loss_sum, weight)
        return loss_sum / weight if weight else math.nan

    def _compute(
        self, micro_batches: Sequence[MicroBatch], forward_only: bool = False
    ) -> Gradients:
        """Takes micro-batches through Megatron's schedule. Collective."""
        config, layout = self.recipe.config.train, self.rank_map.layout
        iterators = itertools.tee(self.batches.read(micro_batches), len(self.chunks))
        losses: list[metrics.Reported] = []
        self.forward_times.begin_batch(trains=not (forward_only or thread.here.rehearsing))
        try:
            masks = dropout.masks_of_samples(layout, self.at, self.chunks)
            with thread.groups_in_use(self.groups), masks:
                self._schedule(
                    forward_step_func=partial(self._forward, losses=losses),
                    data_iterator=[*iterators] if layout.vpp > 1 else iterators[0],
                    model=self.chunks,
                    num_microbatches=len(micro_batches),
                    micro_batch_size=config.micro_batch,
                    forward_only=forward_only,
                    pg_collection=self.groups,
                )
        finally:
            thread.here.micro_batch = None
        beside = auxiliary.told(micro_batches)
        if self.at.pp != layout.pp - 1 or self.at.tp != 0:
            return Gradients(0.0, 0.0, beside)
        weights = [float(reported.get("tokens", 1)) for reported in losses]
        if self._per_token and not all(weight.is_integer() for weight in weights):
            raise PlanError(f"calculate_per_token_loss: no numbers of tokens: {weights}")
        loss_sum = sum(r["loss"].item() * w for r, w in zip(losses, weights, strict=True))
        # With context parallelism each rank has its share of every loss.
        counted = layout.cp_rank(self.at) == 0
        told = metrics.summed(losses, weights, counted)
        return Gradients(loss_sum, sum(weights) if counted else 0.0, {**beside, **told})

    def _forward(
        self,
        micro_batches: Iterator[tuple[MicroBatch, Any]],
        model: Any,
        losses: list[metrics.Reported],
    ) -> tuple[Any, Any]:
        """Megatron's forward step: the next micro-batch goes through a chunk. Raises TransferError
        where nobody wants that any more: the next collective may be far."""
        if self.book.aborted:
            raise TransferError(f"the groups of generation {self.generation} were aborted")
        thread.here.micro_batch = None  # while the next one is read
        micro_batch, samples = next(micro_batches)
        thread.here.micro_batch = micro_batch
        begun = self.forward_times.begin(model)
        if self._seed_before is not None:
            self._seed_before(model)
        thread.here.entered = {}
        given = self.recipe.loss(model, samples)
        thread.here.entered = None  # what is computed again enters them again
        output, loss_function = metrics.of_forward(self.recipe, given)
        self.forward_times.end(begun)
        thread.recall_in_backward(output)

        def weighted(stage_output: torch.Tensor) -> tuple[Any, ...]:
            loss, reported = metrics.of_micro_batch(self.recipe, loss_function(stage_output))
            if not micro_batch.padding:
                losses.append(metrics.kept(reported))
            if micro_batch.weight != 1.0:
                loss = loss * micro_batch.weight
            if not self._per_token:
                return loss, reported
            tokens = metrics.tokens_of(reported)
            counted = not micro_batch.padding and self.rank_map.layout.cp_rank(self.at) == 0
            return loss * tokens, tokens if counted else torch.zeros_like(tokens), reported

        return output, weighted

    @_in_its_groups
    def update(self, step: int) -> tuple[float, float]:
        """The optimizer's step `step`; returns (gradient norm, learning rate). Collective."""
        train = self.recipe.config.train
        self._scheduler.num_steps = schedule_steps(train, step, self._unscheduled)
        self._scheduler.step(0)
        _, grad_norm, _ = self.optimizer.step()
        self.optimizer.zero_grad()  # its copies in fp32 of gradients in bf16 go
        # Where nothing is trained, no parameter group has it.
        return float(grad_norm or 0.0), float(self._scheduler.get_lr({}))

    @_in_its_groups
    def agree(self, gradients: Gradients, update: tuple[float, float], flags: Flags) -> StepResult:
        """Ends a step: one reduction gives all workers the mean loss, the metrics and the raised
        flags. A metric that is new to some takes two more, once in a world. Collective.

        The caller reads its flags just before, so that a flag raised while the step runs counts
        at this step's end and not at the next one's.
        """
        told, group = gradients.metrics, self.groups.intra_dist_opt
        loss_sum, weight, new, *rest = self._summed(
            gradients.loss_sum,
            gradients.weight,
            not told.keys() <= {*self._metrics},
            *map(float, flags),
            *metrics.in_order(told, self._metrics),
        )
        raised, sums = Flags._make(rest[: len(flags)]), rest[len(flags) :]
        if new:
            names = metrics.names_of_all(told, group, self.device.torch_device)
            self._metrics = tuple(sorted(names.union(self._metrics)))
            sums = self._summed(*metrics.in_order(told, self._metrics))
        return StepResult(
            loss_sum / weight if weight else math.nan,  # of a batch in which no token counts
            *update,
            raised,
            metrics.means(self._metrics, sums),
        )

    def _summed(self, *numbers: float) -> list[float]:
        """Numbers summed over the world. Collective. Raises TransferError where what this world has
        launched before ended undone, see `GroupBook.check`."""
        self.book.check()
        summed = torch.tensor(numbers, dtype=torch.float64, device=self.device.torch_device)
        dist.all_reduce(summed, group=self.groups.intra_dist_opt)
        told: list[float] = summed.tolist()  # for which the host waits for the device
        self.book.check()
        return told

    # ---- state at a boundary

    @_in_its_groups
    def settle(self) -> None:
        """Brings the state's tensors up to date at a step's end, before they are moved or saved:
        parameters that are gathered with the next forward, what a forward has put elsewhere.
        Collective over the world where `train.overlap_param_gather` is set. Who uses them asks
        `GroupBook.check` once the device is there."""
        if self.recipe.config.train.overlap_param_gather:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        self.renew_untrained()

    def renew_untrained(self) -> None:
        """Takes over the memory in which persistent buffers and frozen parameters lie now. Not
        collective. Raises PlanError, once a forward has been, for state that is not in the spec."""
        if not (self._looked_at or self.gradients_are_clear):
            self._refuse_late_state()
            self._looked_at = True
        for index, place in self._buffers.items():
            self.state.renew(index, place.tensor)
        for index, tensor in self.tensors.items():
            if self.recipe.spec.tensors[index].role == "frozen":
                self.state.renew(index, tensor.data)

    def _refuse_buffers_apart(self) -> None:
        """Once in a world, before its first update. Raises PlanError by name for persistent buffers
        that are others on other replicas, as those of a batch's statistics: after a recovery, or
        from a checkpoint, all would have those of one. Collective over replicas."""
        group = self.groups.dp_cp
        if self._compared or group.size() == 1:
            return
        self._compared = True
        self.renew_untrained()
        spec = self.recipe.spec
        boxes = [
            (spec.tensors[index], self.state.view(PARAMETER, index, box), box)
            for index, box in self.state.boxes(PARAMETER, "buffer")
            if not spec.tensors[index].expert
        ]
        if not boxes:
            return
        digests = [signed(box_digest(view, tensor, box)) for tensor, view, box in boxes]
        least, most = (torch.tensor(digests, device=self.device.torch_device) for _ in range(2))
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
        differ = (least != most).tolist()
        names = [tensor.name for (tensor, *_), other in zip(boxes, differ, strict=True) if other]
        if names:
            raise PlanError(
                f"{', '.join(dict.fromkeys(names))}: a forward leaves other values on each "
                "replica, and one of them would be moved, or gone back to: reduce them over the "
                "replicas, or keep none"
            )

    def _refuse_late_state(self) -> None:
        known = {id(tensor) for tensor in self.tensors.values()}
        known |= {id(place.tensor) for place in self._buffers.values()}
        for chunk in self.chunks:
            for name, tensor in state_tensors(megatron.as_built(chunk)).items():
                if id(tensor) not in known:
                    raise PlanError(
                        f"{name} came to be in a forward, after the model was built, and would not "
                        "be moved: register it in `build`, in its shape"
                    )

    def optimizer_groups(self) -> list[dict[str, Any]]:
        """The options of each of Adam's parameter groups on this worker."""
        return [
            {
                key: value.item() if isinstance(value, torch.Tensor) else value
                for key, value in group.items()
                if key != "params"
            }
            for adam in (one.optimizer for one in self.optimizers)
            for group in adam.param_groups
        ]

    def scalar_state(self, step: int) -> ScalarState:
        """The state that is in no tensor, at the boundary after `step` steps."""
        counts = {int(held["step"]) for held in optimizer.step_counters(self.optimizers)}
        if len(counts) > 1:
            raise PlanError(f"Adam's step counters differ: {sorted(counts)}")
        return ScalarState(
            step=step,
            consumed_samples=samples_before(self.recipe.config.train, step),
            unscheduled_samples=self._unscheduled,
            optimizer_step=counts.pop() if counts else step - self._uncounted,
            loss_scale=float(self.optimizer.get_loss_scale().item()),
            seed=self.recipe.config.train.seed,
        )

    def load_scalar_state(self, scalars: ScalarState) -> None:
        """Takes over the state that is in no tensor."""
        self._uncounted = scalars.step - scalars.optimizer_step
        self._unscheduled = scalars.unscheduled_samples
        for held in optimizer.step_counters(self.optimizers):
            if isinstance(held["step"], torch.Tensor):
                held["step"].fill_(float(scalars.optimizer_step))
            else:
                held["step"] = scalars.optimizer_step
