"""The planner's benchmark, and what it compares with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.planner.__main__ import main
from benchmarks.planner.cases import Case, cases, fresh_model
from benchmarks.planner.measure import plan_once, plan_parameters
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER


@pytest.fixture(scope="module", params=["grow", "reshape"])
def case(request: pytest.FixtureRequest) -> Case:
    return next(case for case in cases(64) if case.name == request.param)


def test_megatron_plans_a_transfer_for_every_parameter_that_we_fill(case: Case) -> None:
    """It did plan the whole rank map; a planner that stopped early would be fast."""
    theirs = pytest.importorskip("benchmarks.planner.megatron_planner", exc_type=ImportError)
    model = fresh_model()
    source, target = case.rank_maps()
    moves = [
        move
        for worker in target.workers
        for plan in [transfer_plan(model, source, target, worker)]
        for move in (*plan.receives, *plan.local)
        if move.kind == PARAMETER
    ]
    received = {(move.receiver, move.tensor_index) for move in moves}
    _, transfers = theirs.MegatronPlanner(case).plan()
    assert transfers >= len(received)


def test_a_sample_has_both_ends_and_joiners() -> None:
    grow = next(iter(cases(64)))
    assert grow.sample(3)[0] == 0
    assert grow.sample(3)[-1] == 127
    assert 127 not in grow.source_workers


def test_a_plan_is_timed(case: Case) -> None:
    planned = plan_once(case, 5)
    assert planned.took_s > 0
    assert planned.sends + planned.receives + planned.local > 0
    assert plan_parameters(case, 5) > 0


@pytest.mark.long
def test_the_quick_run_writes_its_figures(tmp_path: Path) -> None:
    assert main(["--quick", "--json", str(tmp_path / "r.json")]) == 0
    written = json.loads((tmp_path / "r.json").read_text())
    figures = written["figures"]
    assert {"plan_s_64", "plan_s_1024", "megatron_over_ours_64"} <= set(figures)
    assert {"resolve_layouts_s_1024", "place_s_1024"} <= set(figures)
    assert 1.0 <= figures["bytes_between_nodes_over_exact"] <= 1.1
    assert {row["handoff"] for row in written["rows"]} == {"grow", "shrink", "reshape"}
