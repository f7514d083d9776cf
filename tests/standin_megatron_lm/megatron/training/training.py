"""A training loop of megatron-core's parts, without checkpoints and interleaved pipelines."""

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunMode, initialize_rerun_state_machine
from megatron.core.transformer.module import Float16Module
from megatron.core.utils import get_model_config
from megatron.training.arguments import _print_args, parse_args, validate_args
from megatron.training.global_vars import get_args, get_tensorboard_writer, set_global_variables
from torch.utils.data import default_collate


def pretrain(
    train_valid_test_dataset_provider,
    model_provider,
    model_type,
    forward_step_func,
    process_non_loss_data_func=None,
    extra_args_provider=None,
    args_defaults={},  # noqa: B006, as Megatron-LM has it
    get_embedding_ranks=None,
    get_position_embedding_ranks=None,
    non_loss_data_func=None,
    store=None,
    inprocess_call_wrapper=None,
):
    args = validate_args(parse_args(extra_args_provider), args_defaults)
    _print_args("arguments", args)
    assert args.save is None, "the stand-in writes no checkpoints"
    assert args.load is None, "the stand-in reads no checkpoints"
    set_global_variables(args)
    initialize_rerun_state_machine(mode=RerunMode.DISABLED)
    torch.distributed.init_process_group(args.distributed_backend)
    mpu.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
        get_embedding_ranks=get_embedding_ranks,
    )
    seed = args.seed + 100 * mpu.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    model, optimizer, scheduler = _setup(model_provider, model_type)
    train, valid, _ = train_valid_test_dataset_provider(get_train_valid_test_num_samples())
    _train(forward_step_func, model, optimizer, scheduler, train, valid)


def get_train_valid_test_num_samples():
    args = get_args()
    train = args.train_samples or args.train_iters * args.global_batch_size
    rounds = train // args.global_batch_size // args.eval_interval + 1
    return train, rounds * args.eval_iters * args.global_batch_size, 0


def _setup(model_provider, model_type):
    args = get_args()
    ends = {"ignore_virtual": True}
    module = model_provider(
        pre_process=mpu.is_pipeline_first_stage(**ends),
        post_process=mpu.is_pipeline_last_stage(**ends),
    )
    module.model_type = model_type
    for parameter in module.parameters():
        tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
    if args.bf16:
        module = Float16Module(module.config, module)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=args.bf16 and not args.grad_reduce_in_bf16,
        overlap_grad_reduce=args.overlap_grad_reduce,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    model = DistributedDataParallel(get_model_config(module), options, module)
    model.config.finalize_model_grads_func = finalize_model_grads
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            min_lr=args.min_lr,
            decoupled_lr=args.decoupled_lr,
            decoupled_min_lr=args.decoupled_min_lr,
            weight_decay=args.weight_decay,
            adam_beta1=args.adam_beta1,
            adam_beta2=args.adam_beta2,
            adam_eps=args.adam_eps,
            clip_grad=args.clip_grad,
            bf16=args.bf16,
            params_dtype=args.params_dtype,
            use_distributed_optimizer=args.use_distributed_optimizer,
        ),
        [model],
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=(args.lr_decay_iters or args.train_iters) * args.global_batch_size,
        lr_decay_style=args.lr_decay_style,
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def _train(forward_step_func, model, optimizer, scheduler, train, valid):
    args, writer = get_args(), get_tensorboard_writer()
    batches, held_out = _batches(train), _batches(valid)
    for iteration in range(1, args.train_iters + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = _global_batch(forward_step_func, model, batches)
        _, norm, _ = optimizer.step()
        scheduler.step(increment=args.global_batch_size)
        args.consumed_train_samples += args.global_batch_size
        if writer:
            writer.add_scalar("lm loss", loss, iteration)
            writer.add_scalar("grad-norm", norm, iteration)
        if args.eval_iters and iteration % args.eval_interval == 0:
            loss = _evaluate(forward_step_func, model, held_out)
            if writer:
                writer.add_scalar("lm loss validation", loss, iteration)


def _evaluate(forward_step_func, model, batches):
    """The mean over tokens of all the batches."""
    model.eval()
    with torch.no_grad():
        losses = [
            _global_batch(forward_step_func, model, batches, forward_only=True)
            for _ in range(get_args().eval_iters)
        ]
    model.train()
    return sum(losses) / len(losses)


def _global_batch(forward_step_func, model, batches, forward_only=False):
    """Its mean loss over tokens, on the last stage; 0 elsewhere."""
    args = get_args()
    reports = get_forward_backward_func()(
        forward_step_func=forward_step_func,
        data_iterator=batches,
        model=[model],
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    if not reports:
        return 0.0
    total = torch.stack([report["lm loss"] for report in reports]).sum(dim=0)
    torch.distributed.all_reduce(
        total, group=mpu.get_data_parallel_group(with_context_parallel=True)
    )
    return float(total[0] / total[1])


def _batches(dataset):
    """This rank's micro-batches, in the order of Megatron's sampler; None where nothing is read."""
    if dataset is None:
        return None
    size, rank = get_args().micro_batch_size, mpu.get_data_parallel_rank()
    together = size * mpu.get_data_parallel_world_size()
    return (
        default_collate([dataset[first + rank * size + i] for i in range(size)])
        for first in range(0, len(dataset) - together + 1, together)
    )


def num_floating_point_operations(args, batch_size):
    """Of one batch, roughly: six a parameter of the layers and token."""
    parameters = 12 * args.num_layers * args.hidden_size**2
    return 6 * parameters * args.seq_length * batch_size
