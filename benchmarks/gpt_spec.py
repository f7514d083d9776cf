"""The spec of a GPT by rule, for sizes at which nobody wants to build the model.

It says what is derived from the model itself (`liver_hpc/world/derive.py`); a test compares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from liver_hpc.layout.stages import stage_layers
from liver_hpc.layout.tensors import Chunks, ModelSpec, TensorSpec
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.gpt_costs import layer_costs


def gpt_spec(config: GPTConfig, pps: Iterable[int] | None = None) -> ModelSpec:
    """The tensors in the order of GPTModel.parameters(), with the stages of every one of `pps`
    (default: all up to the number of layers).

    Raises ValueError for a model with experts.
    """
    if config.experts.number:
        raise ValueError("there is no rule for the spec of a model with experts: derive it")
    vocabulary = (config.vocab_size, config.hidden)
    first = [
        TensorSpec(
            "embedding.word_embeddings.weight",
            vocabulary,
            0,
            vocabulary[:1],
            config.tied_embeddings,
        )
    ]
    if config.position == "learned":
        shape = (config.seq_length, config.hidden)
        first.append(TensorSpec("embedding.position_embeddings.weight", shape))
    layers = [list(_layer(config, number)) for number in range(config.layers)]
    last = list(_norm(config, "decoder.final_layernorm"))
    if not config.tied_embeddings:
        last.append(TensorSpec("output_layer.weight", vocabulary, 0, vocabulary[:1]))
    size, before, behind = len(layers[0]), len(first), len(first) + sum(map(len, layers))
    stages: dict[str, tuple[Chunks, ...]] = {"pp1": ((tuple(range(behind + len(last))),),)}
    for pp in pps or range(2, config.layers + 1):
        if pp == 1:
            continue
        table, begin = [], before
        for count in stage_layers(layer_costs(config), pp):
            table.append(tuple(range(begin, begin + count * size)))
            begin += count * size
        copies = (0,) if config.tied_embeddings else ()
        table[0] = (*range(before), *table[0])
        table[-1] = (*table[-1], *range(behind, behind + len(last)), *copies)
        stages[f"pp{pp}"] = tuple((indices,) for indices in table)
    tensors = (*first, *(tensor for layer in layers for tensor in layer), *last)
    return ModelSpec(tensors, stages, parameter_bytes=4 if config.dtype == "fp32" else 2)


def _layer(config: GPTConfig, layer: int) -> Iterator[TensorSpec]:
    prefix, hidden, ffn = f"decoder.layers.{layer}", config.hidden, config.ffn_hidden
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

    yield from _norm(config, f"{prefix}.input_layernorm")
    yield from linear("self_attention.linear_proj", (hidden,), config.heads * width, 1)
    yield from linear("self_attention.linear_qkv", (qkv,), hidden, 0)
    yield from _norm(config, f"{prefix}.pre_mlp_layernorm")
    yield from linear(
        "mlp.linear_fc1", (ffn, ffn) if config.activation == "swiglu" else (ffn,), hidden, 0
    )
    yield from linear("mlp.linear_fc2", (hidden,), ffn, 1)


def _norm(config: GPTConfig, name: str) -> Iterator[TensorSpec]:
    for part in ["weight"] if config.normalization == "rmsnorm" else ["weight", "bias"]:
        yield TensorSpec(f"{name}.{part}", (config.hidden,))
