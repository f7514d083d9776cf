"""The script's benchmark: its arithmetic, and one small measurement where there is a checkout."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from benchmarks.script.__main__ import (
    COMPARED_STEPS,
    ELASTIC,
    PLAIN,
    QUICK,
    Block,
    difference,
    main,
    result,
)
from benchmarks.script.sides import Outcome
from liver_hpc.errors import LiverError

real = pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="wants MEGATRON_LM=CHECKOUT")


def test_a_ratio_is_of_cpu_seconds_a_step_and_the_median_of_pairs() -> None:
    """Blocks may have a step more or less."""
    blocks = {
        PLAIN: [Block(10, 9.0, 10.0), Block(5, 5.0, 6.0), Block(10, 11.0, 12.0)],
        ELASTIC: [Block(10, 10.0, 20.0), Block(10, 10.0, 24.0), Block(11, 11.0, 22.0)],
    }
    found = result(blocks, 0.5, QUICK)
    assert found.figures == pytest.approx(
        {"throughput_ratio": 1.0, "throughput_ratio_all": 0.5, "max_relative_difference": 0.5}
    )
    assert (found.repeats, found.spread["throughput_ratio"].low) == (3, pytest.approx(0.9))
    first = next(row for row in found.rows if row["side"] == PLAIN)
    tokens = 10 * QUICK.batch * QUICK.sequence
    assert first["cpu_s_per_1000_tokens"] == pytest.approx(9.0 * 1000 / tokens)


def test_losses_and_norms_are_compared_over_the_first_steps_of_both() -> None:
    steps = range(3, 3 + COMPARED_STEPS + 10)
    mine = {step: Outcome(2.0, 1.0) for step in steps}
    theirs = {step: Outcome(2.0, 1.0) for step in steps if step != 4}
    assert difference(mine, theirs) == 0.0
    assert difference(mine, theirs | {5: Outcome(2.0, 0.8)}) == pytest.approx(0.25)
    assert difference(mine, theirs | {5: Outcome(2.5, 1.0)}) == pytest.approx(0.2)
    assert difference(mine, theirs | {steps[-1]: Outcome(9.0, 1.0)}) == 0.0
    with pytest.raises(LiverError, match="wanted losses"):
        difference(mine, {})
    with pytest.raises(LiverError, match=r"step 5: .*nan"):
        difference(mine, theirs | {5: Outcome(2.0, math.nan)})


@real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_sides_train_alike(megatron_lm: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    assert main(["--quick", "--megatron-lm", str(megatron_lm), "--json", str(file)]) == 0
    written = json.loads(file.read_text())
    assert written["figures"]["max_relative_difference"] < 1e-5
    assert 0.3 < written["figures"]["throughput_ratio"] < 3.0
    assert {(row["pair"], row["side"]) for row in written["rows"]} == {
        (pair, side) for pair in range(QUICK.pairs) for side in (PLAIN, ELASTIC)
    }
