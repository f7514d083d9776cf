"""Low-rank adapters beside frozen layers, as docs/how-to/own-model.md has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.processes import run_workers
from tests.integration.random_tokens import RandomTokenGPT
from tests.integration.worlds import Case, apart, train_cases

RANK = 4


class AdaptedGPT(RandomTokenGPT):
    """Of which only adapters of the attention's first layer are trained."""

    def build(self, context: Any) -> Any:
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear
        from megatron.core.transformer.module import MegatronModule

        class Adapted(MegatronModule):  # type: ignore[misc]
            def __init__(self, base: Any) -> None:
                super().__init__(base.config)
                self.base = base
                self.down = torch.nn.Linear(base.input_size, RANK, bias=False)
                self.up = ColumnParallelLinear(
                    RANK, base.output_size, config=base.config, init_method=None, bias=False,
                    gather_output=False, tp_group=context.groups.tp,
                )  # fmt: skip

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
                y, bias = self.base(x)
                return y + self.up(self.down(x))[0], bias

        model = super().build(context).requires_grad_(False)
        for layer in model.decoder.layers:
            attention = layer.self_attention
            attention.linear_qkv = Adapted(attention.linear_qkv)
        return model


FULL = {"recompute": "full"}
MLP = {"recompute": "selective", "recompute_modules": ["mlp"]}


@pytest.mark.timeout(200)
def test_adapters_train_the_same_in_every_layout(tmp_path: Path) -> None:
    layouts = ["dp1", "dp2", "tp2", "pp2", "pp2 vpp2", "cp2"]
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
