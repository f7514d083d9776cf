"""The logical state of one world on one worker: tensors seen through global boxes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ownership import local_shape, optimizer_interval, owned_boxes, slabs
from liver_hpc.layout.tensors import MAIN, PARAMETER, Box, ModelSpec, Role, TensorSpec
from liver_hpc.protocol.messages import ClassDigest
from liver_hpc.transport.digest import MODULUS, add_digest, signed

Initializer = Callable[[TensorSpec, torch.Generator], torch.Tensor]


@dataclass(frozen=True)
class HeldTensor:
    """One tensor of this worker's stage: a parameter or a persistent buffer.

    value: the local share, of any shape.
    interval: the flat interval of it whose optimizer state lives here; (0, 0) for none.
    optimizer: kind -> 1-D tensor of `interval`'s length; "main" in every precision.
    """

    value: torch.Tensor
    interval: tuple[int, int] = (0, 0)
    optimizer: dict[str, torch.Tensor] = field(default_factory=dict)


class WorldState:
    """A view of every box that this worker holds. Never communicates."""

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        at: Coordinate,
        held: dict[int, HeldTensor],
    ) -> None:
        self.model = model
        self.layout = layout
        self.at = at
        self._held = held
        self._check()

    def _check(self) -> None:
        """Raises PlanError where the real tensors are not what the layout says they are."""
        for index in self.model.held_tensors(self.layout, self.at):
            tensor = self.model.tensors[index]
            held = self._held.get(index)
            if held is None:
                raise PlanError(f"{self._where()}: the model has no tensor {tensor.name!r}")
            wanted = list(tensor.shape)
            if tensor.tp_dim is not None:
                wanted[tensor.tp_dim] //= self.layout.tp
            shape = list(held.value.shape)
            if shape != wanted:
                raise PlanError(
                    f"{self._where()}: {tensor.name!r} is {shape}, the layout wants {wanted}"
                )
            if not held.value.is_contiguous():
                raise PlanError(f"{self._where()}: {tensor.name!r} is not contiguous in memory")
            interval = optimizer_interval(self.model, self.layout, self.at, index)
            if held.interval != interval:
                raise PlanError(
                    f"{self._where()}: optimizer state of {tensor.name!r} covers "
                    f"{held.interval}, the layout wants {interval}"
                )

    def renew(self, tensor_index: int, value: torch.Tensor) -> None:
        """Takes over the memory that a tensor's value lies in now.

        Raises PlanError where the value is of another shape or dtype than before.
        """
        before = self._held[tensor_index].value
        if (value.shape, value.dtype) != (before.shape, before.dtype):
            raise PlanError(
                f"{self._where()}: {self.model.tensors[tensor_index].name!r} is "
                f"{list(value.shape)} of {value.dtype} now, was {list(before.shape)} of "
                f"{before.dtype}"
            )
        self._held[tensor_index] = replace(self._held[tensor_index], value=value.contiguous())

    def standing(self) -> WorldState:
        """The same state with copies of persistent buffers: those may change with the next forward,
        what else there is with the next update."""
        tensors = self.model.tensors
        held = {
            index: replace(each, value=each.value.clone())
            if tensors[index].role == "buffer"
            else each
            for index, each in self._held.items()
        }
        return WorldState(self.model, self.layout, self.at, held)

    def _where(self) -> str:
        return f"{self.layout} at tp {self.at.tp} pp {self.at.pp} replica {self.at.replica}"

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """The memory of one global box, [box rows, box cols]; writing to it changes the world.

        Raises PlanError when this worker does not hold the whole box.
        """
        tensor = self.model.tensors[tensor_index]
        held = self._held.get(tensor_index)
        shares = slabs(tensor, self.layout.tp, self.at.tp)
        local = next(
            (slab.to_local(box) for slab in shares if slab.box.intersect(box) == box), None
        )
        if held is not None and local is not None:
            _, cols = local_shape(tensor, self.layout.tp)
            first = local.row0 * cols + local.col0
            last = (local.row1 - 1) * cols + local.col1
            start, end = (0, held.value.numel()) if kind == PARAMETER else held.interval
            if start <= first and last <= end:
                memory = held.value if kind == PARAMETER else held.optimizer[kind]
                offset = memory.storage_offset() + first - start
                return torch.as_strided(memory, box.shape, (cols, 1), offset)
        raise PlanError(f"{self._where()}: does not hold {kind} {box} of {tensor.name!r}")

    def dtype_of(self, tensor_index: int) -> torch.dtype | None:
        """Of a tensor's value; None where this worker does not hold it."""
        held = self._held.get(tensor_index)
        return None if held is None else held.value.dtype

    def memory(self, kind: str) -> Iterator[torch.Tensor]:
        """The tensors of one kind of optimizer state."""
        return (held.optimizer[kind] for held in self._held.values() if kind in held.optimizer)

    def boxes(self, kind: str, role: Role | None = None) -> Iterator[tuple[int, Box]]:
        """Yields every (tensor index, box) of one kind that this worker owns; of tensors of one
        role where it is given."""
        for index in self.model.held_tensors(self.layout, self.at):
            if role not in (None, self.model.tensors[index].role):
                continue
            for box in owned_boxes(self.model, self.layout, self.at, kind, index):
                yield index, box

    def digests(
        self,
        kinds: Iterable[str],
        *,
        role: Role | None = None,
        known: Mapping[tuple[str, int, Box], int] = MappingProxyType({}),
    ) -> tuple[ClassDigest, ...]:
        """Digests of what this worker owns, one for each kind and replication class
        (protocol/votes.py). role: of the tensors; None: of any. known: those of some boxes, by kind
        and tensor index. Waits for the device."""
        totals: dict[tuple[str, bool, bool, bool], torch.Tensor] = {}
        for kind in kinds:
            for index, box in self.boxes(kind, role):
                tensor = self.model.tensors[index]
                view = self.view(kind, index, box)
                key = (kind, tensor.tp_dim is None, tensor.tied, tensor.expert)
                if key not in totals:
                    totals[key] = torch.zeros((), dtype=torch.int64, device=view.device)
                if (value := known.get((kind, index, box))) is not None:
                    totals[key].add_(signed(value))
                else:
                    add_digest(totals[key], view, tensor, box)
        return tuple(
            ClassDigest(
                kind=kind,
                tp_replicated=copied,
                multi_stage=multi,
                expert=expert,
                value=f"{int(total) % MODULUS:016x}",
            )
            for (kind, copied, multi, expert), total in sorted(
                totals.items(), key=lambda each: each[0]
            )
        )

    def initialize(self, initial: Initializer, seed: int) -> None:
        """Fills parameters and the main copy with their first values, the moments with zeros;
        buffers stay as they were built.

        A tensor's values are a function of (seed, name), so they are the same for every layout.
        """
        filled = [kind for kind in self.model.kinds if kind in (PARAMETER, MAIN)]
        for index in self.model.held_tensors(self.layout, self.at):
            tensor = self.model.tensors[index]
            if tensor.role == "buffer":
                continue
            hashed = hashlib.sha256(f"{seed}/{tensor.name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(hashed, "little") >> 1)
            whole = initial(tensor, generator).reshape(tensor.rows, tensor.cols)
            for kind in filled:
                for box in owned_boxes(self.model, self.layout, self.at, kind, index):
                    part = whole[box.row0 : box.row1, box.col0 : box.col1]
                    self.view(kind, index, box).copy_(part)
        self._zero_moments()

    def begin_optimizer(self) -> None:
        """Makes the optimizer's state that of a first step from the parameters as they are."""
        if MAIN in self.model.kinds:
            for index, box in self.boxes(MAIN):
                self.view(MAIN, index, box).copy_(self.view(PARAMETER, index, box))
        self._zero_moments()

    def _zero_moments(self) -> None:
        for held in self._held.values():
            for kind, memory in held.optimizer.items():
                if kind != MAIN:
                    memory.zero_()

    def moved_to_host(self) -> WorldState:
        """The same state in host memory; this one's is freed. Waits for the device."""

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to("cpu", copy=True)

        held = {
            index: replace(
                each,
                value=copied(each.value),
                optimizer={
                    kind: copied(memory)
                    for kind, memory in each.optimizer.items()
                    if kind in self.model.kinds  # else it is the parameter's
                },
            )
            for index, each in self._held.items()
        }
        self.release()
        return WorldState(self.model, self.layout, self.at, held)

    def release(self, spared: Set[int] = frozenset(), kinds: Collection[str] | None = None) -> None:
        """Frees the memory at once, even while somebody still refers to the tensors. spared: the
        addresses of storages that live on. kinds: of state; None: all, and nothing is held any
        more."""
        for held in self._held.values():
            for kind, memory in {PARAMETER: held.value, **held.optimizer}.items():
                storage = memory.untyped_storage()
                if (kinds is None or kind in kinds) and storage.data_ptr() not in spared:
                    storage.resize_(0)
        if kinds is None:
            self._held.clear()
