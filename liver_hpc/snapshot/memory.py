"""A snapshot's memory on the host, and the state that is read from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.snapshots import precise, snapshot_boxes
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec
from liver_hpc.protocol.messages import HeldSnapshot, ScalarState
from liver_hpc.transport.digest import MODULUS, box_digest
from liver_hpc.world.host_memory import BOUND_BYTES, NewMemory, plain_memory
from liver_hpc.world.state import WorldState

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element: what is not computed with is copied as it lies."""


CHUNK_BYTES = 1 << 25
"""Of a snapshot's memory, but for the last chunk: one size, so that the snapshots of one layout get
those of another one. As large as an allocation must be for glibc to return it at once."""


_Piece = tuple[Box, torch.Tensor]
"""A box, or some rows of one: [box rows, box cols] of bits."""


def _placed(box: Box, element_bytes: int, sizes: list[int]) -> Iterator[tuple[Box, int, int]]:
    """The boxes of a box's pieces, each with as many rows as the last chunk has room for, and where
    they lie: in which chunk, from where on. sizes: of the chunks, which this adds to."""
    row_bytes = (box.col1 - box.col0) * element_bytes
    row0 = box.row0
    while row0 < box.row1:
        start = -(-sizes[-1] // BOUND_BYTES) * BOUND_BYTES
        room = (CHUNK_BYTES - start) // row_bytes
        if room < 1 and start > 0:
            sizes[-1] = max(CHUNK_BYTES, sizes[-1])
            sizes.append(0)
            continue
        row1 = min(box.row1, row0 + max(room, 1))  # a row that is longer has a chunk alone
        yield Box(row0, row1, box.col0, box.col1), len(sizes) - 1, start
        sizes[-1] = start + (row1 - row0) * row_bytes
        row0 = row1


class Snapshot:
    """The share of one rank of a layout at a step boundary, in chunks of host memory.

    generation: of the world whose state it is. scalars, digests (by kind): set with what the memory
    holds. new_memory: where a chunk comes from, by its bytes.
    """

    def __init__(
        self,
        model: ModelSpec,
        layout: Layout,
        rank: int,
        generation: int,
        new_memory: NewMemory = plain_memory,
    ) -> None:
        self.layout, self.rank, self.generation = layout, rank, generation
        self.scalars: ScalarState | None = None
        self.digests: dict[str, int] = {}
        self._model = model
        self._new_memory = new_memory

    @property
    def chunks(self) -> Sequence[torch.Tensor]:
        """Each [bytes] of uint8; undefined before `take`, or before it has arrived from another
        worker. They come to be when they are first asked for, which may take a while."""
        return self._laid_out[0]

    @property
    def chunks_so_far(self) -> Sequence[torch.Tensor]:
        """Those that have come to be: all of them, or none."""
        return self.chunks if "_laid_out" in self.__dict__ else ()

    @property
    def _pieces(self) -> Mapping[tuple[str, int], Sequence[_Piece]]:
        return self._laid_out[1]

    @cached_property
    def _laid_out(self) -> tuple[list[torch.Tensor], dict[tuple[str, int], list[_Piece]]]:
        model, layout = self._model, self.layout
        sizes = [0]
        places = [
            (kind, index, place)
            for kind, index, box in snapshot_boxes(model, layout, layout.coordinate(self.rank))
            for place in _placed(box, model.element_bytes(kind, index), sizes)
        ]
        memory = [self._new_memory(num_bytes) for num_bytes in sizes]
        pieces: dict[tuple[str, int], list[_Piece]] = defaultdict(list)
        for kind, index, (box, chunk, start) in places:
            element_bytes = model.element_bytes(kind, index)
            part = memory[chunk][start : start + box.elements * element_bytes]
            bits = part.view(_BITS[element_bytes]).view(box.shape)
            pieces[kind, index].append((box, bits))
        return memory, pieces

    def take(self, state: WorldState, scalars: ScalarState) -> None:
        """Copies the share from a world of the layout; on CUDA in the calling thread's lane, which
        is not waited for."""
        for (kind, index), pieces in self._pieces.items():
            for box, memory in pieces:
                view = state.view(kind, index, box)
                memory.copy_(view.view(memory.dtype), non_blocking=True)
        self.scalars = scalars

    def digest(self) -> dict[str, int]:
        """By kind, of what the memory holds now; the shares of all ranks add up to that of the
        state."""
        return by_kind(
            {
                (kind, index, box): box_digest(memory, self._model.tensors[index], box)
                for (kind, index), pieces in self._pieces.items()
                for box, memory in pieces
            }
        )

    def find(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor | None:
        """The bits of a box, [box rows, box cols], a copy where it lies in several chunks; None
        where the share has not all of it."""
        parts, row = [], box.row0
        for held, memory in self._pieces.get((kind, tensor_index), ()):
            common = held.intersect(box._replace(row0=row))
            if common is None or common != box._replace(row0=row, row1=common.row1):
                continue
            rows = slice(common.row0 - held.row0, common.row1 - held.row0)
            parts.append(memory[rows, box.col0 - held.col0 : box.col1 - held.col0])
            row = common.row1
            if row == box.row1:
                return parts[0] if len(parts) == 1 else torch.cat(parts)
        return None

    def told(self) -> HeldSnapshot:
        """What the coordinator is to know of it."""
        assert self.scalars is not None, "nothing was taken"
        return HeldSnapshot(
            generation=self.generation,
            layout=str(self.layout),
            rank=self.rank,
            scalars=self.scalars,
            digests={kind: f"{value:016x}" for kind, value in self.digests.items()},
        )


class SnapshotState:
    """The state that some snapshots of one world hold, seen through global boxes
    (`transport.stream.StateView`). What is trained is in full precision there: parameters of lower
    precision are cast from it.

    target: the world that is filled on this worker, if any. Views are on `device`.
    """

    def __init__(
        self,
        model: ModelSpec,
        snapshots: Iterable[Snapshot],
        device: torch.device,
        target: WorldState | None,
    ) -> None:
        self._model = model
        self._snapshots = tuple(snapshots)
        self._device = device
        self._target = target

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """A copy or the memory of one global box, [box rows, box cols]; to be read only.

        Raises PlanError where no snapshot has the whole box.
        """
        trained = self._model.tensors[tensor_index].role == "trained"
        stored = precise(self._model) if trained and kind == PARAMETER else kind
        found = (each.find(stored, tensor_index, box) for each in self._snapshots)
        bits = next((each for each in found if each is not None), None)
        if bits is None:
            ranks = sorted(each.rank for each in self._snapshots)
            name = self._model.tensors[tensor_index].name
            raise PlanError(f"snapshots of ranks {ranks} do not hold {kind} {box} of {name!r}")
        if not trained:
            bits = bits.to(self._device)
            return bits if self._target is None else bits.view(self._dtype_of(tensor_index))
        values = bits.view(torch.float32).to(self._device)
        low = kind == PARAMETER and not self._model.main_is_parameter
        return values.to(torch.bfloat16) if low else values

    def _dtype_of(self, tensor_index: int) -> torch.dtype:
        """Of an untrained tensor, where the target has it: copies within the worker go by values,
        messages by bytes."""
        assert self._target is not None
        dtype = self._target.dtype_of(tensor_index)
        bits = _BITS[self._model.element_bytes(PARAMETER, tensor_index)]
        return bits if dtype is None else dtype


def share_digests(state: WorldState) -> dict[tuple[str, int, Box], int]:
    """Of the boxes of a world's own share, by kind and tensor index. Waits for the device."""
    return {
        (kind, index, box): box_digest(
            state.view(kind, index, box), state.model.tensors[index], box
        )
        for kind, index, box in snapshot_boxes(state.model, state.layout, state.at)
    }


def by_kind(digests: Mapping[tuple[str, int, Box], int]) -> dict[str, int]:
    """A share's digest, as a snapshot tells it."""
    totals: dict[str, int] = defaultdict(int)
    for (kind, _, _), value in digests.items():
        totals[kind] += value
    return {kind: total % MODULUS for kind, total in totals.items()}
