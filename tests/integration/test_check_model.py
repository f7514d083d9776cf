"""`liver check-model` on models of a user's own: one that says rightly how it is split, one not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from liver_hpc.cli.check_model import check_model
from liver_hpc.config.schema import RunConfig
from tests.integration.runs import run_config

GATED = """
import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.module import MegatronModule
from pydantic import BaseModel

from liver_hpc.recipes.base import Recipe

WIDTH, INNER = 8, 16


class Gated(MegatronModule):
    '''Gate and up lie in one weight, one behind the other.'''

    def __init__(self, context):
        super().__init__(TransformerConfig(
            num_layers=1, hidden_size=WIDTH, num_attention_heads=2, use_cpu_initialization=True,
            perform_initialization=False, tensor_model_parallel_size=context.layout.tp))
        shared = dict(config=self.config, init_method=None, bias=False, tp_group=context.groups.tp)
        self.up = ColumnParallelLinear(WIDTH, 2 * INNER, gather_output=False, **shared)
        self.down = RowParallelLinear(
            INNER, WIDTH, input_is_parallel=True, skip_bias_add=False, **shared)

    def forward(self, x):
        gate, up = self.up(x)[0].chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)[0]


class Right(Gated):
    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        name = f"{prefix}up.weight"
        state[name] = apply_swiglu_sharded_factory(state[name], sharded_offsets)
        return state


class RightGated(Recipe):
    class Options(BaseModel):
        pass

    model = Right

    def build(self, context):
        return self.model(context)

    def batch(self, step):
        size = self.config.train.global_batch
        return range(step * size, (step + 1) * size)

    def loss(self, model, samples):
        x = torch.randn(len(samples), WIDTH, generator=torch.Generator().manual_seed(samples[0]))
        loss = lambda y: ((y - x.flip(-1)) ** 2).mean()
        return model(x), lambda y: (loss(y), {"loss": loss(y).detach()})


class WrongGated(RightGated):
    model = Gated
"""


def gated(tmp_path: Path, kind: str) -> RunConfig:
    (tmp_path / "gated.py").write_text(GATED)
    return run_config(
        tmp_path, 10, initial=1, recipe=f"gated:{kind}", model={}, recipe_directory=tmp_path,
        layouts={1: {"tp": 1}, 2: {"tp": 2}},
    )  # fmt: skip


@pytest.mark.parametrize(("kind", "equal"), [("RightGated", True), ("WrongGated", False)])
def test_blocks_that_are_declared_as_one_are_found(
    kind: str, equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    said: list[str] = []
    try:
        assert check_model(gated(tmp_path, kind), said.append) is equal
    finally:
        sys.modules.pop("gated", None)
    assert [line.partition(":")[0] for line in said] == ["tp1 pp1 dp1", "tp2 pp1 dp1"]
    assert said[1].endswith(": the same") is equal
