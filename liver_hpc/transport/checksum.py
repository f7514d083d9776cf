"""What was moved is the same at both ends, where the host reads the memory: by checksum for a piece
that has crossed, byte by byte for a copy.

Both ends see the same box, so this need not add up over boxes of whatever shape, as the digest of
the state does (`digest.py`): XXH3 takes a part of its time.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
import xxhash

from liver_hpc.transport.buckets import Piece

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

_PART_BYTES = 1 << 18
"""What does not lie in one run is copied first, in parts that stay in the cache."""


def piece_checksum(piece: Piece, view: torch.Tensor) -> int:
    """64 bits over the piece's bytes, row by row, and over where they belong: kind, tensor, box.

    view: [box rows, box cols] in host memory, any strides, any dtype. Other threads go on
    meanwhile. Like the digest it guards against faults, not against forgers.
    """
    place = f"{piece.kind} {piece.tensor_index} {piece.box}".encode()
    checksum = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(place))
    content = _as_array(view)
    rows = len(content)
    if not content.flags.c_contiguous:
        rows = max(1, _PART_BYTES * rows // content.nbytes)
    for top in range(0, len(content), rows):
        checksum.update(np.ascontiguousarray(content[top : top + rows]).data)
    return checksum.intdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two of the same shape and dtype, [rows, cols] in host memory and of any strides, have
    the same bits: of numbers equal ones may differ, NaN does."""
    assert {one.device.type, other.device.type} == {"cpu"}, f"{one.device}, {other.device}"
    if one.is_contiguous() and other.is_contiguous():
        return not _memcmp(one.data_ptr(), other.data_ptr(), one.nbytes)
    a, b = (np.ascontiguousarray(_as_array(each)) for each in (one, other))
    return not _memcmp(a.ctypes.data, b.ctypes.data, a.nbytes)


def _as_array(view: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.void]]:
    """The memory of [rows, cols] that are not empty. torch's own `numpy` would tie the storage to
    the array, so that it could not be freed by `resize_` any more."""
    assert view.is_cpu, f"on {view.device}"
    size, strides = view.element_size(), view.stride()
    last = sum((n - 1) * stride for n, stride in zip(view.shape, strides, strict=True))
    memory = memoryview((ctypes.c_char * ((last + 1) * size)).from_address(view.data_ptr()))
    return np.ndarray(view.shape, f"V{size}", memory, strides=[size * each for each in strides])
