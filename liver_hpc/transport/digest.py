"""The digest of the logical state: one 64-bit sum over bytes, keyed by tensor and coordinate.

    digest = sum over bytes of byte * weight(tensor, row, place), modulo 2**64
    weight(tensor, row, place) = mark(tensor) * row_weight(row) * block_weight(place // 2048)
        * sum over 8 lanes of lane_factor[lane] * byte_weight[place % 2048, lane]

`byte` is signed, `place` the byte's number in its row of the global tensor; a 1-D tensor is one
long row. A sum: the digests of disjoint boxes add up, so the digest of a whole state does not
depend on who holds which part, in boxes of whatever shape.

How it is computed: `byte_weight` is 8 bits wide, so that a product of 8-bit integers does what
touches every byte. Their 32-bit sums are exact (2048 * 128 * 64 is 2**24, and 2 * 255 * 64 fits
into the 16 bits that processors without VNNI sum pairs in), and 64-bit arithmetic is left for one
row of 8 sums in 2048 bytes. Where there is no such product, 64-bit ones give the same value.

What it finds. Marks, row weights and block weights are odd; lane 0 has an odd factor and odd byte
weights, every other lane an even factor: the weight of each byte is odd, and one changed byte
always changes the digest. Other changes, also bytes that change places (halves, rows, tensors, the
blocks of a fused weight), cancel out only by accident, as the weights are pseudo-random numbers: a
place in a row has 55 bits of them, a row, a block and a tensor have 63. Two changed bytes cancel
out with about 2**-50. Whoever knows the weights can make two states of one digest: it guards
against faults, not against forgers.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Box, TensorSpec

MODULUS = 1 << 64

BLOCK_BYTES = 2048
LANES = 8

_CHUNK_ROWS = {"cpu": 1 << 13, "cuda": 1 << 15}
_WIDEST_BYTES = 8
_WIDE_CHUNK_BYTES = {"cpu": 1 << 17, "cuda": 1 << 21}
"""Bytes widened to 64 bits at a time: about the second-level cache of a core, or of a GPU."""
_CUDA_ROWS, _CUDA_ALIGNMENT = 17, 16
"""What CUDA's product of 8-bit integers takes: so many rows at least, and bytes whose address,
distance and number in a row are multiples of that."""

_ROW_SEED, _BLOCK_SEED = 0x6C69_7665_725F_726F, 0x6C69_7665_725F_626C
_BYTE_SEED, _LANE_SEED = 0x6C69_7665_725F_6279, 0x6C69_7665_725F_6C61


def box_digest(view: torch.Tensor, tensor: TensorSpec, box: Box) -> int:
    """The share of one box in the digest, in [0, MODULUS). Waits for the device.

    Arguments and errors are those of `add_digest`.
    """
    total = torch.zeros((), dtype=torch.int64, device=view.device)
    add_digest(total, view, tensor, box)
    return int(total) % MODULUS


def add_digest(total: torch.Tensor, view: torch.Tensor, tensor: TensorSpec, box: Box) -> None:
    """Adds the share of one box to `total`, which is to be taken modulo MODULUS in the end.

    total: int64 without dimensions, on the view's device, which is not waited for.
    view: the box's elements, [box rows, box cols], any strides, any dtype.
    Raises PlanError when the view has not the box's shape.
    """
    if view.shape != box.shape:
        raise PlanError(f"digest of {tensor.name!r}: {box} is given as {tuple(view.shape)}")
    if not box.elements:
        return
    view, row0, col0 = view.detach(), box.row0, box.col0
    if tensor.cols == 1:
        view, row0, col0 = view.t(), 0, box.row0
    content, mark = _bytes(view), _mark(tensor.name)
    rows = _ROW_WEIGHTS.between(row0, row0 + len(content), content.device)
    chunk_rows = _CHUNK_ROWS[content.device.type]
    for strip, place, weights in _strips(content, col0 * view.element_size(), rows):
        for top in range(0, len(weights), chunk_rows):
            chunk = slice(top, top + chunk_rows)
            sums = _row_sums(strip[chunk], place)
            total.add_(_dot(sums, weights[chunk]), alpha=mark)


def warm_up(tensors: Sequence[TensorSpec], device: torch.device) -> None:
    """Makes the weights of these tensors and first products ahead of time: not in the pause."""
    for tensor in tensors:
        rows, cols = (1, tensor.rows) if tensor.cols == 1 else (tensor.rows, tensor.cols)
        _ROW_WEIGHTS.between(0, rows, device)
        _BLOCK_WEIGHTS.between(0, -(-cols * _WIDEST_BYTES // BLOCK_BYTES), device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in (TensorSpec("", (1, 1)), TensorSpec("", (4 * _CUDA_ROWS, BLOCK_BYTES // 4))):
        add_digest(
            total, torch.zeros(tensor.rows, tensor.cols, device=device), tensor, tensor.whole
        )


def _bytes(view: torch.Tensor) -> torch.Tensor:
    """[rows, cols] of any strides as [rows, bytes] of int8, a copy only where it must be."""
    if view.stride(1) != 1 or view.stride(0) < view.shape[1]:
        view = view.contiguous()
        # One row or column is contiguous with any strides, but is not taken for bytes, or is
        # multiplied wrongly.
        view = view.as_strided(view.shape, (view.shape[1], 1))
    return view.view(torch.int8)


def _dot(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum of products of int64, wrapping around. CUDA has no such product."""
    return (values * weights).sum() if values.is_cuda else torch.dot(values, weights)


_Strip = tuple[torch.Tensor, int, torch.Tensor]
"""A part of a box in which bytes below each other have the same place in their blocks: [strip rows,
width] of int8; the first column's place; row weight times block weight, [strip rows] of int64."""


def _strips(content: torch.Tensor, start: int, rows: torch.Tensor) -> Iterator[_Strip]:
    """Cuts a box at the bounds of blocks, into as few strips as its memory allows.

    content: [rows, width] of int8. start: the first column's place in its row. rows: weights.
    """
    height, width = content.shape
    if 1 < height < width // BLOCK_BYTES and content.stride(0) != width:
        for row in range(height):
            yield from _strips(content[row : row + 1], start, rows[row : row + 1])
        return
    number, place = divmod(start, BLOCK_BYTES)
    if place + width <= BLOCK_BYTES:
        block = _BLOCK_WEIGHTS.between(number, number + 1, rows.device)
        yield content, place, rows * block
        return
    left = 0
    while left < width:
        rest, count = width - left, 1
        if place == 0 and (height == 1 or (content.stride(0) == rest and rest % BLOCK_BYTES == 0)):
            # Whole blocks that lie behind each other are as good as rows below each other.
            count = max(1, rest // BLOCK_BYTES)
        taken = min(rest, count * BLOCK_BYTES - place)
        blocks = _BLOCK_WEIGHTS.between(number, number + count, rows.device)
        part = content[:, left : left + taken].view(height * count, -1)
        yield part, place, torch.outer(rows, blocks).view(-1)
        left, number, place = left + taken, number + count, 0


def _row_sums(content: torch.Tensor, place: int) -> torch.Tensor:
    """Sum over each row of byte * (the lanes' part of its weight), [rows] of int64.

    content: [rows, width] of int8, which begins at `place` of a block and ends within it.
    """
    lanes = _lanes(content.device)
    places = slice(place, place + content.shape[1])
    if _has_byte_product(content):
        sums = torch._int_mm(content, lanes.byte_weights[places]).to(torch.int64)
        return sums.mul_(lanes.factors).sum(1) if sums.is_cuda else torch.mv(sums, lanes.factors)
    return _wide_row_sums(content, lanes.place_weights[places])


def _wide_row_sums(content: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The same by 64-bit products, a few rows at a time. weights: [width] of int64."""
    sums = []
    height = max(1, _WIDE_CHUNK_BYTES[content.device.type] // content.shape[1])
    for part in torch.split(content, height):
        wide = part.to(torch.int64)
        # CUDA has no matrix product of 64-bit integers.
        sums.append(wide.mul_(weights).sum(1) if wide.is_cuda else torch.mv(wide, weights))
    return torch.cat(sums)


def _has_byte_product(content: torch.Tensor) -> bool:
    """Whether torch multiplies this by a matrix of 8-bit integers, and faster than in 64 bits."""
    if content.is_cuda:
        sizes = (content.data_ptr(), content.stride(0), content.shape[1])
        return len(content) >= _CUDA_ROWS and not any(n % _CUDA_ALIGNMENT for n in sizes)
    return _processor_has_byte_product()


@lru_cache(maxsize=1)
def _processor_has_byte_product() -> bool:
    fast = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return fast and hasattr(torch, "_int_mm")


class _Lanes(NamedTuple):
    """The weights of the places of one block.

    byte_weights: [BLOCK_BYTES, LANES] of int8. factors: [LANES] of int64. place_weights: what
    both come to, [BLOCK_BYTES] of int64.
    """

    byte_weights: torch.Tensor
    factors: torch.Tensor
    place_weights: torch.Tensor


@lru_cache(maxsize=16)
def _lanes(device: torch.device) -> _Lanes:
    shifts = torch.arange(LANES) * 8
    mixed = _splitmix64(_BYTE_SEED, BLOCK_BYTES)
    byte_weights = ((mixed.unsqueeze(1) >> shifts) & 0x7F) - 0x40
    byte_weights[:, 0] |= 1
    factors = _splitmix64(_LANE_SEED, LANES)
    factors[1:] *= 2
    lanes = _Lanes(byte_weights.to(torch.int8), factors, torch.mv(byte_weights, factors))
    return _Lanes(*(weights.to(device) for weights in lanes))


class _Weights:
    """Odd pseudo-random 64-bit numbers by index: splitmix64. Tables grow and are kept."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._all: list[torch.Tensor] = []
        self._growing = threading.Lock()

    def between(self, start: int, end: int, device: torch.device) -> torch.Tensor:
        """Weights of indices start .. end - 1, [end - start] of int64 on `device`."""
        table = self._tables.get(device)
        if table is None or len(table) < end:
            with self._growing:
                table = _splitmix64(self._seed, 1 << (end - 1).bit_length()).to(device)
                if len(table) > len(self._tables.get(device, ())):
                    self._tables[device] = table
                    self._all.append(table)  # the device may still read the one before
        return table[start:end]


def _splitmix64(seed: int, count: int) -> torch.Tensor:
    """The first `count` outputs of the generator, made odd; [count] of int64."""
    counter = torch.arange(1, count + 1, dtype=torch.int64)
    mixed = counter * signed(0x9E37_79B9_7F4A_7C15) + signed(seed)
    for shift, factor in ((30, 0xBF58_476D_1CE4_E5B9), (27, 0x94D0_49BB_1331_11EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * signed(factor)
    return (mixed ^ _shifted(mixed, 31)) | 1


def _shifted(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Right shift of 64-bit patterns that fills with zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(value: int) -> int:
    """A 64-bit pattern as torch's int64 takes it."""
    return value - MODULUS if value >= MODULUS >> 1 else value


@lru_cache(maxsize=1 << 16)
def _mark(tensor_name: str) -> int:
    hashed = hashlib.sha256(tensor_name.encode()).digest()[:8]
    return signed(int.from_bytes(hashed, "little") | 1)


_ROW_WEIGHTS = _Weights(_ROW_SEED)
_BLOCK_WEIGHTS = _Weights(_BLOCK_SEED)
