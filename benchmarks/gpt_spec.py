"""The spec of a GPT by rule, for sizes at which nobody wants to build the model.

It says what is derived from the model itself (`liver_hpc/world/derive.py`); a test compares.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.stages import stage_layers
from liver_hpc.layout.tensors import Chunks, ModelSpec, TensorSpec, pipeline
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.gpt_costs import layer_costs

_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def gpt_spec(
    config: GPTConfig,
    pps: Iterable[int] | None = None,
    vpps: Iterable[int] = (1,),
    eps: Iterable[int] = (),
) -> ModelSpec:
    """The tensors in the order of GPTModel.parameters(), the buffers behind them.

    It has the stages of every one of `pps` (default: all up to the number of layers) with each of
    `vpps` by which the layers can be divided, and the homes of experts for each of `eps`.
    """
    parts = [list(_before(config))]
    parts += [list(_layer(config, number)) for number in range(config.layers)]
    parts.append(list(_behind(config)))
    in_order = _buffers_last(itertools.chain(*parts))
    numbers = {tensor.name: number for number, tensor in enumerate(in_order)}

    def chunk(begin: int, end: int) -> tuple[int, ...]:
        """The tensors of the layers from `begin` to before `end`, and of the model's ends."""
        held = parts[begin + (begin > 0) : end + 1 + (end == config.layers)]
        copied = config.tied_embeddings and begin > 0 and end == config.layers
        tensors = _buffers_last(itertools.chain(*held, parts[0][: int(copied)]))
        return tuple(numbers[tensor.name] for tensor in tensors)

    stages: dict[str, tuple[Chunks, ...]] = {}
    for pp, vpp in itertools.product({1, *(pps or range(2, config.layers + 1))}, vpps):
        counts = _layers_of_chunks(config, pp, vpp)
        if counts:
            ends = list(itertools.accumulate(counts, initial=0))
            chunks = [chunk(*ends_of) for ends_of in itertools.pairwise(ends)]
            key = pipeline(Layout(1, pp, 1, vpp=vpp))
            stages[key] = tuple(tuple(chunks[stage::pp]) for stage in range(pp))
    homes = {ep: tuple(_home(config, tensor, ep) for tensor in in_order) for ep in eps}
    tensors = tuple(
        replace(tensor, expert=any(known[number] is not None for known in homes.values()))
        for number, tensor in enumerate(in_order)
    )
    return ModelSpec(tensors, stages, 4 if config.dtype == "fp32" else 2, homes)


def _layers_of_chunks(config: GPTConfig, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of each chunk, in the order of the model; () where they cannot be divided so."""
    if vpp == 1:
        return stage_layers(layer_costs(config), pp)
    chunks = pp * vpp
    return (config.layers // chunks,) * chunks if pp > 1 and config.layers % chunks == 0 else ()


def _home(config: GPTConfig, tensor: TensorSpec, ep: int) -> int | None:
    """The ep rank that holds a tensor: neighbouring experts are together."""
    expert = _EXPERT.search(tensor.name)
    return int(expert[1]) * ep // config.experts.number if expert else None


def _buffers_last(tensors: Iterable[TensorSpec]) -> list[TensorSpec]:
    return sorted(tensors, key=lambda tensor: tensor.role == "buffer")


def _before(config: GPTConfig) -> Iterator[TensorSpec]:
    """The embeddings; that of the words first, of which the last stage may have a copy."""
    shape = (config.vocab_size, config.hidden)
    word = "embedding.word_embeddings.weight"
    yield TensorSpec(word, shape, 0, shape[:1], config.tied_embeddings)
    if config.position == "learned":
        shape = (config.seq_length, config.hidden)
        yield TensorSpec("embedding.position_embeddings.weight", shape)


def _behind(config: GPTConfig) -> Iterator[TensorSpec]:
    yield from _norm(config, "decoder.final_layernorm", config.hidden)
    if not config.tied_embeddings:
        shape = (config.vocab_size, config.hidden)
        yield TensorSpec("output_layer.weight", shape, 0, shape[:1])


def _layer(config: GPTConfig, layer: int) -> Iterator[TensorSpec]:
    prefix, hidden = f"decoder.layers.{layer}", config.hidden
    width = config.head_width
    qkv = (config.heads + 2 * config.groups) * width

    def linear(name: str, rows: tuple[int, ...], cols: int, tp_dim: int) -> Iterator[TensorSpec]:
        """rows: the blocks of the output, whose features are split where tp_dim is 0."""
        shape = (sum(rows), cols)
        weight = f"{prefix}.{name}.weight"
        yield TensorSpec(weight, shape, tp_dim, rows if tp_dim == 0 else (cols,))
        if config.bias:
            # A row-parallel layer adds its bias after the reduction: a copy on every tp rank.
            split = (0, rows) if tp_dim == 0 else (None, ())
            yield TensorSpec(f"{prefix}.{name}.bias", shape[:1], *split)

    def feed_forward(name: str, ffn: int) -> Iterator[TensorSpec]:
        rows = (ffn, ffn) if config.activation == "swiglu" else (ffn,)
        yield from linear(f"{name}.linear_fc1", rows, hidden, 0)
        yield from linear(f"{name}.linear_fc2", (hidden,), ffn, 1)

    yield from _norm(config, f"{prefix}.input_layernorm", hidden)
    yield from linear("self_attention.linear_proj", (hidden,), config.heads * width, 1)
    yield from linear("self_attention.linear_qkv", (qkv,), hidden, 0)
    for name in ("q", "k") if config.qk_norm else ():
        yield from _norm(config, f"{prefix}.self_attention.{name}_layernorm", width)
    yield from _norm(config, f"{prefix}.pre_mlp_layernorm", hidden)
    experts = config.experts
    if not config.layers_with_experts[layer]:
        yield from feed_forward("mlp", config.ffn_hidden)
        return
    router = f"{prefix}.mlp.router"
    yield TensorSpec(f"{router}.weight", (experts.number, hidden))
    if experts.bias_update_rate:
        bias = f"{router}.expert_bias"
        yield TensorSpec(bias, (experts.number,), role="buffer", element_bytes=4)
    for expert in range(experts.number):
        name = f"mlp.experts.local_experts.{expert}"
        yield from feed_forward(name, experts.ffn_hidden or config.ffn_hidden)
    if experts.shared_ffn_hidden:
        yield from feed_forward("mlp.shared_experts", experts.shared_ffn_hidden)


def _norm(config: GPTConfig, name: str, width: int) -> Iterator[TensorSpec]:
    for part in ["weight"] if config.normalization == "rmsnorm" else ["weight", "bias"]:
        yield TensorSpec(f"{name}.{part}", (width,))
