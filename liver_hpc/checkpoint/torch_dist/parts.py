"""A worker's part of a torch_dist checkpoint: what it writes, what it reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from liver_hpc.checkpoint.index import Part as WrittenPart
from liver_hpc.checkpoint.index import part_name, partial_path, written_part
from liver_hpc.checkpoint.torch_dist.contents import CONTENT, Contents, common_state, read_contents
from liver_hpc.checkpoint.torch_dist.files import (
    RankWriter,
    Reader,
    rank_lists,
    write_common,
    write_table,
)
from liver_hpc.checkpoint.torch_dist.places import Part, stored
from liver_hpc.checkpoint.torch_dist.reads import PREFIXES, Pieces, Source
from liver_hpc.checkpoint.written import written_boxes
from liver_hpc.errors import CheckpointError, LiverError, PlanError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.layout.tensors import MAIN, PARAMETER
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.world import thread
from liver_hpc.world.derive import Stored
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import World, derivation_of


def stored_by(world: World, content: Mapping[str, Any]) -> Stored:
    """How a checkpoint with this content metadata holds a world's model."""
    return derivation_of(world.recipe, world.worker).stored(content)


# ---- written


def write_part(
    state: WorldState, pieces: Pieces, partial: Path, objects: Mapping[str, Any], about: Any
) -> WrittenPart:
    """The file of the rank that `state` belongs to, which has `objects` beside its boxes.

    Raises OSError, and PlanError where the module does not say where all of a tensor lies.
    """
    layout, rank = state.layout, state.layout.rank(state.at)
    partial.mkdir(parents=True, exist_ok=True)
    with RankWriter(partial, rank, about) as file:
        for kind, index, box in written_boxes(state.model, layout, state.at):
            tensor, got = state.model.tensors[index], 0
            prefixes = PREFIXES[kind]
            if kind == PARAMETER and state.model.main_is_parameter and tensor.role == "trained":
                prefixes += PREFIXES[MAIN][:1]
            for found in stored(tensor, box, pieces[tensor.name]):
                keys = [prefix + found.piece.key for prefix in prefixes]
                view = seen(state.view(kind, index, found.box), found.part)
                file.add(keys, found.piece.shape, found.at, view)
                got += view.numel()
            if got != box.elements:
                raise PlanError(
                    f"sharded_state_dict places {got} of the {box.elements} elements of {box} of "
                    f"{tensor.name!r} in a checkpoint"
                )
        for name, value in objects.items():
            file.add_object(name, value)
    flush_to_disk(partial)
    return written_part(partial / part_name(rank, "torch_dist"))


def write(world: World, scalars: ScalarState, directory: Path) -> WrittenPart:
    """This worker's file of a checkpoint, and, by rank 0 of the world, what makes all of them one.

    Collective over the world. Raises OSError, and CheckpointError where another worker could not
    write its part.
    """
    partial, rank = partial_path(directory, scalars.step), world.rank_map.layout.rank(world.at)
    written: WrittenPart | None = None
    problem: OSError | LiverError | None = None
    try:
        how, about = stored_by(world, CONTENT), world.optimizer_groups()
        objects = {name: _here(value) for name, value in how.objects.items()} if rank == 0 else {}
        written = write_part(world.state, how.tensors, partial, objects, about)
    except (OSError, LiverError) as error:
        problem = error
    failed = _count_of_failed(world, problem is not None)
    if problem is not None:
        raise problem
    if failed:
        raise CheckpointError(f"{failed} other workers could not write their parts")
    assert written is not None
    if rank == 0:
        lists = list(rank_lists(partial, world.rank_map.layout.workers))
        groups = [_with_tuples(group) for one in lists for group in one.about]
        with thread.groups_in_use(world.groups):
            extras = world.recipe.checkpoint_extras(scalars.step)
        config, layout = world.recipe.config, world.rank_map.layout
        write_table(partial, lists)
        write_common(partial, common_state(config, layout, scalars, groups, extras))
    return written


def _count_of_failed(world: World, failed: bool) -> int:
    """Of the world's workers, all of which are here then. Collective."""
    count = torch.tensor([float(failed)], device=world.device.torch_device)
    dist.all_reduce(count, group=world.groups.intra_dist_opt)
    return int(count.item())


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
    pieces = stored_by(world, contents.known_content).tensors
    read_tensors(world.state, contents, pieces)
    return contents.scalars(world.scalar_state(0), world.recipe.config.train.global_batch)


def read_tensors(state: WorldState, contents: Contents, pieces: Pieces) -> None:
    """All boxes of a state; raises CheckpointError."""
    plan = Source(contents, state.model, pieces).reads(state.layout, state.at)
    for zero in plan.zeros:
        seen(state.view(zero.kind, zero.tensor_index, zero.box), zero.part).zero_()
    with Reader(contents.path) as reader:
        for place, group in groupby(plan.reads, key=lambda read: read.place):
            data = reader.read(place)
            for one in group:
                view = seen(state.view(one.kind, one.tensor_index, one.box), one.part)
                try:
                    view.copy_(seen(data.flatten(), one.source).reshape(view.shape))
                except (AttributeError, RuntimeError) as error:
                    file = contents.path / place.file
                    raise CheckpointError(f"{file} is not what .metadata says: {error}") from error


def seen(memory: torch.Tensor, part: Part) -> torch.Tensor:
    """A part of some memory, a matrix or flat: of as many dimensions as the part has."""
    if part.start or memory.dim() == 1:
        memory = memory[part.start : part.start + math.prod(part.lengths)]
    view = memory.view(part.lengths)
    for dim, (start, length) in enumerate(part.within):
        view = view.narrow(dim, start, length)
    return view
