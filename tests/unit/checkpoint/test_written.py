"""Every element is written once, whatever the layout."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.checkpoint.copied import written_boxes
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.plan import subtract
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from tests.unit.layout.models import LAYOUTS, MODELS


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
