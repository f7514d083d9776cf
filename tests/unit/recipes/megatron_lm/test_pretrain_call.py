"""What of a script's call of `pretrain` is refused, by stand-ins for its configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from liver_hpc.recipes.megatron_lm.pretrain_call import builder_of, refused


class Builder:
    def build_distributed_models(self) -> None:
        """As a script has it."""


class Megatrons(Builder):
    build_distributed_models = lambda self: None  # noqa: E731


Megatrons.build_distributed_models.__module__ = "megatron.training.models.gpt"


@dataclass
class Model:
    builder: str = "__main__.Own"
    pre_wrap_hooks: list[Callable[..., Any]] = field(default_factory=list)


@dataclass
class Train:
    train_iters: int = 10
    exit_interval: int | None = None


@dataclass
class Container:
    model: Model | None
    train: Train


@pytest.fixture
def args(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    utilities: Any = ModuleType("megatron.training.argument_utils")
    utilities.pretrain_cfg_container_from_args = lambda args, model: Container(
        model, Train(args.train_iters)
    )
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)
    return SimpleNamespace(train_iters=10)


def test_what_every_script_gives_is_taken(args: SimpleNamespace) -> None:
    given = {"train_valid_test_dataset_provider": len, "forward_step_func": len, "store": None}
    assert refused({**given, "model_provider": len, "args_defaults": {}}, args, None) == []
    container = Container(Model(), Train())
    assert refused({**given, "cfg_container": container}, args, Megatrons) == []


@pytest.mark.parametrize("name", ["process_non_loss_data_func", "pg_collection"])
def test_what_is_not_used_is_named(name: str, args: SimpleNamespace) -> None:
    (told,) = refused({"model_provider": len, name: len}, args, None)
    assert told == f"gives {name} to pretrain, which is not used here"


def test_a_model_that_is_changed_behind_its_builder_is_refused(args: SimpleNamespace) -> None:
    container = Container(Model(pre_wrap_hooks=[len]), Train())
    hooks, wraps = refused({"cfg_container": container}, args, Builder)
    assert hooks.startswith("has pre_wrap_hooks of its model")
    assert wraps.startswith("has Builder.build_distributed_models")


def test_a_configuration_that_is_not_the_arguments_is_refused(args: SimpleNamespace) -> None:
    container = Container(None, Train(train_iters=20, exit_interval=3))
    found = refused({"cfg_container": container}, args, None)
    assert [each.split()[1] for each in found] == ["train.exit_interval", "train.train_iters"]


def test_a_builder_may_be_the_script_s() -> None:
    main: Any = ModuleType("__main__")
    main.Own = Builder
    assert builder_of(Model(), main) is Builder
    config = SimpleNamespace(builder="elsewhere.Own", get_builder_cls=lambda: Megatrons)
    assert builder_of(config, main) is Megatrons
