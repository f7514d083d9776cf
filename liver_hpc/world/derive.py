"""Derives the spec of a recipe's model: from what the model itself says, without its memory.

The model is built on the meta device under stand-in groups, at the seats that the run's layouts
have; `sharded_state_dict` tells what each holds (sharded.py). How tensor parallelism splits a
tensor, who holds what of a pipeline, and who holds which experts are found each on its own; a seat
of every layout that has several of them shows that they can be had at once. Every worker compares
its real module with the result.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from liver_hpc.errors import MODELS_ERRORS, PlanError, place_in_users_code, told_of
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import Chunks, First, ModelSpec, TensorSpec, pipeline
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.world import draws, dropout, megatron, thread
from liver_hpc.world.device import Device
from liver_hpc.world.groups import GroupBook, install_sentinel
from liver_hpc.world.recorder import recorded
from liver_hpc.world.refused import (
    refuse_dtypes,
    refuse_options,
    refuse_other_kinds,
    refuse_other_rates,
    refuse_undrawn,
    refuse_unknown,
    refuse_unmarked,
)
from liver_hpc.world.sharded import (
    Sharded,
    Shards,
    frame_of,
    sharded,
    sharded_objects,
    shards_of,
    state_tensors,
    whole_of,
)
from liver_hpc.world.shares import differences, is_share, split_of

_generations = itertools.count(-2, -1)
"""Of groups that no world has: their names are in use once a process."""

Splits = dict[str, tuple[int, tuple[int, ...]]]
"""By tensor: the dimension that is split, and the sizes of its blocks along it."""

Build = Callable[[Recipe, Layout, Coordinate, Any], list[Any]]
"""Gives the modules of a seat, one for each chunk."""


class Stored(NamedTuple):
    """How a checkpoint holds a whole model: where each tensor lies, by name, and the objects beside
    tensors (extra state), by their names there."""

    tensors: Mapping[str, tuple[Sharded, ...]]
    objects: Mapping[str, Any]


class Derivation:
    """Builds one recipe's model at seats of layouts, and tells what they hold. Not collective.

    worker: the rank of this process's sentinel group. layers, experts: of the model, and of a layer
    that has some. Raises PlanError where the model cannot be
    built with nothing split, or does not say what it holds then.
    """

    def __init__(self, recipe: Recipe, worker: int = 0) -> None:
        self._recipe = recipe
        self._device = Device(torch.device("cpu"))
        self._whole = RankMap(Layout(1, 1, 1), (worker,))
        with self._seat(self._whole, worker) as ((module,), groups):
            self.frame = frame_of(module, groups)
            if recipe.config.optimizer.decoupled_lr is not None:
                self.frame = dataclasses.replace(self.frame, decoupled=_decoupled(module))
            self._parameter_bytes = 2 if module.config.bf16 else 4
            self.layers = module.config.num_layers
            self.experts = getattr(module.config, "num_moe_experts", None) or 0
            refuse_dtypes(module)
        self._numbers = {name: number for number, name in enumerate(self.frame.tensors)}

    def as_worker(self, worker: int) -> Derivation:
        """The same in a process that is another worker by now."""
        same = copy.copy(self)
        same._whole = RankMap(self._whole.layout, (worker,))
        return same

    def spec(self, layouts: Iterable[Layout]) -> ModelSpec:
        """The model's spec for these layouts; those that the model cannot take are in `refused`.

        For a process without a world: it replaces the sentinel group, at last by that of the
        class's worker. Raises PlanError for a model whose first values are neither known nor given
        by the recipe, or which draws from numpy's or Python's streams as it is built.
        """
        wanted = sorted({layout.least for layout in layouts})
        refused: dict[str, str] = {}
        splits: Splits = {}
        stages: dict[str, tuple[Chunks, ...]] = {"pp1": ((tuple(self._numbers.values()),),)}
        homes: dict[int, tuple[int | None, ...]] = {}
        for alone in sorted({alone for layout in wanted for alone in _axes_alone(layout)}):
            with _refusal(refused, alone):
                if alone.tp > 1:
                    splits = self._splits(alone, splits)
                elif alone.pp > 1:
                    stages[pipeline(alone)] = self._stages(alone)
                else:
                    homes[alone.ep] = self._homes(alone)
        spec = self._composed(splits, stages, homes, refused)
        for layout in wanted:
            parts = _axes_alone(layout)
            whys = [refused[str(alone)] for alone in parts if str(alone) in refused]
            if whys:
                refused[str(layout)] = whys[0]
            elif layout not in parts:
                with _refusal(refused, layout):
                    self._check_last_seat(spec, layout)
        install_sentinel(self._whole.workers[0])
        return spec

    def _composed(
        self,
        splits: Splits,
        stages: dict[str, tuple[Chunks, ...]],
        homes: dict[int, tuple[int | None, ...]],
        refused: dict[str, str],
    ) -> ModelSpec:
        tensors, firsts = [], self._first_values()
        held = [collections.Counter(itertools.chain(*itertools.chain(*t))) for t in stages.values()]
        for number, (name, whole) in enumerate(self.frame.tensors.items()):
            dim, blocks = splits.get(name, (None, ()))
            tensors.append(
                TensorSpec(
                    name,
                    whole.shape,
                    dim,
                    blocks,
                    tied=any(counts[number] > 1 for counts in held),
                    expert=any(table[number] is not None for table in homes.values()),
                    role=whole.role,
                    element_bytes=None if whole.role == "trained" else whole.element_bytes,
                    first=firsts.get(name, "it is a buffer"),
                )
            )
        train = self._recipe.config.train
        bucket_elements = train.bucket_elements if train.overlap_grad_reduce else None
        return ModelSpec(
            tuple(tensors),
            stages,
            self._parameter_bytes,
            homes,
            bucket_elements,
            refused,
            gradient_bytes=self._parameter_bytes if train.grad_reduce_in_bf16 else 4,
        )

    def _first_values(self) -> dict[str, First]:
        """How the model itself fills each parameter."""
        found: dict[str, First] = {}

        def build(recipe: Recipe, layout: Layout, at: Coordinate, groups: Any) -> list[Any]:
            with recorded() as recorder:
                module = recipe.build(BuildContext(layout, at, groups, draws=True))
            found.update(recorder.first_values(module))
            return [module]

        with draws.only_of_torch(), self._seat(self._whole, self._whole.workers[0], build):
            pass
        if type(self._recipe).initial is Recipe.initial:
            refuse_unknown(found)
        return found

    def stored(self, metadata: Mapping[str, Any]) -> Stored:
        """What lies under which key of a checkpoint with this content metadata.

        For a process without a world, or one whose world is of this class's worker.
        """
        with self._seat(self._whole, self._whole.workers[0]) as ((module,), groups):
            return Stored(
                {name: tuple(pieces) for name, pieces in sharded(module, groups, metadata).items()},
                sharded_objects(module, groups, metadata),
            )

    # ---- what seats hold

    def _splits(self, layout: Layout, known: Splits) -> Splits:
        """How the ranks of a layout share tensors; the first rank and the last are asked."""
        tp = layout.tp
        (first,), (last,) = (self._shards(layout, Coordinate(rank, 0, 0)) for rank in (0, tp - 1))
        found: Splits = {}
        for name, whole in self.frame.tensors.items():
            split = split_of(name, whole.shape, tp, first[name].parts)
            for rank, parts in ((0, first[name].parts), (tp - 1, last[name].parts)):
                if not is_share(parts, whole.shape, split, tp, rank):
                    raise PlanError(f"{name}: no even split over tp={tp}: rank {rank} has {parts}")
            if split is not None:
                found[name] = split
        if known and known != found:
            names = ", ".join(name for name, _ in known.items() ^ found.items())
            raise PlanError(f"at tp={tp} other tensors are split, or otherwise: {names}")
        return found

    def _stages(self, layout: Layout) -> tuple[Chunks, ...]:
        """The tensors of every chunk of every stage, in the order of their modules'."""
        table, summed = [], set()
        for stage in range(layout.pp):
            with self._at(layout, Coordinate(0, stage, 0)) as (modules, groups):
                chunks = self._indices(chunk_shards(modules, groups, self.frame, layout))
                chunk = {0: 0, layout.pp - 1: -1}.get(stage)
                if chunk is not None:
                    summed.add(_summed(modules[chunk], chunks[chunk]))
            table.append(chunks)
        self._check_all_held(layout, itertools.chain(*itertools.chain(*table)))
        self._check_copies(layout, table, summed.pop() if len(summed) == 1 else None)
        return tuple(table)

    def _check_copies(self, layout: Layout, table: list[Chunks], summed: int | None) -> None:
        """Of tensors that a pipeline has several times. summed: the one whose gradients Megatron
        sums over the first stage and the last."""
        stages: dict[int, list[int]] = {}
        for stage, chunks in enumerate(table):
            for index in itertools.chain(*chunks):
                stages.setdefault(index, []).append(stage)
        tensors = [*self.frame.tensors.items()]
        for index, held_by in stages.items():
            name, whole = tensors[index]
            if len({*held_by}) < len(held_by):
                raise PlanError(f"{name}: several chunks of one stage hold it: stages {held_by}")
            ends = index == summed and held_by == [0, layout.pp - 1]
            if whole.role == "trained" and len(held_by) > 1 and not ends:
                raise PlanError(
                    f"{name} is trained on stages {held_by}, and Megatron does not sum its "
                    "gradients over them: only those of word embeddings on the first and the last"
                )

    def _homes(self, layout: Layout) -> tuple[int | None, ...]:
        """For each tensor, the ep rank that holds it; None where all do."""
        ranks: dict[int, list[int]] = {}
        for rank in range(layout.ep):
            held = self._indices(self._shards(layout, Coordinate(0, 0, rank)))
            for index in itertools.chain(*held):
                ranks.setdefault(index, []).append(rank)
        self._check_all_held(layout, ranks)
        for index, held_by in ranks.items():
            if len(held_by) not in (1, layout.ep):
                name = [*self.frame.tensors][index]
                raise PlanError(f"{name} is held by ep ranks {held_by} of {layout.ep}")
        return tuple(ranks[index][0] if len(ranks[index]) == 1 else None for index in sorted(ranks))

    def _indices(self, chunks: list[Shards]) -> Chunks:
        return tuple(
            tuple(self._numbers[whole_of(name, shard.parts)] for name, shard in chunk.items())
            for chunk in chunks
        )

    def _check_all_held(self, layout: Layout, held: Iterable[int]) -> None:
        missing = {*self._numbers.values()}.difference(held)
        if missing:
            names = ", ".join(name for name, number in self._numbers.items() if number in missing)
            raise PlanError(f"in {layout} no worker holds {names}")

    def _check_last_seat(self, spec: ModelSpec, layout: Layout) -> None:
        at = layout.coordinate(layout.workers - 1)
        for problem in differences(spec, layout, at, self._shards(layout, at)):
            raise PlanError(f"{layout}: {problem}")

    def _shards(self, layout: Layout, at: Coordinate) -> list[Shards]:
        with self._at(layout, at) as (modules, groups):
            return chunk_shards(modules, groups, self.frame, layout)

    def _at(
        self, layout: Layout, at: Coordinate
    ) -> contextlib.AbstractContextManager[tuple[list[Any], Any]]:
        return self._seat(RankMap(layout, tuple(range(layout.workers))), layout.rank(at))

    @contextlib.contextmanager
    def _seat(
        self, rank_map: RankMap, worker: int, build: Build | None = None
    ) -> Iterator[tuple[list[Any], Any]]:
        """The chunks of one seat, on the meta device, and its stand-in groups."""
        if torch.distributed.get_rank() != worker:  # of which none has a world in this process
            install_sentinel(worker)
        at = rank_map.coordinate_of(worker)
        assert at is not None
        book = GroupBook(next(_generations), worker, self._device)
        try:
            groups = megatron.group_collection(rank_map, at, book)
            with thread.rehearsal(), thread.groups_in_use(groups):
                with draws.OnMeta(), _values_missed():
                    modules = (build or build_chunks)(self._recipe, rank_map.layout, at, groups)
                for module in modules:
                    megatron.in_low_precision(module)
                yield modules, groups
        finally:
            book.close()


@contextlib.contextmanager
def _values_missed() -> Iterator[None]:
    """Says what to do where the model reads values as it is built. Raises PlanError."""
    try:
        yield
    except (RuntimeError, TypeError) as error:
        if not re.search(r"\bmeta\b", str(error)):
            raise
        raise PlanError(
            f"{error}{place_in_users_code(error)}: as the spec is derived, build runs on the meta "
            "device, where tensors have shapes, and no values; compute what it reads with numpy, "
            "or with torch.linspace, arange or logspace"
        ) from error


def build_chunks(recipe: Recipe, layout: Layout, at: Coordinate, groups: Any) -> list[Any]:
    """The modules of a seat as the recipe builds them, one for each chunk. Not collective.

    Raises PlanError for what is no MegatronModule, and for options with which another layout would
    compute something else.
    """
    chunks = []
    for number in range(layout.vpp):
        with draws.NoDraws() as mode:
            context = BuildContext(layout, at, groups, number)
            module = recipe.build(context)
        refuse_other_kinds(module)
        refuse_options(module, layout)
        if not context.is_first_stage:
            dropout.refuse_unnumbered(module)
        if mode.undrawn:
            refuse_undrawn(module)
        chunks.append(module)
    return chunks


def chunk_shards(modules: Iterable[Any], groups: Any, frame: Any, layout: Layout) -> list[Shards]:
    """What the chunks of a seat hold. Raises PlanError as `shards_of` does."""
    found = []
    for module in modules:
        refuse_dtypes(module)
        shards = shards_of(module, groups, frame)
        if layout.sequence_parallel:
            refuse_unmarked(module, shards, frame)
        if frame.decoupled is not None:
            refuse_other_rates(module, shards, frame.decoupled)
        found.append(shards)
    return found


def _decoupled(module: Any) -> frozenset[str]:
    """The names of parameters with a learning rate of their own. Raises PlanError for none."""
    named = module.named_parameters()
    names = frozenset(name for name, each in named if megatron.is_decoupled(each))
    if not names:
        raise PlanError(
            "optimizer.decoupled_lr: no parameter of the model would have it; set the attribute "
            "is_embedding_or_output_parameter of those that are to"
        )
    return names


def _summed(module: Any, held: tuple[int, ...]) -> int | None:
    """Which of the tensors that a chunk holds, in its order, Megatron sums over stages."""
    weight = megatron.summed_over_stages(module)
    for index, tensor in zip(held, state_tensors(module).values(), strict=True):
        if tensor is weight:
            return index
    return None


def _axes_alone(layout: Layout) -> list[Layout]:
    """The layouts that have one of a layout's axes each, of those that split the model."""
    found = []
    if layout.tp > 1:
        found.append(Layout(layout.tp, 1, 1, sequence_parallel=layout.sequence_parallel))
    if layout.pp > 1:
        found.append(Layout(1, layout.pp, 1, vpp=layout.vpp))
    if layout.ep > 1:
        found.append(Layout(1, 1, layout.ep, ep=layout.ep))
    return found


@contextlib.contextmanager
def _refusal(refused: dict[str, str], layout: Layout) -> Iterator[None]:
    """Notes what the model's own code raises where it cannot be laid out so."""
    try:
        yield
    except MODELS_ERRORS as error:
        refused[str(layout)] = str(error) or told_of(error)


_derivations: dict[Recipe, Derivation] = {}


def derivation_of(recipe: Recipe, worker: int) -> Derivation:
    """Of a process's recipe. The whole model is built for it once: a worker boots as worker 0, and
    is another one in its first world, for which a handoff may wait."""
    if recipe not in _derivations:
        _derivations[recipe] = Derivation(recipe, worker)
    return _derivations[recipe].as_worker(worker)
