"""Megatron-LM's `validate_args`, for what it asks of a plain job alone."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import num_microbatches_calculator

from liver_hpc.recipes.megatron_lm.owned import steps_of
from liver_hpc.world.module_globals import Instead

_OFF = {
    "exit_signal_handler_for_training": False,
    "test_mode": False,
    "config_logger_dir": "",
    "record_memory_history": False,
}
"""Options without effect in an elastic run, which would have one in its workers: a handler of
signals, which only a main thread may install; collectives in each forward; files of whatever is
built, in which Megatron cannot write a model's groups; and a record of the device's memory, begun
wherever a model is built."""
_EVAL_BATCH = "eval_global_batch_size"
_RAMP = "RampupBatchsizeNumMicroBatchesCalculator"


def take_over(arguments: Any) -> dict[str, Any]:
    """Puts one in the place of that of `megatron.training.arguments` which takes any layout on any
    device. Returns what will be noted there: what the script has Megatron take where the job's
    words say nothing.

    The architecture is said to be of the newest kind: with tp or cp Megatron-LM asks older devices
    for CUDA_DEVICE_MAX_CONNECTIONS=1, which orders streams for its overlap, and with which a
    handoff may wait for itself. Nothing else that a run can have is decided by it there. For
    experts by groups it asks torch, which where the arguments are read may have no device.
    """
    plain, noted = arguments.validate_args, dict[str, Any]()
    arguments.get_device_arch_version = lambda: 10
    newest = Instead(torch.cuda, get_device_capability=lambda *_of: (10, 0))
    arguments.torch = Instead(torch, cuda=newest)

    def validate_args(args: Any, defaults: Any = None, **options: Any) -> Any:
        noted.clear()
        noted.update(defaults or {})
        # From 0.18 on that batch must be shared evenly, which ours need not be: 0 always is.
        is_training_s = getattr(args, _EVAL_BATCH, 0) is None
        if is_training_s:
            setattr(args, _EVAL_BATCH, 0)
        validated = plain(args, noted, **options)
        if is_training_s:
            setattr(args, _EVAL_BATCH, args.global_batch_size)
        for name, off in _OFF.items():
            if hasattr(validated, name):
                setattr(validated, name, off)
        return validated

    arguments.validate_args = validate_args
    return noted


def complete(args: Any) -> None:
    """What pretrain would do next with validated arguments."""
    if args.train_samples:
        size, ramp = args.global_batch_size, args.rampup_batch_size
        args.train_iters = steps_of(args.train_samples, size, ramp)
    if not args.eval_interval:  # with evaluation there is one
        args.eval_interval = args.train_iters  # which it divides by all the same


def refused(args: Any) -> list[str]:
    """What cannot be had of validated arguments with this megatron-core, or where it runs."""
    problems = []
    if args.rampup_batch_size and not hasattr(num_microbatches_calculator, _RAMP):
        problems.append(
            "--rampup-batch-size: megatron-core takes no notice of it from 0.18 on, so the plain "
            f"job trains with batches of {args.global_batch_size} from its first step; leave it out"
        )
    if getattr(args, "modelopt_enabled", False):
        problems.append(
            "the script has ModelOpt wrap the model (modelopt_enabled), which is not here"
        )
    if getattr(args, "moe_grouped_gemm", False) and args.transformer_impl != "transformer_engine":
        problems.append(
            "--moe-grouped-gemm: wants layers of Transformer Engine: others have all experts of a "
            "worker in one tensor, which no other layout has; leave it out"
        )
    return problems
