"""What a written checkpoint says beside its tensors."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.torch_dist import contents
from liver_hpc.checkpoint.torch_dist.contents import common_state
from liver_hpc.checkpoint.torch_dist.files import Table
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Layout
from tests.fakes import tiny_run
from tests.unit.checkpoint.disk import scalar_state

GROUP = {"lr": 1e-3, "is_expert_parallel": False}


def written(ep: int = 1, **extras: Any) -> dict[str, Any]:
    layout = Layout(1, 1, 2, ep=ep)
    apart = {**GROUP, "is_expert_parallel": True}
    return common_state(tiny_run(), layout, scalar_state(5), [GROUP, apart, GROUP], extras)


def test_what_the_recipe_says_is_completed() -> None:
    """Its schedule is that of the job to the last digit, which the job compares."""
    args = argparse.Namespace(hidden_size=32, iteration=0, data_parallel_size=7)
    state = written(args=args, opt_param_scheduler={"lr_warmup_steps": 105.3}, further=1)
    assert (state["iteration"], state["further"]) == (5, 1)
    told = vars(state["args"])
    assert (told["hidden_size"], told["iteration"], told["data_parallel_size"]) == (32, 5, 7)
    assert told["consumed_train_samples"] == 40
    schedule = state["opt_param_scheduler"]
    assert (schedule["num_steps"], schedule["lr_warmup_steps"]) == (40, 105.3)
    assert schedule["lr_decay_steps"] == 60 * 8


def test_a_schedule_that_is_behind_is_written_so() -> None:
    scalars = scalar_state(5).model_copy(update={"unscheduled_samples": 16})
    state = common_state(tiny_run(), Layout(1, 1, 2), scalars, [GROUP], {})
    assert state["opt_param_scheduler"]["num_steps"] == 24
    args = state["args"]
    assert (args.consumed_train_samples, args.skipped_train_samples) == (40, 16)


def read(monkeypatch: pytest.MonkeyPatch, sharding: str) -> contents.Contents:
    """A checkpoint of a job that shards its experts otherwise than the rest."""
    sizes = {"tensor_model_parallel_size": 2, "expert_tensor_parallel_size": 1, "num_experts": 4}
    common = written(args=argparse.Namespace(**sizes))
    common["content_metadata"]["distrib_optim_sharding_type"] = sharding
    monkeypatch.setattr(contents, "read_table", lambda _path: Table({}, {}))
    monkeypatch.setattr(contents, "read_common", lambda _path, _table: common)
    return contents.read_contents(Path("saved"))


def test_the_layout_that_saved_matters_in_buckets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not read(monkeypatch, contents.MODEL_SPACE).by_buckets
    with pytest.raises(CheckpointError, match="parallel-size of 2: let the job save it once more"):
        assert read(monkeypatch, contents.BUCKET_SPACE).layout


def test_experts_of_their_own_ranks_have_an_optimizer_of_their_own() -> None:
    one = written()["optimizer"]
    assert one["optimizer"]["param_groups"] == [{**GROUP, "step": 5}]
    both = written(ep=2)["optimizer"]
    assert sorted(both) == [0, 1]
    kept = [both[number]["optimizer"]["param_groups"] for number in (0, 1)]
    assert [[group["is_expert_parallel"] for group in groups] for groups in kept] == [
        [False],
        [True],
    ]
