"""The table covers every axis as often as it is to, and no transition twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from benchmarks.models import text_data
from benchmarks.transitions.cases import FAMILIES, WORKERS, changed_axes, is_uneven, quick
from liver_hpc.layout.batch import batch_fault
from liver_hpc.layout.coordinates import Layout


def transitions() -> Iterator[tuple[str, Layout, Layout]]:
    for family in FAMILIES:
        for source, targets in family.transitions:
            for target in targets:
                yield family.name, source, target


def test_every_axis_changes_often_enough() -> None:
    found: Counter[str] = Counter()
    for _, source, target in transitions():
        axes = changed_axes(source, target)
        found.update(["all", *axes, *(["several"] if len(axes) > 1 else [])])
    assert found["all"] >= 60
    assert found["several"] >= 15
    assert found["ep"] >= 10
    assert min(found[axis] for axis in ("tp", "pp", "dp", "cp", "vpp", "sp")) >= 6


def test_no_transition_stands_twice_and_each_changes_something() -> None:
    assert set(Counter(transitions()).values()) == {1}
    assert all(changed_axes(source, target) for _, source, target in transitions())


def test_names_say_what_is_bf16() -> None:
    for family in FAMILIES:
        assert ("bf16" in family.name) == (family.model.get("dtype") == "bf16")


def test_every_layout_has_its_workers_and_its_batch() -> None:
    uneven = 0
    for family in FAMILIES:
        config = family.config(text_data())
        for layout in family.layouts:
            assert layout.workers <= WORKERS
            assert batch_fault(config.train, layout) == ""
            uneven += is_uneven(config, layout)
    assert uneven >= 4


def test_the_quick_ones_are_of_every_family() -> None:
    chosen = quick(FAMILIES)
    assert [family.name for family in chosen] == [family.name for family in FAMILIES]
    assert {len(targets) for family in chosen for _, targets in family.transitions} == {2}
