"""Megatron's arguments, validated for layouts and on devices for which it would refuse them."""

from __future__ import annotations

import types
from typing import Any

import pytest

from liver_hpc.recipes.megatron_lm import validation

MEGATRONS = """
import os
import torch

def get_device_arch_version():
    return 9

def validate_args(args, defaults={}):
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.eval_global_batch_size is None:
        args.eval_global_batch_size = args.global_batch_size
    assert args.eval_global_batch_size % (args.micro_batch_size * args.data_parallel_size) == 0
    if args.tensor_model_parallel_size > 1 and get_device_arch_version() < 10:
        assert os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if args.moe_grouped_gemm:
        assert torch.cuda.get_device_capability()[0] >= 8
    return args
"""
"""What `megatron.training.arguments` of 0.18 and later asserts, in short."""


@pytest.fixture
def megatrons(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a node with GPUs, as workers have them."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    module = types.ModuleType("arguments")
    exec(MEGATRONS, vars(module))
    return module


def arguments(**given: Any) -> types.SimpleNamespace:
    modes = {"rampup_batch_size": None, "transformer_impl": "local"}
    plain = {"micro_batch_size": 2, "global_batch_size": 8, "eval_global_batch_size": None}
    modes["moe_grouped_gemm"] = False
    sizes = {"tensor_model_parallel_size": 1, "data_parallel_size": 1, "tokenizer_type": None}
    return types.SimpleNamespace(**modes | plain | sizes | given)


def test_tensor_parallelism_on_a_device_that_megatron_wants_one_queue_for(megatrons: Any) -> None:
    noted = validation.take_over(megatrons)
    args = megatrons.validate_args(arguments(tensor_model_parallel_size=2), {"tokenizer_type": "T"})
    assert (args.tokenizer_type, noted) == ("T", {"tokenizer_type": "T"})


def test_a_layout_that_shares_the_batch_unevenly(megatrons: Any) -> None:
    validation.take_over(megatrons)
    assert megatrons.validate_args(arguments(data_parallel_size=3)).eval_global_batch_size == 8


def test_experts_by_groups_are_read_where_there_is_no_device(megatrons: Any) -> None:
    validation.take_over(megatrons)
    args = megatrons.validate_args(arguments(moe_grouped_gemm=True))
    assert "wants layers of Transformer Engine" in "".join(validation.refused(args))
    args.transformer_impl = "transformer_engine"
    assert validation.refused(args) == []


def test_what_has_no_effect_is_not_left_to_workers(megatrons: Any) -> None:
    """Of a directory for configurations Megatron makes files as it builds a model, or fails."""
    validation.take_over(megatrons)
    idle = {"config_logger_dir": "configurations", "record_memory_history": True, "test_mode": True}
    args = megatrons.validate_args(arguments(**idle))
    assert [getattr(args, name) for name in idle] == ["", False, False]


def test_a_model_that_the_script_has_wrapped_is_refused() -> None:
    (told,) = validation.refused(arguments(modelopt_enabled=True))
    assert "modelopt_enabled" in told


def test_a_job_that_counts_samples_and_evaluates_nothing() -> None:
    args = types.SimpleNamespace(
        train_samples=80,
        train_iters=None,
        global_batch_size=8,
        rampup_batch_size=None,
        eval_iters=0,
        eval_interval=None,
    )
    validation.complete(args)
    assert (args.train_iters, args.eval_interval) == (10, 10)


def test_what_this_megatron_core_ignores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ramped = arguments(rampup_batch_size=["2", "2", "90"])
    core = validation.num_microbatches_calculator
    monkeypatch.setattr(core, "RampupBatchsizeNumMicroBatchesCalculator", None, raising=False)
    assert validation.refused(ramped) == []
    monkeypatch.delattr(core, "RampupBatchsizeNumMicroBatchesCalculator")
    (told,) = validation.refused(ramped)
    assert told.startswith("--rampup-batch-size: megatron-core takes no notice of it from 0.18 on")
    assert validation.refused(arguments()) == []
