"""Context parallelism and interleaved pipelines compute what one worker computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.processes import run_workers
from tests.integration.worlds import Case, apart, train_cases

LAYOUTS = [
    "dp1",
    "cp2",
    "tp2 cp2",
    "pp2 cp2",
    "dp2 cp2",
    "pp2 vpp2",
    "pp2 dp2 vpp2",
    "tp2 pp2 vpp2",
]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", [{}, {"tied_embeddings": False, "position": "learned"}])
def test_loss_and_gradient_norm_are_those_of_one_worker(model: dict, tmp_path: Path) -> None:
    cases = [Case(layout, model) for layout in LAYOUTS]
    whole, *others = run_workers(train_cases, 4, tmp_path, cases)[0]
    found = {
        case.layout: apart(other, whole) for case, other in zip(cases[1:], others, strict=True)
    }
    assert all(value < 1e-5 for value in found.values()), found
