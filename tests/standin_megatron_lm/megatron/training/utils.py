"""What a script's forward step asks for."""

import inspect

import torch
from megatron.core import mpu, utils
from megatron.core.datasets.utils import get_blend_from_list
from megatron.training.global_vars import get_args

__all__ = [
    "get_batch_on_this_cp_rank",
    "get_batch_on_this_tp_rank",
    "get_blend_and_blend_per_split",
    "is_first_or_last_pipeline_stage",
    "print_rank_0",
]


def print_rank_0(message):
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        print(message, flush=True)


def get_batch_on_this_cp_rank(batch):
    plain, options = utils.get_batch_on_this_cp_rank, {}
    if "is_hybrid_cp" in inspect.signature(plain).parameters:  # from 0.19 on
        options["is_hybrid_cp"] = False
    return plain(batch, cp_group=mpu.get_context_parallel_group(), **options)


def is_first_or_last_pipeline_stage(vp_stage):
    chunk = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    return mpu.is_pipeline_first_stage(**chunk) or mpu.is_pipeline_last_stage(**chunk)


def get_batch_on_this_tp_rank(data_iterator):
    """A micro-batch, which the first tensor-parallel rank reads and the others hear of."""
    args, device = get_args(), torch.cuda.current_device()
    shape = (args.micro_batch_size, args.seq_length)
    kinds = dict.fromkeys(("tokens", "labels", "position_ids"), torch.int64)
    kinds["loss_mask"] = torch.float32
    if mpu.get_tensor_model_parallel_rank() == 0:
        data = next(data_iterator)
        batch = {name: data[name].cuda(non_blocking=True) for name in kinds}
        mask = data.get("attention_mask")
        batch["attention_mask"] = None if mask is None else mask.cuda(non_blocking=True)
    else:
        batch = {name: torch.empty(shape, dtype=kinds[name], device=device) for name in kinds}
        batch["attention_mask"] = None
        if args.create_attention_mask_in_dataloader:
            whole = (shape[0], 1, shape[1], shape[1])
            batch["attention_mask"] = torch.empty(whole, dtype=torch.bool, device=device)
    source = mpu.get_tensor_model_parallel_src_rank()
    group = mpu.get_tensor_model_parallel_group()
    for name in sorted(batch):
        if batch[name] is not None:
            torch.distributed.broadcast(batch[name], source, group=group)
    return batch


def get_blend_and_blend_per_split(args):
    """(prefixes, weights) for all splits together, and for each of them."""
    each = [args.train_data_path, args.valid_data_path, args.test_data_path]
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    if any(paths is not None for paths in each):
        return None, [get_blend_from_list(paths) for paths in each]
    return None, None
