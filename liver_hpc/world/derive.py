"""Derives the spec of a recipe's model: from what the model itself says, without its memory.

The model is built on the meta device under stand-in groups, at the seats that the run's layouts
have; `sharded_state_dict` tells what each holds (sharded.py). How tensor parallelism splits a
tensor is found at pp=1, who holds what of a pipeline at tp=1; a seat of every pair of both shows
that they can be had at once. Every worker compares its real module with the result.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from liver_hpc.errors import LiverError, PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import ModelSpec, TensorSpec, axes
from liver_hpc.recipes.base import BuildContext, Recipe
from liver_hpc.world import megatron
from liver_hpc.world.device import Device
from liver_hpc.world.groups import GroupBook, install_sentinel
from liver_hpc.world.sharded import Part, frame_of, parts_of, whole_of

MODELS_ERRORS = (
    LiverError,
    ArithmeticError,
    AssertionError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What a model's own code raises where it cannot be laid out so."""

_generations = itertools.count(-2, -1)
"""Of groups that no world has: their names are in use once a process."""

Splits = dict[str, tuple[int, tuple[int, ...]]]
"""By tensor: the dimension that is split, and the sizes of its blocks along it."""


class Derivation:
    """Builds one recipe's model at seats of layouts, and tells what they hold. Not collective.

    worker: the rank of this process's sentinel group. Raises PlanError where the model cannot be
    built at tp=pp=1, or does not say what it holds there.
    """

    def __init__(self, recipe: Recipe, worker: int = 0) -> None:
        self._recipe = recipe
        self._device = Device(torch.device("cpu"))
        whole = RankMap(Layout(1, 1, 1), (worker,))
        with self._seat(whole, worker) as (module, groups):
            self.frame = frame_of(module, groups)
            self._parameter_bytes = 2 if module.config.bf16 else 4
        self._numbers = {name: number for number, name in enumerate(self.frame.shapes)}

    def spec(self, layouts: Iterable[Layout]) -> ModelSpec:
        """The model's spec for these layouts; those that the model cannot take are in `refused`.

        For a process without a world: it replaces the sentinel group.
        """
        pairs = sorted({(layout.tp, layout.pp) for layout in layouts})
        refused: dict[str, str] = {}
        splits: Splits = {}
        stages: dict[int, tuple[tuple[int, ...], ...]] = {1: (tuple(self._numbers.values()),)}
        for tp, pp in sorted({(tp, 1) for tp, _ in pairs} | {(1, pp) for _, pp in pairs}):
            with _refusal(refused, tp, pp):
                if tp > 1:
                    splits = self._splits(tp, splits)
                elif pp > 1:
                    stages[pp] = self._stages(pp)
        for tp, pp in pairs:
            why = refused.get(axes(tp, 1)) or refused.get(axes(1, pp))
            if why:
                refused[axes(tp, pp)] = why
            elif tp > 1 and pp > 1:
                with _refusal(refused, tp, pp):
                    self._parts(Layout(tp, pp, 1), Coordinate(tp - 1, pp - 1, 0))
        held = [collections.Counter(itertools.chain(*table)) for table in stages.values()]
        tensors = []
        for number, (name, shape) in enumerate(self.frame.shapes.items()):
            dim, blocks = splits.get(name, (None, ()))
            tied = any(counts[number] > 1 for counts in held)
            tensors.append(TensorSpec(name, shape, dim, blocks, tied))
        return ModelSpec(tuple(tensors), stages, self._parameter_bytes, refused)

    # ---- what seats hold

    def _splits(self, tp: int, known: Splits) -> Splits:
        """How `tp` ranks share tensors; the first rank and the last are asked."""
        layout = Layout(tp, 1, 1)
        first, last = (self._parts(layout, Coordinate(rank, 0, 0)) for rank in (0, tp - 1))
        found: Splits = {}
        for name, shape in self.frame.shapes.items():
            split = split_of(name, shape, tp, first[name])
            for rank, parts in ((0, first[name]), (tp - 1, last[name])):
                if not is_share(parts, shape, split, tp, rank):
                    raise PlanError(f"{name}: no even split over tp={tp}: rank {rank} has {parts}")
            if split is not None:
                found[name] = split
        if known and known != found:
            names = ", ".join(name for name, _ in known.items() ^ found.items())
            raise PlanError(f"at tp={tp} other tensors are split, or otherwise: {names}")
        return found

    def _stages(self, pp: int) -> tuple[tuple[int, ...], ...]:
        """The tensors of every stage, in the order of its module's parameters."""
        table = []
        for stage in range(pp):
            held = self._parts(Layout(1, pp, 1), Coordinate(0, stage, 0))
            table.append(tuple(self._numbers[whole_of(name, p)] for name, p in held.items()))
        missing = {*self._numbers.values()}.difference(*table)
        if missing:
            names = ", ".join(name for name, number in self._numbers.items() if number in missing)
            raise PlanError(f"at pp={pp} no stage holds {names}")
        return tuple(table)

    def _parts(self, layout: Layout, at: Coordinate) -> dict[str, tuple[Part, ...]]:
        rank = layout.rank(at)
        install_sentinel(rank)
        rank_map = RankMap(layout, tuple(range(layout.workers)))
        with self._seat(rank_map, rank) as (module, groups):
            return parts_of(module, groups, self.frame)

    @contextmanager
    def _seat(self, rank_map: RankMap, worker: int) -> Iterator[tuple[Any, Any]]:
        """The module at one seat, on the meta device, and its stand-in groups."""
        at = rank_map.coordinate_of(worker)
        assert at is not None
        book = GroupBook(next(_generations), worker, self._device)
        try:
            groups = megatron.group_collection(rank_map, at, book)
            context = BuildContext(rank_map.layout, at, groups, lambda _seed: None)
            with megatron.rehearsal(), megatron.groups_in_use(groups):
                with megatron.NoDraws(), megatron.OnMeta():
                    module = self._recipe.build(context)
                yield module, groups
        finally:
            book.close()


@contextmanager
def _refusal(refused: dict[str, str], tp: int, pp: int) -> Iterator[None]:
    """Notes what the model's own code raises where it cannot be laid out so."""
    try:
        yield
    except MODELS_ERRORS as error:
        refused[axes(tp, pp)] = str(error) or type(error).__name__


def split_of(
    name: str, shape: tuple[int, ...], tp: int, parts: tuple[Part, ...]
) -> tuple[int, tuple[int, ...]] | None:
    """How a tensor is split, from what the first rank holds of it: the dimension, and the sizes of
    the blocks along it, each of which is split on its own. None where the rank holds all of it."""
    dims = {
        dim
        for part in parts
        for dim, ((_, length), size) in enumerate(zip(part.whole, shape, strict=True))
        if length != size
    }
    if not dims:
        return None
    if len(dims) > 1:
        raise PlanError(f"{name} is split along dimensions {sorted(dims)}: {parts}")
    dim = dims.pop()
    blocks = tuple(part.whole[dim][1] * tp for part in sorted(parts))
    return dim, blocks


def is_share(
    parts: tuple[Part, ...],
    shape: tuple[int, ...],
    split: tuple[int, tuple[int, ...]] | None,
    tp: int,
    rank: int,
) -> bool:
    """Whether these parts are what a rank holds of a tensor that is split so."""
    if split is None:
        return all(part.local == part.whole for part in parts)
    dim, blocks = split
    ends = tuple(itertools.accumulate(blocks))
    ranges = [
        ((end - block) // tp, end - block + rank * (block // tp), block // tp)
        for block, end in zip(blocks, ends, strict=True)
    ]
    held = [(part.local[dim][0], part.whole[dim][0], part.whole[dim][1]) for part in sorted(parts)]
    others = [
        part.local[:dim] + part.local[dim + 1 :] == part.whole[:dim] + part.whole[dim + 1 :]
        for part in parts
    ]
    return held == ranges and ends[-1] == shape[dim] and all(others)
