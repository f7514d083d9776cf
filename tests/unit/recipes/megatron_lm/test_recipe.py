"""What a script provides, as a worker has it at its boot."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from liver_hpc.cli.check import check_run
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.completion import load_users_run
from liver_hpc.recipes.megatron_lm import datasets
from liver_hpc.recipes.megatron_lm.recipe import Pretrain, _told_without_an_engine
from liver_hpc.worker.derive import _why_not_here
from tests.unit.recipes.megatron_lm.jobs import JOB, run_file


def test_a_validation_set_is_there_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrain, "script", None)
    monkeypatch.setattr(
        datasets,
        "open_datasets",
        lambda *_args: types.SimpleNamespace(train=range(8000), validation=None),
    )
    load_recipe(load_users_run(run_file(tmp_path, "--eval-iters 0"))).open(tmp_path)
    recipe = load_recipe(load_users_run(run_file(tmp_path)))
    with pytest.raises(ConfigError, match="no validation set; write --eval-iters 0"):
        recipe.open(tmp_path)


@pytest.mark.parametrize(("train", "validation"), [(80, 48), (79, 48), (80, 47)])
def test_samples_that_end_before_the_run_are_found_before_its_first_step(
    train: int, validation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blend without weights has each of its samples once."""
    held = types.SimpleNamespace(train=range(train), validation=range(validation))
    monkeypatch.setattr(Pretrain, "script", None)
    monkeypatch.setattr(datasets, "open_datasets", lambda *_args: held)
    more = "--train-iters 10 --eval-interval 3 --eval-iters 2"
    recipe = load_recipe(load_users_run(run_file(tmp_path, more)))
    if (train, validation) == (80, 48):
        recipe.open(tmp_path)
        return
    with pytest.raises(ConfigError, match=r"set has (79|47) samples, the run takes (80|48)"):
        recipe.open(tmp_path)


def test_a_script_that_is_edited_later_is_that_which_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pretrain, "script", types.SimpleNamespace(text=b"as read", lists={}))
    recipe = load_recipe(load_users_run(run_file(tmp_path)))
    assert [*recipe.texts().values()] == [b"as read"]


def test_data_that_is_not_there_is_told_before_a_worker_boots(tmp_path: Path) -> None:
    more = "--train-data-path /nosuch/a --eval-iters 0"
    path = run_file(tmp_path, more, job=JOB.replace("--mock-data", ""))
    config = load_users_run(path)
    with pytest.raises(ConfigError, match=r"model\.args: --train-data-path: /nosuch/a\.idx is"):
        check_run(config, load_recipe(config))


@pytest.mark.parametrize("installed", [False, True])
def test_layers_of_an_engine_that_cannot_be_imported_are_told_as_such(
    installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is installed may be imported on the nodes."""
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    if installed:
        package = tmp_path / "transformer_engine.py"
        package.write_text("raise ImportError('libcuda.so.1: no such file')")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        monkeypatch.setitem(sys.modules, "transformer_engine", None)
    with (
        pytest.raises(ConfigError, match=r"Engine cannot be imported: .*-impl local") as told,
        _told_without_an_engine(),
    ):
        exec("TESpecProvider()", {})
    assert bool(_why_not_here(told.value)) == installed
    with pytest.raises(NameError, match="mine"), _told_without_an_engine():
        exec("mine()", {})
