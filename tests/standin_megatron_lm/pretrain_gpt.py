"""A pretraining script of the shape that Megatron-LM's has, for machines without a checkout of it.

What a script hands to `pretrain`, and what it calls, is as in Megatron-LM 0.16; models, datasets
and parallelism are those of the installed megatron-core.
"""

from functools import partial

import torch
from gpt_builders import gpt_builder
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_timers, get_tokenizer, pretrain, print_rank_0
from megatron.training.utils import (
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
    get_blend_and_blend_per_split,
    is_first_or_last_pipeline_stage,
)
from model_provider import model_provider


def get_batch(data_iterator, vp_stage=None):
    if not is_first_or_last_pipeline_stage(vp_stage):
        return None, None, None, None, None
    batch = get_batch_on_this_cp_rank(get_batch_on_this_tp_rank(data_iterator))
    names = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
    return tuple(batch[name] for name in names)


def loss_func(loss_mask, output_tensor, model=None):
    """The sum of the losses, the number of tokens, and both for the report."""
    losses, mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    total = torch.sum(losses * mask)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=total,
            rejection_func=torch.isnan,
            message="found NaN in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
    tokens = mask.sum().clone().detach().to(torch.int)
    report = torch.cat([total.clone().detach().view(1), tokens.view(1)])
    return total, tokens, {"lm loss": report}


def forward_step(data_iterator, model):
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids = get_batch(data_iterator, vp_stage)
    timers("batch-generator").stop()
    output = model(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(loss_func, loss_mask, model=model)


def is_dataset_built_on_rank(vp_stage=None):
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    return is_first_or_last_pipeline_stage(vp_stage) and first


def core_gpt_dataset_config_from_args(args):
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
    )


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    args = get_args()
    print_rank_0("> building train, validation, and test datasets ...")
    return BlendedMegatronDatasetBuilder(
        MockGPTDataset if args.mock_data else GPTDataset,
        train_val_test_num_samples,
        partial(is_dataset_built_on_rank, vp_stage=vp_stage),
        core_gpt_dataset_config_from_args(args),
    ).build()


def get_embedding_ranks(pp_ranks):
    if len(pp_ranks) > 1 and not get_args().untie_embeddings_and_output_weights:
        return [pp_ranks[0], pp_ranks[-1]]
    return [pp_ranks[0]]


if __name__ == "__main__":
    train_valid_test_datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_datasets_provider,
        partial(model_provider, gpt_builder),
        ModelType.encoder_or_decoder,
        forward_step,
        args_defaults={"tokenizer_type": "GPT2BPETokenizer"},
        get_embedding_ranks=get_embedding_ranks,
    )
