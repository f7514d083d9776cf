"""What a script hands to Megatron's `pretrain`, or has replaced of its loop, that an elastic run
would leave out."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

_TAKEN = (
    "train_valid_test_dataset",
    "model_provider",
    "model_type",
    "forward_step",
    "extra_args_provider",
    "args_defaults",
    "get_embedding_ranks",
    "cfg_container",
    "store",
    "inprocess_call_wrapper",
)
"""How the names of arguments begin that are used here; the last two any script may give."""


_CALLED = ("get_train_valid_test_num_samples", "num_floating_point_operations")
"""The functions of Megatron's loop that are called here too."""


def functions_of(training: ModuleType) -> dict[str, FunctionType]:
    """Those of `megatron.training.training` that make a plain job's steps, by name."""
    return {
        name: value
        for name, value in vars(training).items()
        if isinstance(value, FunctionType)
        and (value.__module__ == training.__name__ or name == "get_megatron_optimizer")
        and name not in _CALLED
    }


def replaced(training: ModuleType, before: Mapping[str, FunctionType]) -> list[str]:
    """What a script has put in the place of such functions, by name."""
    return [
        f"replaces {training.__name__}.{name}, which is not called here"
        for name, plain in before.items()
        if getattr(training, name, None) is not plain
    ]


def builder_of(config: Any, main: ModuleType) -> Any:
    """The class that a model's configuration names; main: the script."""
    module, _, name = config.builder.rpartition(".")
    return getattr(main, name) if module == "__main__" else config.get_builder_cls()


def refused(given: Mapping[str, Any], args: Any, builder: Any) -> list[str]:
    """What is not taken over of the arguments that a script gives to `pretrain`, by name.

    args: Megatron's, as the script has parsed them. builder: of the model; None before 0.19.
    """
    problems = [
        f"gives {name} to pretrain, which is not used here"
        for name in given
        if not name.startswith(_TAKEN)
    ]
    config = given.get("cfg_container")
    if config is None:  # before 0.18
        return problems
    problems += [] if builder is None else _of_model(config.model, builder)
    return [*problems, *_changed(config, args)]


def _of_model(config: Any, builder: Any) -> Iterator[str]:
    """A world wraps the model itself, which `build_model` makes, a chunk at a time."""
    for name in ("pre_wrap_hooks", "post_wrap_hooks"):
        if getattr(config, name, None):
            yield f"has {name} of its model, which are not called here; let build_model do that"
    wraps = builder.build_distributed_models
    if not wraps.__module__.startswith(("megatron.core.", "megatron.training.")):
        name = f"{builder.__name__}.build_distributed_models"
        yield f"has {name}, which is not called here; let build_model do that"


def _changed(config: Any, args: Any) -> Iterator[str]:
    """What the script has set there and not in its arguments, by which a world trains."""
    utilities = importlib.import_module("megatron.training.argument_utils")
    of_arguments = utilities.pretrain_cfg_container_from_args(args, config.model)
    for section in dataclasses.fields(config):
        if section.name == "model":
            continue
        found, plain = (_entries(getattr(each, section.name)) for each in (config, of_arguments))
        for name in sorted(found.keys() | plain.keys()):
            if found.get(name) != plain.get(name):
                where = f"{section.name}.{name} of the configuration for pretrain"
                yield f"changes {where}, which is not used here; set it by model.args"


def _entries(section: Any) -> dict[str, Any]:
    return {} if section is None else vars(section)
