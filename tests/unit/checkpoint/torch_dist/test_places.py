"""Boxes of a matrix, in boxes of a tensor with any number of dimensions."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.checkpoint.torch_dist.places import elements, runs, stored
from liver_hpc.layout.tensors import Box, TensorSpec
from liver_hpc.world.sharded import Sharded

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_runs_are_boxes_that_make_up_a_flat_interval(
    lengths: tuple[int, ...], data: st.DataObject
) -> None:
    whole = np.arange(math.prod(lengths)).reshape(lengths)
    start = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(start, whole.size))
    found = list(runs(start, end, lengths))
    seen = [whole[tuple(slice(a, a + n) for a, n in box)].ravel() for _, _, box in found]
    assert [number for part in seen for number in part] == list(range(start, end))
    assert [(part[0], part[-1] + 1) for part in seen] == [(low, high) for low, high, _ in found]


@given(st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.data())
def test_a_box_lies_where_its_pieces_are(a: int, b: int, c: int, data: st.DataObject) -> None:
    """In a stack of layers, and split in two along the second dimension, as a gated layer's is."""
    tensor = TensorSpec("t", (a, 2 * b, c), tp_dim=data.draw(st.sampled_from([None, 0, 1, 2])))
    halves = [
        Sharded(((0, a), (at, b), (0, c)), "k", (3, a, 2 * b, c), ((1, 1), (0, a), (at, b), (0, c)))
        for at in (0, b)
    ]
    rows = sorted(data.draw(st.tuples(*[st.integers(0, tensor.rows)] * 2)))
    cols = sorted(data.draw(st.tuples(*[st.integers(0, tensor.cols)] * 2)))
    box = Box(rows[0], rows[1], cols[0], cols[1])
    whole = np.arange(tensor.elements).reshape(tensor.shape)
    key = np.stack([whole - whole.size, whole, whole + whole.size])
    matrix = whole.reshape(tensor.rows, tensor.cols)
    got = 0
    for one in stored(tensor, box, halves):
        there = key[tuple(slice(start, start + n) for start, n in one.at)]
        mine = matrix[one.box.row0 : one.box.row1, one.box.col0 : one.box.col1]
        within = tuple(slice(start, start + n) for start, n in one.part.within)
        here = mine.reshape(one.part.lengths)[within]
        assert (there.ravel() == here.ravel()).all()
        got += elements(one.part.within)
    assert got == box.elements
