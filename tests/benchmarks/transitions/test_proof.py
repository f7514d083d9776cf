"""Proofs: real transitions hold, and a fault in one of them shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.models import text_data
from benchmarks.transitions.__main__ import run
from benchmarks.transitions.cases import FAMILIES, Family, quick
from benchmarks.transitions.pool import Pool
from benchmarks.transitions.proof import Proof, Prover, apart, on_other_workers
from liver_hpc.cli.submission import with_prepared_data
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from tests.benchmarks.transitions.faulty import (
    a_counter_left_behind,
    a_death,
    a_wrong_bit,
    open_faulty,
)

CHOSEN = ("experts, untied", "experts, untied, bf16", "overlap")


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_transitions_of_several_models_are_bit_equal_and_train_on_as_the_source_does() -> None:
    """Two of each: every axis changes in some of them."""
    result = run(quick([family for family in FAMILIES if family.name in CHOSEN]))
    found = result.figures
    assert found["transitions"] == found["bit_equal"] == 2 * len(CHOSEN)
    assert found["max_relative_difference"] < 1e-5
    assert found["max_relative_difference_bf16"] < 0.1  # where routers choose otherwise
    assert min(found[f"changing_{axis}"] for axis in ("tp", "pp", "cp", "ep", "vpp", "sp")) > 0
    assert found["uneven"] > 0
    assert {sample["call"] for sample in result.samples} >= {"build", "move", "train"}


# ---- what is found where a transition is wrong


def proof_with(fault: Callable[[Any], None], directory: Path) -> Proof:
    """Of tp2 to dp2, where the target gets a fault once its state has arrived."""
    family = Family("dense", {}, ["tp2 > dp2"])
    config = with_prepared_data(family.config(text_data(directory)))
    with Pool(4, partial(open_faulty, fault, directory)) as pool:
        (proof,) = Prover(pool).proofs(family, config)
    return proof


@pytest.mark.timeout(200)
def test_a_copy_with_a_wrong_bit_is_found(tmp_path: Path) -> None:
    proof = proof_with(a_wrong_bit, tmp_path)
    assert not proof.bit_equal
    assert any("parameter" in text for text in proof.disagreements)


@pytest.mark.timeout(200)
def test_a_counter_that_is_in_no_tensor_is_missed_by_the_steps_after(tmp_path: Path) -> None:
    proof = proof_with(a_counter_left_behind, tmp_path)
    assert proof.disagreements == ()
    assert proof.apart > 1e-4


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_worker_that_dies_ends_the_proof(tmp_path: Path) -> None:
    with pytest.raises(LiverError, match=r"move the state from source to target .*code 9"):
        proof_with(a_death, tmp_path)


def test_every_seat_has_another_worker_elsewhere() -> None:
    for layout, workers in (("dp2", (3, 1)), ("dp3", (0, 4, 2)), ("dp5", (4, 3, 2, 1, 0))):
        before = RankMap(Layout.parse(layout), workers)
        after = on_other_workers(before, range(5))
        assert after.layout == before.layout
        assert all(a != b for a, b in zip(before.workers, after.workers, strict=True))


def test_how_far_steps_are_apart() -> None:
    assert apart([(2.0, 1.0), (4.0, 0.5)], [(2.0, 1.0), (4.0, 0.5)]) == 0
    assert apart([(2.0, 1.0), (4.0, 0.6)], [(2.0, 1.0), (4.0, 0.5)]) == pytest.approx(0.2)
    assert apart([(2.0, math.nan), (4.0, 0.5)], [(2.0, 1.0), (4.0, 0.5)]) == math.inf
