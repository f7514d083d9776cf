"""Global variables, one set a process."""

from megatron.core import Timers
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.training.tokenizer import build_tokenizer

_GLOBAL_ARGS = None
_GLOBAL_TOKENIZER = None
_GLOBAL_TENSORBOARD_WRITER = None
_GLOBAL_TIMERS = None


def get_args():
    assert _GLOBAL_ARGS is not None, "args is not initialized."
    return _GLOBAL_ARGS


def get_tokenizer():
    assert _GLOBAL_TOKENIZER is not None, "tokenizer is not initialized."
    return _GLOBAL_TOKENIZER


def get_timers():
    assert _GLOBAL_TIMERS is not None, "timers is not initialized."
    return _GLOBAL_TIMERS


def get_tensorboard_writer():
    """May be None."""
    return _GLOBAL_TENSORBOARD_WRITER


def set_args(args):
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args


def set_global_variables(args, build_tokenizer=True):
    assert _GLOBAL_ARGS is None, "args is already initialized."
    set_args(args)
    init_num_microbatches_calculator(
        args.rank,
        args.rampup_batch_size,
        args.global_batch_size,
        args.micro_batch_size,
        args.data_parallel_size,
        False,
    )
    if build_tokenizer:
        _build_tokenizer(args)
    _set_tensorboard_writer(args)
    _set_timers(args)


def _build_tokenizer(args):
    global _GLOBAL_TOKENIZER
    _GLOBAL_TOKENIZER = build_tokenizer(args)
    return _GLOBAL_TOKENIZER


def _set_tensorboard_writer(args):
    global _GLOBAL_TENSORBOARD_WRITER
    if args.tensorboard_dir and args.rank == args.world_size - 1:
        from torch.utils.tensorboard import SummaryWriter

        _GLOBAL_TENSORBOARD_WRITER = SummaryWriter(log_dir=args.tensorboard_dir)


def _set_timers(args):
    global _GLOBAL_TIMERS
    _GLOBAL_TIMERS = Timers(args.timing_log_level, args.timing_log_option)
