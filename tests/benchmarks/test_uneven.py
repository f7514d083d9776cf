"""The fitted model of uneven steps, and one small measurement."""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from pathlib import Path

import pytest

from benchmarks.uneven.__main__ import BATCH, CURVE, DIRECT, EVEN, FULL, ODD, main, result
from benchmarks.uneven.model import Cell, StepModel, ideal
from liver_hpc.errors import LiverError

KNOWN = StepModel(fixed_s=0.05, reduce_s=0.02, each_s=0.03, alone_s=0.025)


def exactly(model: StepModel, turns: int = 2) -> dict[Cell, list[float]]:
    """The times of the benchmark's worlds, were the model true."""
    times_s = {cell: [model.step_s(cell)] * turns for cell in (*EVEN, *ODD)}
    return times_s | dict.fromkeys(DIRECT, [1.0] * turns)


def test_a_step_waits_for_the_worker_that_computes_most() -> None:
    assert (Cell(7, 128).most, Cell(8, 128).most, Cell(4, 128).most) == (19, 16, 32)
    assert KNOWN.step_s(Cell(2, 3)) == KNOWN.step_s(Cell(2, 4))
    assert KNOWN.step_s(Cell(1, 2)) == pytest.approx(0.05 + 2 * 0.025)
    assert KNOWN.step_s(Cell(4, 128)) == pytest.approx(0.05 + 1.5 * 0.02 + 32 * 0.03)


def test_the_fit_finds_the_model_that_made_the_times() -> None:
    found = StepModel.fitted({cell: KNOWN.step_s(cell) for cell in EVEN})
    assert astuple(found) == pytest.approx(astuple(KNOWN))


@pytest.mark.parametrize("cells", [EVEN[:4], [Cell(1, 1), Cell(2, 2)], ODD])
def test_too_few_worlds_are_no_measurement(cells: list[Cell]) -> None:
    with pytest.raises(LiverError, match="the fit wants two even worlds of one worker"):
        StepModel.fitted(dict.fromkeys(cells, 1.0))


def test_figures_of_times_that_the_model_made() -> None:
    found = result(exactly(KNOWN))
    seven, eight = KNOWN.step_s(Cell(7, BATCH)), KNOWN.step_s(Cell(8, BATCH))
    assert found.figures["throughput_7_of_8"] == pytest.approx(eight / seven)
    assert found.figures["uneven_over_model"] == pytest.approx(1.0)
    assert found.figures["shared_cores_7_of_8"] == 1.0
    assert found.figures["ideal_7_of_8"] == 16 / 19
    assert [row["micro_batches"] for row in found.rows] == list(CURVE)
    assert all(0.5 <= row["throughput_4_of_8"] < 1 for row in found.rows)


def test_an_uneven_world_that_is_slower_than_the_model_shows() -> None:
    times_s = exactly(KNOWN)
    times_s[ODD[0]] = [1.5 * KNOWN.step_s(ODD[0])] * 2
    assert result(times_s).figures["uneven_over_model"] == pytest.approx(1.5)


@pytest.mark.parametrize("count", CURVE)
def test_without_fixed_costs_it_is_the_ideal(count: int) -> None:
    bare = StepModel(0.0, 0.0, 0.03, 0.03)
    assert bare.throughput(7, 8, count) == pytest.approx(ideal(7, 8, count))
    assert bare.throughput(4, 8, count) == pytest.approx(0.5)


def test_more_micro_batches_share_more_evenly() -> None:
    assert ideal(7, 8, 8) == 0.5
    assert ideal(7, 8, 512) == 64 / 74
    assert max(cell.micro_batches for cell in FULL.cells) == 16


@pytest.mark.timeout(240)
def test_a_small_measurement(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "u.json")]) == 0
    written = json.loads((tmp_path / "u.json").read_text())
    figures = written["figures"]
    assert 0.5 < figures["throughput_7_of_8"] <= 1
    assert figures["throughput_7_of_8"] > figures["throughput_4_of_8"]
    assert figures["micro_batch_s"] > 0
    assert math.isfinite(figures["uneven_over_model"])
    assert {sample["workers"] for sample in written["samples"]} == {1, 2}
