"""The checksum of a piece: the same at both ends, another one where anything differs."""

from __future__ import annotations

import pytest
import torch

from liver_hpc.layout.tensors import EXP_AVG, PARAMETER, Box
from liver_hpc.transport.buckets import Piece
from liver_hpc.transport.checksum import piece_checksum

ROWS, COLS = 70, 1024
"""More than is read at a time, and no multiple of it."""
TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool]


def piece(kind: str = PARAMETER, index: int = 3, row0: int = 5) -> Piece:
    return Piece(kind, index, Box(row0, row0 + ROWS, 0, COLS), 0, ROWS * COLS * 4)


def content(dtype: torch.dtype) -> torch.Tensor:
    size = torch.empty(0, dtype=dtype).element_size()
    random = torch.Generator().manual_seed(7)
    number = ROWS * COLS * size
    most = 2 if dtype == torch.bool else 256
    drawn = torch.randint(0, most, (number,), generator=random, dtype=torch.uint8)
    return drawn.view(dtype).view(ROWS, COLS)  # also numbers that are none


@pytest.mark.parametrize("dtype", TYPES)
def test_how_it_lies_in_memory_makes_no_difference(dtype: torch.dtype) -> None:
    whole = content(dtype)
    wide = torch.zeros(ROWS + 9, COLS + 9, dtype=dtype)[2 : ROWS + 2, 3 : COLS + 3]
    turned = torch.zeros(COLS, ROWS, dtype=dtype).t()
    for other in (wide, turned):
        other.copy_(whole)
        assert not other.is_contiguous()
        assert piece_checksum(piece(), other) == piece_checksum(piece(), whole)


@pytest.mark.parametrize("dtype", TYPES[:-1])
@pytest.mark.parametrize("at", [(0, 0), (33, 511), (ROWS - 1, COLS - 1)])
@pytest.mark.parametrize("bit", [1, 128])
@pytest.mark.parametrize("strided", [False, True])
def test_one_bit_makes_another_one(
    dtype: torch.dtype, at: tuple[int, int], bit: int, strided: bool
) -> None:
    view = content(dtype)
    if strided:
        view = torch.cat([view, view], dim=1)[:, :COLS]
    before = piece_checksum(piece(), view)
    row, col = at
    view[row : row + 1, col : col + 1].view(torch.uint8)[..., -1:] ^= bit
    assert piece_checksum(piece(), view) != before


def test_equal_bytes_of_another_place_have_another_one() -> None:
    """Pieces that have changed places do not add up to the same."""
    view = content(torch.float32)
    pieces = [piece(), piece(kind=EXP_AVG), piece(index=4), piece(row0=6)]
    assert len({piece_checksum(each, view) for each in pieces}) == len(pieces)


def test_a_parameter_has_one_and_its_memory_can_still_be_freed() -> None:
    view = content(torch.float32)
    trained = torch.nn.Parameter(view.clone())
    assert piece_checksum(piece(), trained) == piece_checksum(piece(), view)
    trained.untyped_storage().resize_(0)
