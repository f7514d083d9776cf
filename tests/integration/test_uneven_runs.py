"""A run that loses one of four workers trains on with the three that are left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic import elastic_run, losses
from tests.integration.runs import finish, run_config, start, worst_difference

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("unhurried_steps"),
]

LAYOUTS = {1: [{"dp": 1}], 3: [{"dp": 3}, {"pp": 3}], 4: [{"dp": 4}]}
FOUR_TO_THREE = [
    {"at_step": 3, "workers": 3},
    {"at_step": 4, "layout": {"pp": 3}},
    {"at_step": 5, "workers": 4},
]
QUIET_STEPS = 330


def test_three_of_four_workers_train_on_with_the_same_losses(tmp_path: Path) -> None:
    """Three divide neither the four micro-batches of the batch nor the four layers."""
    quiet_config = run_config(tmp_path / "quiet", QUIET_STEPS, initial=1, layouts=LAYOUTS)
    with pytest.MonkeyPatch.context() as hurried:
        hurried.delenv("LIVER_TEST_STEP_S")
        quiet = finish(start(quiet_config))
    uneven = elastic_run(tmp_path, FOUR_TO_THREE, layouts=LAYOUTS, workers={"initial": 4})
    outcomes = [(r.target, r.outcome, r.digest_equal) for r in uneven.reconfigurations]
    assert outcomes == [
        ("tp1 pp1 dp3", "completed", True),
        ("tp1 pp3 dp1", "completed", True),
        ("tp1 pp1 dp4", "completed", True),
    ]
    assert worst_difference(losses(uneven), losses(quiet)) <= 1e-4
