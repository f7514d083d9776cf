"""Every element is written once and read once, whatever the two layouts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.checkpoint.parts import reads
from liver_hpc.checkpoint.written import written_boxes
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ownership import owned_boxes
from liver_hpc.layout.plan import subtract
from liver_hpc.layout.tensors import PARAMETER, Box, ModelSpec
from tests.unit.layout.models import LAYOUTS, MODELS, TIED


@given(st.sampled_from(MODELS), LAYOUTS)
def test_every_element_of_every_kind_is_written_once(model: ModelSpec, layout: Layout) -> None:
    missing = {
        (kind, index): [tensor.whole]
        for kind in model.kinds
        for index, tensor in enumerate(model.tensors)
        if kind == PARAMETER or tensor.role == "trained"
    }
    elements: Counter[tuple[str, int]] = Counter()
    for at in layout.coordinates():
        for kind, index, box in written_boxes(model, layout, at):
            elements[kind, index] += box.elements
            missing[kind, index] = [p for old in missing[kind, index] for p in subtract(old, box)]
    assert not any(missing.values())
    assert elements == {key: model.tensors[key[1]].elements for key in missing}


@given(st.sampled_from(MODELS), LAYOUTS, LAYOUTS)
def test_a_coordinate_reads_all_that_it_owns_from_those_who_wrote_it(
    model: ModelSpec, saved: Layout, layout: Layout
) -> None:
    written = {
        (saved.rank(at), kind, index, box)
        for at in saved.coordinates()
        for kind, index, box in written_boxes(model, saved, at)
    }
    for at in layout.coordinates():
        parts: dict[tuple[str, int], list[Box]] = {}
        for read in reads(model, saved, layout, at):
            assert (read.rank, read.kind, read.tensor_index, read.saved) in written
            assert read.saved.intersect(read.part) == read.part
            parts.setdefault((read.kind, read.tensor_index), []).append(read.part)
        for kind in model.kinds:
            for index in model.held_tensors(layout, at):
                wanted = owned_boxes(model, layout, at, kind, index)
                got = parts.get((kind, index), [])
                assert sum(b.elements for b in got) == sum(b.elements for b in wanted)
                rest = list(wanted)
                for part in got:
                    rest = [piece for old in rest for piece in subtract(old, part)]
                assert rest == []


@pytest.mark.parametrize("layout", [Layout(1, 1, 2), Layout(2, 2, 1)])
def test_reads_come_file_by_file(layout: Layout) -> None:
    for at in layout.coordinates():
        ranks = [read.rank for read in reads(TIED, Layout(2, 1, 2), layout, at)]
        assert ranks == sorted(ranks)
