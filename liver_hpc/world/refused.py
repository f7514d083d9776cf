"""Options of a model that would compute something else in another layout: refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from liver_hpc.errors import PlanError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import First
from liver_hpc.world import megatron
from liver_hpc.world.draws import is_undrawn
from liver_hpc.world.sharded import Frame, Shards, state_tensors, whole_of

_LAYOUT_DEPENDENT_BALANCING = {
    "global_aux_loss": "its counts run on across steps, and differ between data-parallel ranks",
    "sinkhorn": "it balances the tokens of one rank, which are others in another layout",
}
_BALANCING = ("aux_loss", "seq_aux_loss", "none")
_PROCESS_WIDE = "the scale of its loss is one for the process, which a rehearsal would change"
_SCALES = "its scales run on across steps in extra state, which is not moved"
_WEIGHED = "auxiliary losses weigh what their micro-batch does in the global batch"
_NOISE = "its noise is drawn for the tokens of one rank, which are others in another layout"
_OPTIONS = {
    "fp16": "its loss scale runs on across steps, and is not moved; bf16 needs none",
    "fp8": _SCALES,
    "fp4": _SCALES,
    "tp_comm_overlap": "its buffers are made once a process, for one layout",
    "experimental_attention_variant": _PROCESS_WIDE,
    "moe_input_jitter_eps": _NOISE,
    "moe_router_topk_limited_devices": "its groups of experts are the ep ranks; "
    "moe_router_num_groups and moe_router_group_topk are the same in every layout",
    "moe_router_force_load_balancing": _NOISE,
    "moe_router_force_biased": _NOISE,
    "moe_expert_rank_capacity_factor": "which tokens are dropped depends on what lies on one rank "
    "together, and so on the layout",
    "grad_scale_func": f"it would scale the loss alone, as {_WEIGHED}",
    "moe_grad_scale_func": _WEIGHED,
    "mtp_grad_scale_func": _WEIGHED,
    "overlap_moe_expert_parallel_comm": "its schedule asks a model for its parts, which a loss "
    "does not give",
    "fine_grained_activation_offloading": "what it offloads is noted once a process, in the first "
    "step, which is a rehearsal's",
    "qk_clip": "the weights are changed after the optimizer's step",
    "use_mup": "all parameters have one learning rate",
    "finalize_model_grads_func": "gradients are finished by Megatron's own function",
}
_SHAPES = "what stages send has the shape that `hidden_shape` says, and no other"
_OPTIONS_OF_PIPELINES = {
    "variable_seq_lengths": _SHAPES,
    "mtp_standalone": _SHAPES,
    "num_microbatches_with_partial_activation_checkpoints": "a loss is not told which "
    "micro-batches compute layers again",
    "use_ring_exchange_p2p": "it wants a torch that has ring_exchange",
}
_WIDEST_BYTES = 8
_MOST_NAMED = 8

_DISCARDING = frozenset({"layernorm", "moe_act", "mla_up_proj"})
"""What selective recomputation discards the output of, and not the inside."""


def refuse_other_kinds(module: Any) -> None:
    """Raises PlanError for what is no model of Megatron's, such as a plain torch module."""
    config = getattr(module, "config", None)
    if not isinstance(module, MegatronModule) or not isinstance(config, TransformerConfig):
        of = f" with a {type(config).__name__}" if config is not None else ""
        raise PlanError(
            f"build gave a {type(module).__name__}{of}, wanted a MegatronModule with a "
            "TransformerConfig: a plain torch module becomes one as an attribute of such, whose "
            "forward calls it"
        )


def refuse_options(module: torch.nn.Module, layout: Layout) -> None:
    """Raises PlanError for options and layers of a seat's model, as a recipe built it, with which
    training would not be the same in another layout."""
    problems = [*_sizes_wrong(module.config, layout), *_layout_dependent(module.config, layout)]
    problems += [*_predictions(module, layout), *_unsupported(module, layout)]
    problems += _running_statistics(module)
    if problems:
        raise PlanError("; ".join(problems))


def refuse_dtypes(module: Any) -> None:
    """Raises PlanError for tensors of a module, as it is trained, whose elements cannot be moved:
    what is trained has one precision, which that of the optimizer's main copy depends on."""
    wanted = torch.bfloat16 if module.config.bf16 else torch.float32
    for name, tensor in state_tensors(module).items():
        if isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad:
            if tensor.dtype != wanted:
                told = f"{name} is {tensor.dtype}, where all that is trained is to be {wanted}"
                if tensor.dtype == torch.bfloat16:
                    told += "; with bf16=True in the TransformerConfig all of it is bf16"
                raise PlanError(told)
        elif tensor.element_size() > _WIDEST_BYTES:
            raise PlanError(f"{name} is {tensor.dtype}: elements have at most 8 bytes")


def refuse_undrawn(module: torch.nn.Module) -> None:
    """Raises PlanError for buffers, and for tensors in attributes, of which values were to be drawn
    as the module was built, or come of such, parameters among them, which are filled later. What
    has a graph is computed again in each forward, as by `weight_norm`."""
    for path, part in module.named_modules():
        for name, value in {**part._buffers, **vars(part)}.items():
            if not isinstance(value, torch.Tensor) or value.grad_fn is not None:
                continue
            if is_undrawn(value) or (not value.is_meta and value.isnan().any()):
                where = f"{path}.{name}".lstrip(".")
                raise PlanError(
                    f"{where} is drawn at random as the model is built, or computed of what is, "
                    "and would differ between workers: draw from a generator with a seed of its "
                    "own"
                )


def refuse_unknown(firsts: Mapping[str, First]) -> None:
    """Raises PlanError for parameters that the model fills with what cannot be drawn again."""
    unknown = [f"{name} ({first})" for name, first in firsts.items() if isinstance(first, str)]
    if unknown:
        further = f" and {len(unknown) - _MOST_NAMED} more" if len(unknown) > _MOST_NAMED else ""
        raise PlanError(
            "first values that cannot be had from the model are to be given by the recipe's "
            f"`initial` or drawn one by one: {', '.join(unknown[:_MOST_NAMED])}{further}"
        )


def _sizes_wrong(config: Any, layout: Layout) -> Iterator[str]:
    """Megatron's own idea of the layout, where the recipe gave one."""
    for option, size in (
        ("tensor_model_parallel_size", layout.tp),
        ("pipeline_model_parallel_size", layout.pp),
        ("virtual_pipeline_model_parallel_size", layout.vpp),
        ("context_parallel_size", layout.cp),
        ("expert_model_parallel_size", layout.ep),
    ):
        given = getattr(config, option, None) or 1
        # A model that knows nothing of context parallelism would count its loss several times.
        if given != size and (given != 1 or option == "context_parallel_size"):
            yield f"the model's {option} is {given}, where the layout {layout} has {size}"
    shares = bool(getattr(config, "sequence_parallel", False))
    # Either way masks and gradients of what tp ranks have in common would differ between them.
    if shares != layout.sequence_parallel:
        yield (
            f"the model's sequence_parallel is {shares}, where the layout {layout} has "
            f"{layout.sequence_parallel}: give its TransformerConfig `megatron_sizes(layout)` of "
            "liver_hpc.recipes.base"
        )


def _layout_dependent(config: Any, layout: Layout) -> Iterator[str]:
    for option, why in _OPTIONS.items():
        if getattr(config, option, None):
            yield f"{option}: {why}"
    if getattr(config, "cuda_graph_impl", "none") != "none":
        yield "cuda_graph_impl: a CUDA graph replays the memory and groups of one world"
    if (
        getattr(config, "multi_latent_attention", False)
        and layout.tp > 1
        and not layout.sequence_parallel
    ):
        yield (
            "multi_latent_attention with tp wants sequence parallelism: add sp to the layout; "
            "Megatron sums the gradients of what all tp ranks project down with it alone"
        )
    if not getattr(config, "num_moe_experts", None):
        return
    expert_tp = config.expert_tensor_parallel_size
    if expert_tp not in (None, layout.tp):
        yield (
            f"expert_tensor_parallel_size is {expert_tp}: it must be tp, {layout.tp}, as with "
            "another one Megatron gives silently wrong gradients in some layouts"
        )
    if layout.tp > 1 and not layout.sequence_parallel:
        yield "experts with tp want sequence parallelism: add sp to the layout"
    balancing = config.moe_router_load_balancing_type
    for kind in [balancing] if isinstance(balancing, str) else balancing:
        if kind not in _BALANCING:
            why = _LAYOUT_DEPENDENT_BALANCING.get(kind, "it was not tried with a live handoff")
            yield (
                f"moe_router_load_balancing_type {kind}: {why}; {', '.join(_BALANCING)} are the "
                "same in every layout"
            )
    shares = layout.tp * layout.cp
    by_tokens = config.calculate_per_token_loss and _has_auxiliary_losses(config)
    if by_tokens and shares > 1 and not megatron.weighs_auxiliary_losses_by_sequences():
        yield (
            "calculate_per_token_loss with auxiliary losses of experts: megatron-core before 0.19 "
            f"weighs them by the tokens of one rank, of which {layout} has {shares} to a "
            "micro-batch"
        )
    if config.moe_expert_capacity_factor is not None:
        yield (
            "moe_expert_capacity_factor: which tokens are dropped depends on what lies on one "
            "rank together, and so on the layout"
        )


def _predictions(module: Any, layout: Layout) -> Iterator[str]:
    """Of further tokens."""
    config = module.config
    if not getattr(config, "mtp_num_layers", None):
        return
    if layout.cp > 1:
        yield (
            "mtp_num_layers with cp: Megatron sends tokens to neighbouring ranks over the default "
            "group, which does not exist here"
        )
    if layout.pp > 1 and getattr(module, "share_embeddings_and_output_weights", False):
        yield (
            "mtp_num_layers with pp and tied embeddings: the last stage would have an output "
            "weight that is not trained, with which Megatron saves no checkpoint; untie them"
        )
    again = getattr(config, "recompute_granularity", None) == "full"
    if again and config.recompute_method == "uniform" and config.recompute_num_layers != 1:
        yield (
            f"mtp_num_layers with recompute_num_layers {config.recompute_num_layers}: Megatron "
            "wants 1"
        )


def _has_auxiliary_losses(config: Any) -> bool:
    coefficients = config.moe_aux_loss_coeff
    if not isinstance(coefficients, Sequence):
        coefficients = [coefficients]
    balanced = config.moe_router_load_balancing_type != "none" and any(coefficients)
    return balanced or bool(config.moe_z_loss_coeff)


def _unsupported(module: Any, layout: Layout) -> Iterator[str]:
    """What Megatron would not say before a step, and then in words of its own."""
    config = module.config
    for option, why in _OPTIONS_OF_PIPELINES.items() if layout.pp > 1 else ():
        if (given := getattr(config, option, None)) is not None and given is not False:
            yield f"{option} with pp: {why}"
    if getattr(config, "overlap_p2p_comm", False):
        yield (
            "overlap_p2p_comm: such messages of a pipeline go over the default group, which does "
            "not exist here"
        )
    if getattr(config, "distribute_saved_activations", False):
        yield (
            "distribute_saved_activations: Megatron shares them over a group of parallel_state, "
            "which is never initialised here"
        )
    granularity = getattr(config, "recompute_granularity", None)
    if granularity == "selective" and not megatron.transformer_engine_is_here():
        for name in sorted(_DISCARDING & {*config.recompute_modules}):
            yield f"recompute_modules {name}: Megatron wants Transformer Engine for it"
    trained = {parameter.requires_grad for parameter in module.parameters()}
    if granularity is not None and False in trained and not megatron.blocks_of_layers(module):
        yield (
            "recompute_granularity with frozen parameters: there is no block of layers of "
            "Megatron's, and so the first ones that are trained may get no gradients"
        )
    if granularity == "full" and config.recompute_method == "uniform":
        for block in megatron.blocks_of_layers(module):
            layers = block.num_layers_per_pipeline_rank
            if layers % config.recompute_num_layers:
                yield (
                    f"recompute_num_layers {config.recompute_num_layers} does not divide the "
                    f"{layers} layers of a chunk"
                )


def _running_statistics(module: torch.nn.Module) -> Iterator[str]:
    for name, part in module.named_modules():
        if isinstance(part, torch.nn.modules.batchnorm._NormBase) and part.track_running_stats:
            yield (
                f"{name} ({type(part).__name__}) keeps running statistics, which differ between "
                "data-parallel ranks"
            )


def refuse_unmarked(module: torch.nn.Module, shards: Shards, frame: Frame) -> None:
    """Raises PlanError for parameters that do not say whether their gradient is to be summed over
    tp ranks, where each of those computes its share of the sequence.

    Without the mark the loss is right at first, and the copies drift apart.
    """
    added = {  # before the sequence is split
        id(parameter)
        for part in module.modules()
        if isinstance(part, LanguageModelEmbedding)
        for name, parameter in part.named_parameters()
        if name in ("position_embeddings.weight", "tokentype_embeddings.weight")
    }
    for name, parameter in module.named_parameters():
        whole = frame.tensors[whole_of(name, shards[name].parts)]
        copied = parameter.numel() == math.prod(whole.shape)
        marked = hasattr(parameter, "sequence_parallel") or id(parameter) in added
        if parameter.requires_grad and copied and not marked:
            raise PlanError(
                f"{name} does not say whether its gradient is a share with sequence parallelism: "
                "set its attribute sequence_parallel"
            )


def refuse_other_rates(module: torch.nn.Module, shards: Shards, decoupled: Set[str]) -> None:
    """Raises PlanError for parameters that have another learning rate than where nothing is split:
    copies would drift apart, or training depend on the layout.

    So it is in 0.16 with the copy of the embedding that a last stage predicts further tokens with.
    decoupled: names of the whole model's parameters that have `optimizer.decoupled_lr`.
    """
    for name, parameter in module.named_parameters():
        whole = whole_of(name, shards[name].parts)
        if megatron.is_decoupled(parameter) != (whole in decoupled):
            has, lacks = ("lacks", "has") if whole in decoupled else ("has", "lacks")
            raise PlanError(
                f"{name} {has} optimizer.decoupled_lr, which {whole} of the whole model {lacks}: "
                "see to its attribute is_embedding_or_output_parameter"
            )
