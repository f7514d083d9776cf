"""The recipe of docs/how-to/experts.md, trained, every axis changed live."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.runs import ENDLESS, run_config, start, stop_and_read, watch
from tests.integration.test_own_recipe import recipe_of_page

PAGE = "experts.md"
CHANGES = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    {"pp": 2, "vpp": 2, "cp": 2, "ep": 2},
    {"dp": 3},
]


def test_it_has_fewer_than_40_lines() -> None:
    assert len([line for line in recipe_of_page(PAGE).splitlines() if line.strip()]) < 40


@pytest.mark.long
@pytest.mark.timeout(300)
def test_it_trains_and_every_axis_changes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sparse.py").write_text(recipe_of_page(PAGE))
    monkeypatch.chdir(tmp_path)
    layouts = {1: [{"dp": 1}], 2: CHANGES[:1], 3: CHANGES[3:], 4: CHANGES[1:3]}
    config = run_config(
        tmp_path,
        ENDLESS,
        initial=1,
        recipe="sparse:Sparse",
        layouts=layouts,
        notices=[{"at_step": 5 + n, "layout": layout} for n, layout in enumerate(CHANGES)],
    ).model_copy(update={"model": {}})
    try:
        run = start(config)
        watch(run, lambda status: status.handoffs_done == len(CHANGES), 200.0)
        records = stop_and_read(run)
    finally:
        sys.modules.pop("sparse", None)
        sys.path.remove(str(tmp_path))
    assert [(r.target, r.outcome, r.digest_equal) for r in records.reconfigurations] == [
        ("tp1 pp1 dp2 ep2", "completed", True),
        ("tp2 pp1 dp2 ep2 sp", "completed", True),
        ("tp1 pp2 dp1 cp2 ep2 vpp2", "completed", True),
        ("tp1 pp1 dp3", "completed", True),
    ]
    losses = [record.loss for record in records.steps]
    assert losses[-1] < 0.95 * losses[0]
