"""A worker's part of a torch_dist checkpoint: what it writes, what it reads."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch

from liver_hpc.checkpoint.copied import BoxView, written_boxes
from liver_hpc.checkpoint.index import Part as WrittenPart
from liver_hpc.checkpoint.index import part_name, part_word, written_part
from liver_hpc.checkpoint.torch_dist.contents import (
    CONTENT,
    Held,
    common_state,
    read_contents,
    read_held,
)
from liver_hpc.checkpoint.torch_dist.files import (
    RankWriter,
    Reader,
    rank_lists,
    write_common,
    write_table,
)
from liver_hpc.checkpoint.torch_dist.places import Part, first_of_each, stored
from liver_hpc.checkpoint.torch_dist.reads import PREFIXES, Pieces, Source
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import CheckpointError, PlanError, StoreAway
from liver_hpc.host.files import flush_to_disk, make_directory
from liver_hpc.layout.tensors import MAIN, PARAMETER
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.recipes.base import Recipe
from liver_hpc.world import thread
from liver_hpc.world.derive import Stored, derivation_of
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import World

_PAUSE_S = 0.25

T = TypeVar("T")


def stored_by(world: World, content: Mapping[str, Any]) -> Stored:
    """How a checkpoint with this content metadata holds a world's model."""
    return derivation_of(world.recipe, world.worker).stored(content)


# ---- written


def write_part(
    state: BoxView,
    pieces: Pieces,
    partial: Path,
    objects: Mapping[str, Any],
    about: Any,
    *,
    check: Callable[[], None] = lambda: None,
) -> WrittenPart:
    """The file of the rank that `state` belongs to, which has `objects` beside its boxes. check: is
    called before each of those; it may raise.

    Raises OSError, and PlanError where the module does not say where all of a tensor lies.
    """
    layout, rank = state.layout, state.layout.rank(state.at)
    make_directory(partial.parent.parent, 0o700)  # the run's, which somebody may have removed
    for path in (partial.parent, partial):
        path.mkdir(exist_ok=True)
    with RankWriter(partial, rank, about) as file:
        for kind, index, box in written_boxes(state.model, layout, state.at):
            check()
            tensor, got = state.model.tensors[index], 0
            prefixes = PREFIXES[kind]
            if kind == PARAMETER and state.model.main_is_parameter and tensor.role == "trained":
                prefixes += PREFIXES[MAIN][:1]
            counted = first_of_each(pieces[tensor.name])
            for found in stored(tensor, box, pieces[tensor.name]):
                keys = [prefix + found.piece.key for prefix in prefixes]
                view = seen(state.view(kind, index, found.box), found.part)
                file.add(keys, found.piece.shape, found.at, view)
                got += view.numel() if found.piece in counted else 0
            if got != box.elements:
                raise PlanError(
                    f"sharded_state_dict places {got} of the {box.elements} elements of {box} of "
                    f"{tensor.name!r} in a checkpoint"
                )
        for name, value in objects.items():
            file.add_object(name, value)
    flush_to_disk(partial)
    return written_part(partial / part_name(rank))


class PartWriter:
    """Writes one worker's file of a checkpoint and, as rank 0 of the world, once all ranks have
    theirs, what makes them one. Made at the boundary, it needs the world no more."""

    def __init__(self, world: World, scalars: ScalarState, partial: Path, peers: Peers) -> None:
        self._rank = world.rank_map.layout.rank(world.at)
        self._recipe, self._worker = world.recipe, world.worker
        self._config, self._layout = world.recipe.config, world.rank_map.layout
        self._scalars, self._partial, self._peers = scalars, partial, peers
        self._about = world.optimizer_groups()
        self._extras: Mapping[str, Any] = {}
        if self._rank == 0:
            with thread.groups_in_use(world.groups):
                self._extras = world.recipe.checkpoint_extras(scalars.step)

    def write(self, state: BoxView) -> WrittenPart:
        """Rank 0 waits for the others. Raises OSError, PlanError where the module does not say
        where all of a tensor lies, and LiverError where the wait takes too long or one of them
        could not write its part."""
        how = _written_by(self._recipe, self._worker)  # seconds for hundreds of experts, once
        of_all = how.objects if self._rank == 0 else {}
        objects = {name: _here(value) for name, value in of_all.items()}
        where, check = self._partial, self._peers.check
        written = write_part(state, how.tensors, where, objects, self._about, check=check)
        if self._rank != 0:
            self._peers.tell(self._rank, "")
            return written
        if problems := self._peers.problems(self._layout.workers):
            raise CheckpointError("; ".join(problems))
        lists = list(rank_lists(self._partial, self._layout.workers))
        groups = [_with_tuples(group) for one in lists for group in one.about]
        write_table(self._partial, lists)
        common = common_state(self._config, self._layout, self._scalars, groups, self._extras)
        write_common(self._partial, common)
        return written


class Peers:
    """How rank 0 learns what has become of the other ranks' files: by a key of each in a store. It
    waits for up to `limit_s` longer than it has written itself. key_of: a rank's. away_s: how long
    all wait for a coordinator where there is none; the next one knows what was told before."""

    def __init__(
        self,
        open_store: Callable[[], Any],
        key_of: Callable[[int], str],
        limit_s: float,
        away_s: float = 0.0,
    ) -> None:
        self._open_store = open_store
        self._key_of = key_of
        self._limit_s = limit_s
        self._away_s = away_s
        self._store: Any = None
        self._closed = threading.Event()

    def check(self) -> None:
        """Raises CheckpointError once a peer is lost: nobody wants a part any more."""
        if self._closed.is_set():
            raise CheckpointError("a peer was lost")

    def close(self) -> None:
        """Ends what is waited for, from any thread: a peer is lost."""
        self._closed.set()
        if (store := self._store) is not None:
            store.close()

    def _ask(self, act: Callable[[Any], T]) -> T:
        until = Deadline.after(SystemClock(), self._away_s, "a coordinator")
        while True:
            try:
                with self._asked() as store:
                    return act(store)
            except StoreAway:
                if until.expired():
                    raise
                self._closed.wait(_PAUSE_S)

    @contextmanager
    def _asked(self) -> Iterator[Any]:
        self._store = store = self._open_store()
        try:
            self.check()
            yield store
        finally:
            self._store = None
            store.close()

    def tell(self, rank: int, problem: str) -> None:
        """problem: why this rank's file will not come; empty once it is on the disk."""
        self._ask(lambda store: store.set(self._key_of(rank), part_word(problem)))

    def problems(self, ranks: int) -> list[str]:
        """Why files of ranks will not come; returns once all have told."""
        keys = [self._key_of(rank) for rank in range(1, ranks)]
        if not keys:
            return []

        def hear(store: Any) -> list[bytes]:
            store.wait(keys, timedelta(seconds=self._limit_s))
            values: list[bytes] = store.multi_get(keys)
            store.delete_keys(keys)
            return values

        told = [value.decode().rstrip() for value in self._ask(hear)]
        return [f"rank {rank}: {problem}" for rank, problem in enumerate(told, 1) if problem]


@cache
def _written_by(recipe: Recipe, worker: int) -> Stored:
    """How a process's recipe has its model written."""
    return derivation_of(recipe, worker).stored(CONTENT)


def _here(value: Any) -> Any:
    """Extra state as the module has it, of which nothing but what is empty can be trained."""
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.empty(value.shape, dtype=value.dtype)
    return value


def _with_tuples(group: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter group as it was before it was JSON."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in group.items()}


# ---- read


def read(world: World, path: Path) -> ScalarState:
    """Fills a world's tensors from the checkpoint in `path`; the state that is in none.

    Not collective. Raises CheckpointError.
    """
    contents = read_contents(path)
    contents.check_schedule(world.recipe.loaded_schedule())
    pieces = stored_by(world, contents.known_content).tensors
    read_tensors(world.state, contents, pieces)
    return contents.scalars(world.scalar_state(0), world.recipe.config.train)


def read_weights(world: World, path: Path) -> ScalarState:
    """The same with the weights alone, as by Megatron's --finetune: the optimizer begins with them,
    at step 0.

    Not collective. Raises CheckpointError.
    """
    held = read_held(path)
    pieces = stored_by(world, held.known_content).tensors
    read_tensors(world.state, held, pieces, weights=True)
    world.state.begin_optimizer()
    return world.scalar_state(0).model_copy(update={"optimizer_step": 0})


def read_tensors(state: WorldState, held: Held, pieces: Pieces, weights: bool = False) -> None:
    """All boxes of a state, or of its weights; raises CheckpointError."""
    reads = Source(held, state.model, pieces, weights).reads(state.layout, state.at)
    with Reader(held.path) as reader:
        for place, group in groupby(reads, key=lambda read: read.place):
            data: Any = None if place is None else reader.read(place)
            for one in group:
                view = seen(state.view(one.kind, one.tensor_index, one.box), one.part)
                if place is None:
                    view.zero_()
                    continue
                tensor = state.model.tensors[one.tensor_index]
                cast = weights and view.is_floating_point() and data.is_floating_point()
                if tensor.role == "frozen" and view.dtype != data.dtype and not cast:
                    raise CheckpointError(
                        f"{held.path}: {tensor.name!r}, which is frozen, is {data.dtype} in it, "
                        f"{view.dtype} in the run"
                    )
                try:
                    view.copy_(seen(data.flatten(), one.source).reshape(view.shape))
                except (AttributeError, RuntimeError) as error:
                    file = held.path / place.file
                    raise CheckpointError(f"{file} is not what .metadata says: {error}") from error


def seen(memory: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of some memory, a matrix or flat: of as many dimensions as the part has."""
    if part.start or memory.dim() == 1:
        memory = memory[part.start : part.start + math.prod(part.lengths)]
    view = memory.view(part.lengths)
    for dim, (start, length) in enumerate(part.within):
        view = view.narrow(dim, start, length)
    return view
