"""The adapters of docs/how-to/long-sequences.md train the same in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import run_workers
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.test_own_recipe import recipe_of_page
from tests.integration.worlds import Case, apart, train_cases


class AdaptedGPT(RandomTokenGPT):
    def build(self, context: Any) -> Any:
        page: dict[str, Any] = {}
        exec(recipe_of_page("long-sequences.md"), page)
        return page["adapted"](super().build(context), context)


FULL = {"recompute": "full"}
MLP = {"recompute": "selective", "recompute_modules": ["mlp"]}


@pytest.mark.timeout(200)
def test_adapters_train_the_same_in_every_layout(tmp_path: Path) -> None:
    layouts = ["dp1", "dp2", "tp2", "tp2 sp", "pp2", "pp2 vpp2", "cp2"]
    train = {"overlap_grad_reduce": True}
    cases = [Case(layout, recipe=AdaptedGPT) for layout in layouts]
    cases += [
        Case("pp2", MLP, recipe=AdaptedGPT),
        Case("pp2", FULL, recipe=AdaptedGPT),
        Case("dp2", FULL, train, recipe=AdaptedGPT),
    ]
    whole, *others = run_workers(train_cases, 2, tmp_path, cases)[0]
    found = [(case.layout, apart(one, whole)) for case, one in zip(cases[1:], others, strict=True)]
    assert all(value < 1e-5 for _, value in found), found
