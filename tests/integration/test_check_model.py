"""`liver check-model` on models of a user's own: one that says rightly how it is split, one not."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from liver_hpc.cli import check_model as check
from liver_hpc.cli.check_model import check_model
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.directory import runs_in
from tests.integration.runs import run_config

pytestmark = pytest.mark.timeout(300)

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
            perform_initialization=context.draws, tensor_model_parallel_size=context.layout.tp))
        shared = dict(config=self.config, init_method=self.config.init_method, bias=False,
                      tp_group=context.groups.tp)
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


def test_layouts_of_every_axis_are_compared_each_at_its_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None twice that differs in dp alone, but for one; the learning rate is the whole run's."""
    trained: list[str] = []

    def train(config: RunConfig, layout: Layout) -> list[float]:
        trained.append(str(layout))
        (count,) = check._alone(config, layout).worker_counts
        assert check._alone(config, layout).allowed_layouts(count) == [layout]
        assert check._alone(config, layout).schedule.decay_steps == config.train.steps
        assert check._alone(config, layout).checkpoint.every_steps is None
        return [1.0, 2.0 + 1e-6 * len(trained)]

    monkeypatch.setattr(check, "_train", train)
    schedule = {"warmup_steps": 5, "decay_steps": None}
    config = run_config(tmp_path, 10, schedule=schedule, workers={"max": 8}, layouts={
        2: [{"dp": 2}, {"pp": 2}, {"cp": 1, "dp": 2}],
        4: [{"pp": 2, "dp": 2}, {"pp": 2, "vpp": 2, "dp": 2}, {"tp": 2, "dp": 2}],
    })  # fmt: skip
    said: list[str] = []
    assert check_model(config, said.append)
    assert trained == [
        "tp1 pp1 dp1", "tp1 pp1 dp2", "tp1 pp2 dp1", "tp1 pp2 dp1 vpp2", "tp2 pp1 dp1"
    ]  # fmt: skip
    assert len(said) == 6
    assert said[-1].endswith(f" {tmp_path / 'runs' / 'check-model'}")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_trains_to_no_number_is_another_model(
    value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it begins as it should."""
    for wrong in (("tp2 pp1 dp1",), ("tp1 pp1 dp1",), ("tp2 pp1 dp1", "tp1 pp1 dp1")):
        monkeypatch.setattr(
            check,
            "_train",
            lambda _, layout, of=wrong: [1.0, value if str(layout) in of else 2.0],
        )
        said: list[str] = []
        assert not check_model(run_config(tmp_path, 10, layouts={2: {"tp": 2}}), said.append)
        assert "ANOTHER MODEL" in said[-2]


def test_what_is_too_large_for_this_machine_is_told_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "_free_bytes", lambda: 2_000_000)
    monkeypatch.setattr(check, "local_workers_limit", lambda: 2)
    config = run_config(tmp_path, 10, layouts={1: {}, 2: {"tp": 2}, 4: {"tp": 2, "pp": 2}})
    with pytest.raises(ConfigError) as refused:
        check_model(config, print)
    one, two, four = str(refused.value).splitlines()[1:]
    assert "tp1 pp1 dp1: the model's state has 0.0 GiB, and 0.0 GiB" in one
    assert "--set model.KEY=" in one
    assert "tp2 pp1 dp1" in two
    assert "tp2 pp2 dp1 wants 4 workers, this machine may have 2: check it on a larger one" in four
    assert not (tmp_path / "runs").exists()


@pytest.mark.long
def test_an_interleaved_pipeline_is_the_same_model(tmp_path: Path) -> None:
    config = run_config(tmp_path, 10, layouts={2: {"pp": 2, "vpp": 2}}, train={"global_batch": 4})
    said: list[str] = []
    assert check_model(config, said.append)
    assert said[1].startswith("tp1 pp2 dp1 vpp2: at most ")


def gated(tmp_path: Path, kind: str) -> RunConfig:
    (tmp_path / "gated.py").write_text(GATED)
    return run_config(
        tmp_path, 10, initial=1, recipe=f"gated:{kind}", recipe_directory=tmp_path,
        layouts={1: {"tp": 1}, 2: {"tp": 2}},
    ).model_copy(update={"model": {}})  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "equal"),
    [("RightGated", True), ("WrongGated", False)],
)
def test_blocks_that_are_declared_as_one_are_found(
    kind: str, equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    said: list[str] = []
    try:
        assert check_model(gated(tmp_path, kind), said.append) is equal
    finally:
        sys.modules.pop("gated", None)
    assert [line.partition(":")[0] for line in said[:2]] == ["tp1 pp1 dp1", "tp2 pp1 dp1"]
    assert said[1].endswith(": the same") is equal
    runs, _ = runs_in(tmp_path / "runs" / "check-model")
    assert len(runs) == 2
    assert not [path for run in runs for path in run.path.rglob("iter_*")]
