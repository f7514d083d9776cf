"""What the layers of a GPT cost, by which a pipeline's stages are made. Imports no torch."""

from __future__ import annotations

from liver_hpc.layout.stages import LayerCosts
from liver_hpc.recipes.gpt_config import GPTConfig

SOFTMAX_OPERATIONS = 5
"""For each entry of the vocabulary: its maximum, difference, exponential, sum and quotient."""


def layer_costs(config: GPTConfig) -> LayerCosts:
    """The times that the run file gives (`model.layer_times`), or else operations by rule."""
    times = config.layer_times
    if times is None:
        return operations(config)
    layers = times.layer if isinstance(times.layer, tuple) else (times.layer,) * config.layers
    return LayerCosts(layers, times.embedding, times.output)


def operations(config: GPTConfig) -> LayerCosts:
    """Floating-point operations of a forward, for each token.

    A matrix of n elements makes 2 n of them, and backward twice as many everywhere. Norms and
    activations are not counted, and the embedding's look-up is as good as none. In a layer with
    experts a token goes to `topk` of them and to the shared one.
    """
    hidden, experts = config.hidden, config.experts
    queries, keys = config.heads * config.head_width, config.groups * config.head_width
    attention = 4 * hidden * (queries + keys) + 4 * config.seq_length * queries
    mlp = 2 * (3 if config.activation == "swiglu" else 2) * hidden  # for each unit of its width
    width = experts.topk * (experts.ffn_hidden or config.ffn_hidden)
    width += experts.shared_ffn_hidden or 0
    with_experts = attention + 2 * hidden * experts.number + mlp * width
    dense = attention + mlp * config.ffn_hidden
    layers = [with_experts if chosen else dense for chosen in config.layers_with_experts]
    output = (2 * hidden + SOFTMAX_OPERATIONS) * config.vocab_size
    return LayerCosts(tuple(map(float, layers)), float(hidden), float(output))
