"""The digest of the logical state: one 64-bit sum, keyed by tensor and coordinate.

    digest = sum over elements of bits(x) * weight(tensor, row, column), modulo 2**64
    weight(tensor, row, column) = mark(tensor) * row_weight(row) * column_weight(column)

`bits` is the element's bit pattern as a signed integer, so -0.0, 0.0 and every NaN differ. All
factors are odd and pseudo-random, so one changed element always changes the digest, and values
that change places (halves, rows, tensors, the blocks of a fused weight) cancel out only by an
accident of about 2**-64 (2**-33 where nothing but sign bits differ). A sum: the digests of
disjoint boxes add up, so the digest of a whole state does not depend on who holds which part.
"""

from __future__ import annotations

import hashlib
import threading
from functools import lru_cache

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Box

MODULUS = 1 << 64

_CHUNK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Elements widened to 64 bits at a time: on the CPU about a core's second-level cache."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ROW_SEED, _COLUMN_SEED = 0x6C69_7665_725F_726F, 0x6C69_7665_725F_636F


def box_digest(view: torch.Tensor, tensor_name: str, box: Box) -> int:
    """The share of one box in the digest, in [0, 2**64).

    view: the box's elements, [box rows, box cols], any strides, any dtype of 1, 2, 4 or 8 bytes.
    Waits for the device. Raises PlanError when the view has not the box's shape.
    """
    if view.shape != (box.row1 - box.row0, box.col1 - box.col0):
        raise PlanError(f"digest of {tensor_name!r}: {box} is given as {tuple(view.shape)}")
    if box.elements == 0:
        return 0
    bits = view.detach().view(_INTEGERS[view.element_size()])
    rows = _ROW_WEIGHTS.between(box.row0, box.row1, view.device)
    columns = _COLUMN_WEIGHTS.between(box.col0, box.col1, view.device)
    if bits.shape[1] == 1:
        # A 1-D tensor: one long row is quick to sum, a long column is not.
        bits, rows, columns = bits.t(), columns, rows
    total = int((_column_sums(bits, rows) * columns).sum())
    return total * _mark(tensor_name) % MODULUS


def _column_sums(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum over rows of bits * weights, [cols] of int64, wrapping around."""
    rows, cols = bits.shape
    sums = torch.zeros(cols, dtype=torch.int64, device=bits.device)
    chunk_elements = _CHUNK_ELEMENTS[bits.device.type]
    width = min(cols, chunk_elements)
    height = max(1, chunk_elements // width)
    wide = torch.empty(min(rows, height) * width, dtype=torch.int64, device=bits.device)
    for left in range(0, cols, width):
        for top in range(0, rows, height):
            part = bits[top : top + height, left : left + width]
            chunk = wide[: part.numel()].view(part.shape).copy_(part)
            added, factors = sums[left : left + width], weights[top : top + height]
            if bits.is_cuda:
                # CUDA has no matrix product of 64-bit integers.
                added.add_(chunk.mul_(factors.unsqueeze(1)).sum(dim=0))
            else:
                # Twice as fast as multiplying in place and summing: nothing is written back.
                added.addmv_(chunk.t(), factors)
    return sums


class _Weights:
    """Odd pseudo-random 64-bit numbers by index: splitmix64. Tables grow and are kept."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._growing = threading.Lock()

    def between(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Weights of indices start .. end - 1, [end - start] of int64 on `device`."""
        with self._growing:
            table = self._tables.get(device)
            if table is None or len(table) < end:
                table = _splitmix64(self._seed, 1 << (end - 1).bit_length()).to(device)
                self._tables[device] = table
        return table[start:end]


def _splitmix64(seed: int, count: int) -> torch.Tensor:
    """The first `count` outputs of the generator, made odd; [count] of int64."""
    counter = torch.arange(1, count + 1, dtype=torch.int64)
    mixed = counter * _signed(0x9E37_79B9_7F4A_7C15) + _signed(seed)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift of 64-bit patterns that fills with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 takes it."""
    return value - MODULUS if value >= MODULUS >> 1 else value


@lru_cache(maxsize=1 << 16)
def _mark(tensor_name: str) -> int:
    hashed = hashlib.blake2b(tensor_name.encode(), digest_size=8).digest()
    return int.from_bytes(hashed, "little") | 1


_ROW_WEIGHTS = _Weights(_ROW_SEED)
_COLUMN_WEIGHTS = _Weights(_COLUMN_SEED)
