"""The digest: layout-free, and nothing that changes places cancels out."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Box
from liver_hpc.transport import digest
from liver_hpc.transport.digest import MODULUS, box_digest
from tests.unit.transport.conformance import random_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
RNG = torch.Generator().manual_seed(11)


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(rows, cols, dtype=dtype)
    random_bits(5)(tensor)
    return tensor


def whole(tensor: torch.Tensor) -> Box:
    return Box(0, tensor.shape[0], 0, tensor.shape[1])


def of(tensor: torch.Tensor, name: str = "w") -> int:
    return box_digest(tensor, name, whole(tensor))


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors span chunks, as large ones do with the real size."""
    monkeypatch.setitem(digest._CHUNK_ELEMENTS, "cpu", 50)


def _splitmix64(seed: int, index: int) -> int:
    """The generator as its author gives it (Steele, Lea, Flood 2014), made odd."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % MODULUS
    return (mixed ^ mixed >> 31) | 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_sum_that_its_docstring_names(dtype: torch.dtype) -> None:
    tensor, box = matrix(7, 13, dtype), Box(90, 97, 1000, 1013)
    integers = tensor.view(digest._INTEGERS[tensor.element_size()]).tolist()
    expected = sum(
        bits
        * digest._mark("w")
        * _splitmix64(digest._ROW_SEED, box.row0 + row)
        * _splitmix64(digest._COLUMN_SEED, box.col0 + col)
        for row, line in enumerate(integers)
        for col, bits in enumerate(line)
    )
    assert box_digest(tensor, "w", box) == expected % MODULUS


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_disjoint_boxes_add_up(
    rows: int, cols: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = matrix(rows, cols, dtype)
    down = data.draw(st.integers(0, rows))
    right = data.draw(st.integers(0, cols))
    quarters = [
        Box(top, bottom, left, end)
        for top, bottom in ((0, down), (down, rows))
        for left, end in ((0, right), (right, cols))
    ]
    parts = sum(
        box_digest(tensor[box.row0 : box.row1, box.col0 : box.col1], "w", box) for box in quarters
    )
    assert parts % MODULUS == of(tensor)


def test_strides_do_not_matter() -> None:
    tensor = matrix(12, 9)
    padded = torch.zeros(12, 20)
    padded[:, 4:13] = tensor
    assert of(padded[:, 4:13]) == of(tensor) == of(tensor.t().contiguous().t())


@pytest.mark.parametrize("length", [1, 49, 50, 51, 1000])
def test_a_vector_is_a_matrix_of_one_column(length: int) -> None:
    vector = matrix(length, 1)
    half = length // 2
    top = box_digest(vector[:half], "w", Box(0, half, 0, 1))
    bottom = box_digest(vector[half:], "w", Box(half, length, 0, 1))
    assert (top + bottom) % MODULUS == of(vector)
    wide = torch.cat([vector, vector], dim=1)
    left = box_digest(wide[:, :1], "w", Box(0, length, 0, 1))
    right = box_digest(wide[:, 1:], "w", Box(0, length, 1, 2))
    assert (left + right) % MODULUS == of(wide)


def _swapped_rows(tensor: torch.Tensor, one: slice, other: slice) -> torch.Tensor:
    changed = tensor.clone()
    changed[one], changed[other] = tensor[other], tensor[one]
    return changed


def _flipped(tensor: torch.Tensor, *places: tuple[int, int]) -> torch.Tensor:
    changed = tensor.clone()
    for place in places:
        changed.view(torch.int32)[place] ^= -(1 << 31)
    return changed


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda t: _swapped_rows(t, slice(0, 6), slice(6, 12)), id="halves"),
        pytest.param(lambda t: _swapped_rows(t, slice(3, 4), slice(4, 5)), id="two rows"),
        pytest.param(lambda t: _swapped_rows(t, slice(0, 3), slice(3, 6)), id="q and k"),
        pytest.param(lambda t: torch.cat([t[:, 4:], t[:, :4]], dim=1), id="column halves"),
        pytest.param(lambda t: t.flip(0), id="rows reversed"),
        pytest.param(lambda t: t.roll(1, 1), id="columns shifted"),
        pytest.param(lambda t: t.reshape(8, 12).t().contiguous(), id="transposed"),
        pytest.param(lambda t: _flipped(t, (2, 3)), id="one sign"),
        pytest.param(lambda t: _flipped(t, (2, 3), (2, 4)), id="two signs in a row"),
        pytest.param(lambda t: _flipped(t, (2, 3), (5, 3)), id="two signs in a column"),
        pytest.param(torch.neg, id="all signs"),
        pytest.param(lambda t: torch.zeros_like(t), id="nothing arrived"),
    ],
)
def test_it_sees(change) -> None:  # type: ignore[no-untyped-def]
    tensor = torch.randn(12, 8, generator=RNG)
    assert of(change(tensor)) != of(tensor)


def test_it_sees_two_tensors_that_changed_places() -> None:
    one, other = matrix(5, 5), torch.randn(5, 5, generator=RNG)
    right = of(one, "layers.0.w") + of(other, "layers.1.w")
    wrong = of(other, "layers.0.w") + of(one, "layers.1.w")
    assert right % MODULUS != wrong % MODULUS


def test_it_tells_zeros_and_nans_apart() -> None:
    values = [0.0, -0.0, math.nan, -math.nan, math.inf]
    quiet = torch.tensor([[math.nan]]).view(torch.int32)
    views = [torch.tensor([[value]]) for value in values] + [(quiet + 1).view(torch.float32)]
    assert len({of(view) for view in views}) == len(views)


@given(st.integers(0, 11), st.integers(0, 7), st.integers(-(2**31), 2**31 - 1))
def test_any_other_value_of_any_element_changes_it(row: int, col: int, bits: int) -> None:
    tensor = matrix(12, 8)
    changed = tensor.clone()
    changed.view(torch.int32)[row, col] = bits
    same = bits == int(tensor.view(torch.int32)[row, col])
    assert (of(changed) == of(tensor)) == same


def test_random_sign_flips_spread_over_the_upper_half_of_the_digest() -> None:
    """The weakest change there is, at the top bit of two elements, does not cancel out."""
    tensor = torch.randn(40, 40, generator=RNG)
    places = torch.randint(0, 40, (100, 4), generator=RNG).tolist()
    differences = set()
    for row, col, other_row, other_col in places:
        if (row, col) != (other_row, other_col):
            changed = _flipped(tensor, (row, col), (other_row, other_col))
            differences.add((of(changed) - of(tensor)) % MODULUS)
    assert 0 not in differences
    assert len({difference >> 48 for difference in differences}) > 80


def test_an_empty_box_is_zero() -> None:
    assert box_digest(torch.empty(0, 4), "w", Box(3, 3, 0, 4)) == 0


def test_a_view_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'w': .* is given as \(4, 4\)"):
        box_digest(torch.zeros(4, 4), "w", Box(0, 4, 0, 5))
