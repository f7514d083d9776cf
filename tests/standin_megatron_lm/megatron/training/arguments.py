"""The arguments that this stand-in knows, under Megatron-LM's names and with its defaults."""

import argparse
import dataclasses
import os

import torch
from megatron.core.transformer import TransformerConfig

_WHOLE = {
    "num-layers": None,
    "hidden-size": None,
    "ffn-hidden-size": None,
    "num-attention-heads": None,
    "num-query-groups": 1,
    "kv-channels": None,
    "seq-length": None,
    "max-position-embeddings": None,
    "micro-batch-size": None,
    "global-batch-size": None,
    "train-iters": None,
    "train-samples": None,
    "lr-decay-iters": None,
    "lr-decay-samples": None,
    "lr-warmup-iters": 0,
    "lr-warmup-samples": 0,
    "eval-iters": 100,
    "eval-interval": 1000,
    "log-interval": 100,
    "save-interval": None,
    "seed": 1234,
    "vocab-size": None,
    "make-vocab-size-divisible-by": 128,
    "padded-vocab-size": None,
    "rotary-base": 10000,
    "tensor-model-parallel-size": 1,
    "pipeline-model-parallel-size": 1,
    "context-parallel-size": 1,
    "expert-model-parallel-size": 1,
    "expert-tensor-parallel-size": None,
    "num-virtual-stages-per-pipeline-rank": None,
    "num-experts": None,
    "moe-ffn-hidden-size": None,
    "moe-router-topk": 2,
    "recompute-num-layers": None,
    "timing-log-level": 0,
    "tensorboard-log-interval": 1,
    "num-workers": 2,
}
_BROKEN = {
    "lr": None,
    "min-lr": 0.0,
    "decoupled-lr": None,
    "decoupled-min-lr": None,
    "lr-warmup-fraction": None,
    "weight-decay": 0.01,
    "adam-beta1": 0.9,
    "adam-beta2": 0.999,
    "adam-eps": 1e-8,
    "clip-grad": 1.0,
    "init-method-std": 0.02,
    "norm-epsilon": 1e-5,
    "hidden-dropout": 0.1,
    "attention-dropout": 0.1,
    "rotary-percent": 1.0,
    "moe-aux-loss-coeff": 0.0,
    "moe-z-loss-coeff": None,
}
_TEXT = {
    "transformer-impl": "transformer_engine",
    "tokenizer-type": None,
    "split": None,
    "data-args-path": None,
    "data-cache-path": None,
    "lr-decay-style": "linear",
    "position-embedding-type": "learned_absolute",
    "normalization": "LayerNorm",
    "moe-router-load-balancing-type": "aux_loss",
    "moe-token-dispatcher-type": "allgather",
    "recompute-granularity": None,
    "recompute-method": None,
    "optimizer": "adam",
    "dataloader-type": None,
    "distributed-backend": "nccl",
    "tensorboard-dir": None,
    "timing-log-option": "minmax",
    "save": None,
    "load": None,
    "ckpt-format": "torch_dist",
}
_LISTS = ("data-path", "train-data-path", "valid-data-path", "test-data-path")
_ON = (
    "mock-data",
    "swiglu",
    "bf16",
    "fp16",
    "group-query-attention",
    "qk-layernorm",
    "sequence-parallel",
    "use-distributed-optimizer",
    "overlap-grad-reduce",
    "overlap-param-gather",
    "grad-reduce-in-bf16",
    "use-cpu-initialization",
    "untie-embeddings-and-output-weights",
    "reset-position-ids",
    "reset-attention-mask",
    "eod-mask-loss",
    "calculate-per-token-loss",
    "moe-grouped-gemm",
)
_OFF = {
    "no-initialization": "perform_initialization",
    "no-gradient-accumulation-fusion": "gradient_accumulation_fusion",
    "no-masked-softmax-fusion": "masked_softmax_fusion",
    "no-bias-gelu-fusion": "bias_gelu_fusion",
    "no-bias-swiglu-fusion": "bias_swiglu_fusion",
    "no-bias-dropout-fusion": "bias_dropout_fusion",
    "no-rope-fusion": "apply_rope_fusion",
    "disable-bias-linear": "add_bias_linear",
    "no-create-attention-mask-in-dataloader": "create_attention_mask_in_dataloader",
    "no-check-for-nan-in-loss-and-grad": "check_for_nan_in_loss_and_grad",
    "no-overlap-p2p-communication": "overlap_p2p_comm",
}
_ALWAYS = ("no-persist-layer-norm",)
"""Of TransformerConfig's other values: what a layer without Transformer Engine has."""


def add_megatron_arguments(parser):
    group = parser.add_argument_group(title="stand-in")
    for kind, defaults in ((int, _WHOLE), (float, _BROKEN), (str, _TEXT)):
        for name, default in defaults.items():
            group.add_argument(f"--{name}", type=kind, default=default)
    for name in _LISTS:
        group.add_argument(f"--{name}", nargs="*", default=None)
    for name in (*_ON, *_ALWAYS):
        group.add_argument(f"--{name}", action="store_true")
    for name, destination in _OFF.items():
        group.add_argument(f"--{name}", action="store_false", dest=destination)
    group.add_argument("--moe-layer-freq", type=int, default=1)
    group.add_argument("--rampup-batch-size", nargs="*", default=None)
    return parser


def parse_args(extra_args_provider=None, ignore_unknown_args=False):
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    if extra_args_provider is not None:
        parser = extra_args_provider(parser)
    args = parser.parse_known_args()[0] if ignore_unknown_args else parser.parse_args()
    args.rank = int(os.getenv("RANK", "0"))
    args.world_size = int(os.getenv("WORLD_SIZE", "1"))
    return args


def validate_args(args, defaults={}):  # noqa: B006, as Megatron-LM has it
    """Fills in what follows from the rest."""
    for name, value in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    model = args.tensor_model_parallel_size * args.pipeline_model_parallel_size
    model *= args.context_parallel_size
    assert args.world_size % model == 0, f"world size {args.world_size}, model parallel {model}"
    args.data_parallel_size = args.world_size // model
    if args.global_batch_size is None:
        args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    if args.kv_channels is None:
        args.kv_channels = args.hidden_size // args.num_attention_heads
    if args.ffn_hidden_size is None:
        wide = 4 * args.hidden_size
        args.ffn_hidden_size = int(wide * 2 / 3) // 64 * 64 if args.swiglu else wide
    if args.moe_ffn_hidden_size is None and args.num_experts:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    args.params_dtype = torch.bfloat16 if args.bf16 else torch.float32
    args.virtual_pipeline_model_parallel_size = args.num_virtual_stages_per_pipeline_rank
    if args.virtual_pipeline_model_parallel_size is None:
        args.overlap_p2p_comm = False
    if args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
    args.split = args.split or ("969, 30, 1" if not args.valid_data_path else None)
    if args.position_embedding_type != "rope":
        args.apply_rope_fusion = False
    args.dataloader_type = args.dataloader_type or "single"
    args.iteration = args.consumed_train_samples = args.consumed_valid_samples = 0
    return args


def core_transformer_config_from_args(args, config_class=None):
    config_class = config_class or TransformerConfig
    names = [field.name for field in dataclasses.fields(config_class)]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    given |= {
        "layernorm_epsilon": args.norm_epsilon,
        "persist_layer_norm": not args.no_persist_layer_norm,
        "deallocate_pipeline_outputs": True,
        "pipeline_dtype": args.params_dtype,
        "batch_p2p_comm": not args.overlap_p2p_comm,
        "num_moe_experts": args.num_experts,
        "num_query_groups": args.num_query_groups if args.group_query_attention else None,
        "bias_activation_fusion": args.bias_gelu_fusion,
    }
    if args.swiglu:
        given |= {"activation_func": torch.nn.functional.silu, "gated_linear_unit": True}
        given["bias_activation_fusion"] = args.bias_swiglu_fusion
    return config_class(**given)


def _print_args(title, args):
    if args.rank == 0:
        print(f"{title}: {vars(args)}", flush=True)
