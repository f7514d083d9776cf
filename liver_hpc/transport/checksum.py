"""The checksum of a piece at one of its ends, to be compared with that of its other end.

Both ends see the same box, so this need not add up over boxes of whatever shape, as the digest of
the state does (`digest.py`): where the host reads the memory, XXH3 takes a part of its time.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from liver_hpc.transport.buckets import Piece

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes: of floating-point numbers equal ones may differ, NaN does."""

_PART_BYTES = 1 << 18
"""What does not lie in one run is copied first, in parts that stay in the cache."""


def piece_checksum(piece: Piece, view: torch.Tensor) -> int:
    """64 bits over the piece's bytes, row by row, and over where they belong: kind, tensor, box.

    view: [box rows, box cols] in host memory, any strides, any dtype. Other threads go on
    meanwhile. Like the digest it guards against faults, not against forgers.
    """
    place = f"{piece.kind} {piece.tensor_index} {piece.box}".encode()
    checksum = xxhash.xxh3_64(seed=xxhash.xxh3_64_intdigest(place))
    content = view.detach().view(BITS[view.element_size()]).numpy()
    rows = max(1, len(content))
    if not content.flags.c_contiguous:
        rows = max(1, _PART_BYTES * rows // content.nbytes)
    for top in range(0, len(content), rows):
        checksum.update(np.ascontiguousarray(content[top : top + rows]).data)
    return checksum.intdigest()
