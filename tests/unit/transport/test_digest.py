"""The digest: layout-free, and nothing that changes places cancels out."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import PlanError
from liver_hpc.layout.tensors import Box, TensorSpec
from liver_hpc.transport import digest
from liver_hpc.transport.digest import MODULUS, box_digest
from tests.unit.transport.conformance import random_bits

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int8)
RNG = torch.Generator().manual_seed(11)


def matrix(rows: int, cols: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    tensor = torch.empty(rows, cols, dtype=dtype)
    random_bits(5)(tensor)
    return tensor


def spec(rows: int, cols: int, name: str = "w") -> TensorSpec:
    return TensorSpec(name, (rows, cols))


def of(tensor: torch.Tensor, name: str = "w") -> int:
    rows, cols = tensor.shape
    return box_digest(tensor, spec(rows, cols, name), Box(0, rows, 0, cols))


def quarters(tensor: torch.Tensor, down: int, right: int, of_tensor: TensorSpec) -> int:
    """The digests of a tensor's four quarters, added up."""
    rows, cols = tensor.shape
    boxes = [
        Box(top, bottom, left, end)
        for top, bottom in ((0, down), (down, rows))
        for left, end in ((0, right), (right, cols))
    ]
    parts = (tensor[box.row0 : box.row1, box.col0 : box.col1] for box in boxes)
    shares = (box_digest(part, of_tensor, box) for part, box in zip(parts, boxes, strict=True))
    return sum(shares) % MODULUS


@pytest.fixture(params=["8-bit products", "64-bit products"], autouse=True)
def _both_products(request: pytest.FixtureRequest) -> Iterator[None]:
    """Few rows and bytes at a time: small tensors span chunks, as large ones do in earnest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            digest, "_has_byte_product", lambda _content: request.param == "8-bit products"
        )
        patch.setitem(digest._CHUNK_ROWS, "cpu", 5)
        patch.setitem(digest._WIDE_CHUNK_BYTES, "cpu", 50)
        yield


def _splitmix64(seed: int, index: int) -> int:
    """The generator as its author gives it (Steele, Lea, Flood 2014), made odd."""
    mixed = (seed + (index + 1) * 0x9E3779B97F4A7C15) % MODULUS
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB % MODULUS
    return (mixed ^ mixed >> 31) | 1


def _place_weight(place: int) -> int:
    """Weight of a place within a row, by the docstring's words."""
    block, inside = divmod(place, digest.BLOCK_BYTES)
    mixed, total = _splitmix64(digest._BYTE_SEED, inside), 0
    for lane in range(digest.LANES):
        weight = (mixed >> 8 * lane & 0x7F) - 64
        factor = _splitmix64(digest._LANE_SEED, lane)
        total += (weight | 1) * factor if lane == 0 else weight * 2 * factor
    return _splitmix64(digest._BLOCK_SEED, block) * total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7, 13), (91, 1)])
def test_it_is_the_sum_that_its_docstring_names(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """A 1-D tensor is one long row; all others have row weights. A box may span two blocks."""
    rows, cols = shape
    box = Box(1000, 1000 + rows, 0, 1) if cols == 1 else Box(90, 90 + rows, 2040, 2040 + cols)
    tensor = matrix(rows, cols, dtype)
    of_tensor = spec(2000, 1 if cols == 1 else 3000)
    size, expected = dtype.itemsize, 0
    for index, byte in enumerate(tensor.view(torch.int8).flatten().tolist()):
        row, place = divmod(index, cols * size)
        if cols == 1:
            row, place = 0, box.row0 * size + index
        else:
            row, place = box.row0 + row, box.col0 * size + place
        expected += byte * _splitmix64(digest._ROW_SEED, row) * _place_weight(place)
    assert box_digest(tensor, of_tensor, box) == expected * digest._mark("w") % MODULUS


def test_every_weight_of_a_byte_is_odd_and_no_other_has_it() -> None:
    lanes = digest._lanes(torch.device("cpu"))
    assert set((lanes.place_weights & 1).tolist()) == {1}
    assert len(set(lanes.place_weights.tolist())) == digest.BLOCK_BYTES
    assert len({tuple(line) for line in lanes.byte_weights.tolist()}) == digest.BLOCK_BYTES


@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_bytes_do_not_overflow(value: int) -> None:
    """Of one sign with their weights, over a whole block, as 8-bit products would have them."""
    lanes = digest._lanes(torch.device("cpu"))
    for lane in range(digest.LANES):
        signs = torch.where(lanes.byte_weights[:, lane] < 0, -1, 1)
        extreme = (signs * value).clamp(-128, 127).to(torch.int8).unsqueeze(0)
        wide = torch.mv(extreme.to(torch.int64), lanes.place_weights)
        assert torch.equal(digest._row_sums(extreme, 0), wide)


@given(st.integers(1, 40), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_disjoint_boxes_add_up(
    rows: int, cols: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    tensor = matrix(rows, cols, dtype)
    down = data.draw(st.integers(0, rows))
    right = data.draw(st.integers(0, cols))
    assert quarters(tensor, down, right, spec(rows, cols)) == of(tensor)


@pytest.mark.parametrize("shape", [(3, 1536), (12, 1024), (2, 3000), (1, 5000), (9, 700)])
@pytest.mark.parametrize("right", [0, 1, 512, 600, 699])
def test_rows_of_several_blocks_add_up(shape: tuple[int, int], right: int) -> None:
    """Whole blocks that follow each other, blocks below each other, and parts of blocks."""
    tensor = matrix(*shape)
    padded = torch.zeros(shape[0], shape[1] + 7)[:, 3:-4].copy_(tensor)
    for down in (0, 1, shape[0]):
        for same in (tensor, padded):
            assert quarters(same, down, right, spec(*shape)) == of(tensor)


def test_strides_do_not_matter() -> None:
    tensor = matrix(12, 9)
    padded = torch.zeros(12, 20)
    padded[:, 4:13] = tensor
    assert of(padded[:, 4:13]) == of(tensor) == of(tensor.t().contiguous().t())


@pytest.mark.parametrize("length", [1, 49, 511, 512, 513, 3000])
def test_a_vector_may_be_cut_anywhere(length: int) -> None:
    vector = matrix(length, 1)
    for cut in {0, 1, length // 2, length - 1}:
        assert quarters(vector, cut, 0, spec(length, 1)) == of(vector)
    assert of(torch.cat([vector, vector], dim=1)[:, :1]) == of(vector)


@pytest.mark.parametrize("col", range(3))
def test_a_column_of_any_strides_is_a_part_of_its_tensor(col: int) -> None:
    tensor = matrix(30, 3)
    one = box_digest(tensor[:, col : col + 1], spec(30, 3), Box(0, 30, col, col + 1))
    rest = tensor.clone()
    rest[:, col] = 0
    assert (one + of(rest)) % MODULUS == of(tensor)


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
    assert box_digest(torch.empty(0, 4), spec(9, 4), Box(3, 3, 0, 4)) == 0


def test_a_view_of_another_shape_is_refused() -> None:
    with pytest.raises(PlanError, match=r"'w': .* is given as \(4, 4\)"):
        box_digest(torch.zeros(4, 4), spec(4, 5), Box(0, 4, 0, 5))


def test_a_warm_digest_makes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [(70_001, 3), (3, 70_002), (70_003, 1)]
    tensors = [spec(*shape) for shape in shapes]
    digest.warm_up(tensors, torch.device("cpu"))
    monkeypatch.delattr(digest, "_splitmix64")
    for (rows, cols), tensor in zip(shapes, tensors, strict=True):
        view = torch.ones(rows, cols, dtype=torch.float64)
        assert box_digest(view, tensor, Box(0, rows, 0, cols)) != 0
