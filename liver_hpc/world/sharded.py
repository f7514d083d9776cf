"""Which part of the model each tensor of a module is, as the module itself says.

Megatron's modules tell in `sharded_state_dict` which box of which global tensor each of their
parameters and persistent buffers holds. Its keys are those of checkpoints, and differ from names;
the names and shapes of the module in which nothing is split are the ones that people see, so every
other module's boxes are given in terms of those.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Role
from liver_hpc.world import megatron

Range = tuple[int, int]
"""Start and length along one dimension, in elements."""
NBox = tuple[Range, ...]


class Part(NamedTuple):
    """A box of one tensor of a module, and the box of the whole model's tensor that it is."""

    local: NBox
    name: str
    whole: NBox


class Shard(NamedTuple):
    """A tensor of a module: what training does with it, and what it is of the whole model."""

    role: Role
    element_bytes: int
    parts: tuple[Part, ...]


Shards = dict[str, Shard]
"""Of a module, by name: its parameters in order, then its persistent buffers."""


class Sharded(NamedTuple):
    """A box of a tensor, and where it lies under a checkpoint's key. The last dimensions of
    `at` are the tensor's own; others may come before (a layer's number, say). padded: the whole may
    be larger or smaller in a checkpoint, whose padding is another."""

    local: NBox
    key: str
    shape: tuple[int, ...]
    at: NBox
    padded: bool = False

    @property
    def place(self) -> tuple[int, ...]:
        """Where it lies along the dimensions that are not its own, each of which has length 1."""
        return tuple(start for start, _ in self.at[: len(self.at) - len(self.local)])


class Whole(NamedTuple):
    """A tensor of the whole model."""

    shape: tuple[int, ...]
    role: Role
    element_bytes: int


@dataclass(frozen=True)
class Frame:
    """The module in which nothing is split: its tensors by name in order, and what lies under each
    key, place by place. decoupled: the names of those that have `optimizer.decoupled_lr`; None
    where there is none."""

    tensors: dict[str, Whole]
    keys: dict[str, dict[tuple[int, ...], list[tuple[str, Sharded]]]]
    decoupled: frozenset[str] | None = None


def frame_of(module: torch.nn.Module, groups: Any) -> Frame:
    """The frame that a whole module gives. Raises PlanError as `shards_of` does."""
    keys: dict[str, dict[tuple[int, ...], list[tuple[str, Sharded]]]] = {}
    for name, pieces in sharded(module, groups).items():
        for piece in pieces:
            keys.setdefault(piece.key, {}).setdefault(piece.place, []).append((name, piece))
    tensors = {
        name: Whole(tuple(tensor.shape), _role(tensor), tensor.element_size())
        for name, tensor in state_tensors(module).items()
    }
    return Frame(tensors, keys)


def state_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's parameters in order, then its persistent buffers.

    Raises PlanError for state that is neither (extra state: FP8 scales, say), which no handoff
    moves.
    """
    found: dict[str, torch.Tensor] = dict(module.named_parameters())
    kept = module.state_dict(keep_vars=True)
    buffers = {name: b for name, b in module.named_buffers() if kept.get(name) is b}
    known = {id(tensor) for tensor in (*found.values(), *buffers.values())}
    for name, value in kept.items():
        empty = value is None or (isinstance(value, torch.Tensor) and not value.numel())
        if not empty and id(value) not in known:
            raise PlanError(
                f"{name} is not moved by a handoff, as it is neither a parameter nor a buffer; "
                "keep it in a persistent buffer, or train without it"
            )
    return found | {name: buffer for name, buffer in buffers.items() if buffer.numel()}


def shards_of(module: torch.nn.Module, groups: Any, frame: Frame) -> Shards:
    """What each tensor of a module is of the whole model.

    groups: those that the module was built with. Does not communicate. Raises PlanError where the
    module does not say it, or says what cannot be: a tensor that it leaves out, parts that do
    not fill a tensor, a tensor that the whole model does not have.
    """
    tensors = state_tensors(module)
    pieces = sharded(module, groups)
    found: Shards = {}
    for name, tensor in tensors.items():
        parts = tuple(dict.fromkeys(part for p in pieces[name] for part in _placed(name, p, frame)))
        held = sum(math.prod(length for _, length in part.local) for part in parts)
        if held != tensor.numel():
            raise PlanError(
                f"{name}: sharded_state_dict places {held} of its {tensor.numel()} "
                f"elements in the model at tp=pp=1"
            )
        found[name] = Shard(_role(tensor), tensor.element_size(), parts)
    return found


def _role(tensor: torch.Tensor) -> Role:
    if not isinstance(tensor, torch.nn.Parameter):
        return "buffer"
    return "trained" if tensor.requires_grad else "frozen"


def whole_of(name: str, parts: tuple[Part, ...]) -> str:
    """The one tensor of the whole model that a tensor is a share of."""
    wholes = {part.name for part in parts}
    if len(wholes) != 1:
        raise PlanError(f"{name} holds parts of several tensors: {sorted(wholes)}")
    return wholes.pop()


def _placed(name: str, piece: Sharded, frame: Frame) -> Iterator[Part]:
    if piece.key not in frame.keys:
        raise PlanError(f"{name}: {piece.key!r}, by its sharded_state_dict, is not in the model")
    for whole_name, whole in frame.keys[piece.key].get(piece.place, ()):
        if whole.shape != piece.shape:
            raise PlanError(
                f"{name}: its sharded_state_dict says that the whole is {piece.shape}, at tp=pp=1 "
                f"it is {whole.shape}: the module does not say how it is split"
            )
        common = intersection(piece.at, whole.at)
        if common is not None:
            yield Part(_inside(piece, common), whole_name, _inside(whole, common))


def _inside(piece: Sharded, box: NBox) -> NBox:
    """A box of the global tensor, inside the piece, in coordinates of the piece's parameter."""
    before = len(piece.at) - len(piece.local)
    return tuple(
        (local + start - begin, length)
        for (local, _), (begin, _), (start, length) in zip(
            piece.local, piece.at[before:], box[before:], strict=True
        )
    )


def intersection(one: NBox, other: NBox) -> NBox | None:
    """The common box; None when there is none."""
    common = []
    for (start, length), (begin, size) in zip(one, other, strict=True):
        low, high = max(start, begin), min(start + length, begin + size)
        if low >= high:
            return None
        common.append((low, high - low))
    return tuple(common)


def sharded(
    module: Any, groups: Any, metadata: Mapping[str, Any] | None = None
) -> dict[str, list[Sharded]]:
    """What `sharded_state_dict` says of each tensor, by name.

    metadata: a checkpoint's, which says what lies under which key there. Raises PlanError for a
    tensor that it leaves out.
    """
    names = {id(tensor): name for name, tensor in state_tensors(module).items()}
    found: dict[str, list[Sharded]] = {name: [] for name in names.values()}
    for item in _leaves(_sharded_state(module, groups, metadata)):
        data = getattr(item, "data", None)
        name = names.get(id(data))
        if name is None:
            continue  # extra state, which `state_tensors` judges
        assert isinstance(data, torch.Tensor)
        if isinstance(item, ShardedTensorFactory):
            built = item.build_fn(item.key, data, item.replica_id, item.flattened_range)
            found[name] += [
                _piece(part, _box_of_view(name, part.data, data)) for part in _leaves(built)
            ]
        elif isinstance(item, ShardedTensor):
            found[name].append(_piece(item, tuple((0, size) for size in data.shape)))
    left_out = [name for name, pieces in found.items() if not pieces]
    if left_out:
        raise PlanError(f"sharded_state_dict of the model leaves out {', '.join(left_out)}")
    return found


def sharded_objects(module: Any, groups: Any, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What `sharded_state_dict` has beside tensors (extra state), by the names of a checkpoint."""
    return {
        item.unique_key: item.data
        for item in _leaves(_sharded_state(module, groups, metadata))
        if isinstance(item, ShardedObject)
    }


def _sharded_state(module: Any, groups: Any, metadata: Mapping[str, Any] | None) -> Any:
    return module.sharded_state_dict(metadata=megatron.sharding_metadata(groups, metadata))


def _piece(item: ShardedTensor, local: NBox) -> Sharded:
    lengths = (*itertools.repeat(1, item.prepend_axis_num), *item.local_shape)
    at = tuple(zip(item.global_offset, lengths, strict=True))
    return Sharded(local, item.key, tuple(item.global_shape), at, item.allow_shape_mismatch)


def _box_of_view(name: str, view: torch.Tensor, whole: torch.Tensor) -> NBox:
    """The box of a contiguous tensor that a view of it shows."""
    offset, box = view.storage_offset() - whole.storage_offset(), []
    stored = [one.untyped_storage()._cdata for one in (view, whole)]
    if view.stride() != whole.stride() or stored[0] != stored[1]:
        raise PlanError(f"{name}: sharded_state_dict splits it into parts that are no views of it")
    for stride, length in zip(whole.stride(), view.shape, strict=True):
        box.append((offset // stride, length))
        offset %= stride
    return tuple(box)


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list | tuple):
        for each in tree:
            yield from _leaves(each)
    else:
        yield tree
