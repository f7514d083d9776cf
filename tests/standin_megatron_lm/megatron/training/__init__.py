"""Stands for Megatron-LM's training package beside the installed megatron-core."""

from megatron.training.global_vars import get_args, get_timers, get_tokenizer
from megatron.training.training import get_train_valid_test_num_samples, pretrain
from megatron.training.utils import print_rank_0

__all__ = [
    "get_args",
    "get_timers",
    "get_tokenizer",
    "get_train_valid_test_num_samples",
    "pretrain",
    "print_rank_0",
]
