"""What a step of a GPT keeps for its backward: bytes of activations. Imports no torch.

Counted as in Reducing Activation Recomputation in Large Transformer Models (arXiv 2205.05198,
section 4), for layers without fused kernels: what each operation keeps, and one byte for each
element of a dropout's mask.
"""

from __future__ import annotations

import itertools

from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.gpt_config import GPTConfig

_FP32 = 4
_MASK = 1


def rehearsal_bytes(
    config: GPTConfig, layout: Layout, stage_layers: tuple[int, ...], micro_batch: int
) -> int:
    """What the worker keeps that keeps most, in bytes: of one micro-batch, in an interleaved
    pipeline of as many as there are stages (`World.warm_up`).

    stage_layers: of each stage, over all of its chunks.
    """
    tokens = micro_batch * config.seq_length // layout.cp
    ends = list(itertools.accumulate(stage_layers))
    layers = [_layer_bytes(config, layout, tokens, each) for each in config.layers_with_experts]
    most = 0
    for stage, (end, count) in enumerate(zip(ends, stage_layers, strict=True)):
        own = _recomputed(config, layers[end - count : end], count // layout.vpp)
        one = sum(kept for kept, _ in own)
        if stage == layout.pp - 1:
            one += _output_bytes(config, layout, tokens)
        held = layout.pp if layout.vpp > 1 else 1
        most = max(most, held * one + max(again for _, again in own))
    return most


def _recomputed(
    config: GPTConfig, layers: list[tuple[int, int]], of_chunk: int
) -> list[tuple[int, int]]:
    """The layers of a stage as Megatron's `recompute_method` has them: "uniform" keeps what comes
    into so many layers, and computes these again together; "block" computes so many of each chunk
    again, and keeps the others whole."""
    if config.recompute != "full":
        return layers
    number, found = config.recompute_num_layers, []
    for start in range(0, len(layers), of_chunk):
        chunk = layers[start : start + of_chunk]
        if config.recompute_method == "block":
            found += chunk[:number] + [(whole, 0) for _, whole in chunk[number:]]
            continue
        parts = [chunk[at : at + number] for at in range(0, of_chunk, number)]
        found += [(part[0][0], sum(whole for _, whole in part)) for part in parts]
    return found


def _layer_bytes(
    config: GPTConfig, layout: Layout, tokens: int, has_experts: bool
) -> tuple[int, int]:
    """Of one layer: what is kept of it, and what one layer's backward computes again."""
    attention, probabilities = _attention_bytes(config, layout, tokens)
    mlp = _mlp_bytes(config, layout, tokens, has_experts)
    whole = attention + probabilities + mlp
    if config.recompute == "full":
        boundary = _unsplit(layout) * tokens * config.hidden * _element_bytes(config)
        return int(boundary), int(whole)
    if config.recompute == "selective":
        again = probabilities if "core_attn" in config.recompute_modules else 0
        again += mlp if ("moe" if has_experts else "mlp") in config.recompute_modules else 0
        return int(whole - again), int(again)
    return int(whole), 0


def _attention_bytes(config: GPTConfig, layout: Layout, tokens: int) -> tuple[float, float]:
    """Kept of a layer's attention: all but the probabilities, and those with what becomes of them.

    In elements of a token: the norm; the inputs of both products and of the projection, of which
    the layers without Transformer Engine keep the queries, keys and values as they were made too;
    norms of queries and keys.
    Probabilities, in fp32 and then in the parameters' precision, are of each pair of tokens.
    """
    each = _element_bytes(config)
    queries, keys = config.heads * config.head_width, config.groups * config.head_width
    split = 2 * queries + 2 * keys
    if not _fused(config):
        split += 2 * queries + (queries if config.groups < config.heads else 0)
    norms = 0
    if config.qk_norm:
        norms = 2 * each + (_FP32 if config.normalization == "rmsnorm" else 0)
    inside = each * split + norms * (queries + keys)
    kept = _norm_bytes(config, layout, tokens) + tokens * inside / layout.tp
    if _fused(config):
        return kept, 0.0  # its attention keeps none
    pairs = tokens * config.seq_length * config.heads / layout.tp
    one = _FP32 + (each if config.dropout or each != _FP32 else 0)
    return kept, pairs * (one + _MASK * (config.dropout > 0))


def _mlp_bytes(config: GPTConfig, layout: Layout, tokens: int, has_experts: bool) -> float:
    """Kept of a layer's feed-forward block: the norm, and of each unit of its width the halves that
    are gated, the gate and their product, or the activation's input and output. With experts, of
    each that a token goes to."""
    each, experts = _element_bytes(config), config.experts
    units, copies = config.ffn_hidden, 0
    if has_experts:
        units = experts.topk * (experts.ffn_hidden or config.ffn_hidden)
        units += experts.shared_ffn_hidden or 0
        copies = 2 * experts.topk  # tokens as they are sent, and as they come back
    parts = 4 if config.activation == "swiglu" else 2
    inside = config.hidden * copies + parts * units / layout.tp
    return _norm_bytes(config, layout, tokens) + tokens * each * inside


def _norm_bytes(config: GPTConfig, layout: Layout, tokens: int) -> float:
    """Kept of a norm before a block: its input and its output, and the mask of the dropout behind
    the block. RMSNorm without a kernel of its own keeps the normalized input in fp32 too, and
    where that is not the parameters' precision, the input."""
    each = _element_bytes(config)
    one = 2 * each + _MASK * (config.dropout > 0)
    if not _fused(config) and config.normalization == "rmsnorm":
        one += _FP32 + (_FP32 if each != _FP32 else 0)
    return tokens * config.hidden * _unsplit(layout) * one


def _output_bytes(config: GPTConfig, layout: Layout, tokens: int) -> int:
    """Kept behind the layers: the last norm, and for each entry of the vocabulary what the loss
    makes of it in fp32, beside the logits where they are not that."""
    each = _element_bytes(config)
    logits = config.vocab_size / layout.tp * (_FP32 + (each if each != _FP32 else 0))
    return int(_norm_bytes(config, layout, tokens) + tokens * logits)


def _unsplit(layout: Layout) -> float:
    """The share that a worker has of what lies between tensor-parallel regions."""
    return 1 / layout.tp if layout.sequence_parallel else 1.0


def _element_bytes(config: GPTConfig) -> int:
    return 4 if config.dtype == "fp32" else 2


def _fused(config: GPTConfig) -> bool:
    """Whether the layers are Transformer Engine's; "auto" may mean that, and need not."""
    return config.implementation == "te"
