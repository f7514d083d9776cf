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

    A matrix of n elements makes 2 n of them. Backward makes twice as many everywhere. Norms and
    activations are not counted, the embedding's look-up is as good as none, and of experts those
    count to which a token is sent.
    """
    hidden, key_value = config.hidden, 2 * config.groups * config.head_width
    attention = 2 * hidden * (2 * hidden + key_value) + 4 * config.seq_length * hidden
    matrices = 3 if config.activation == "swiglu" else 2
    experts = config.experts
    widths = {False: config.ffn_hidden, True: 0}
    if experts.number:
        each = experts.ffn_hidden or config.ffn_hidden
        widths[True] = experts.topk * each + (experts.shared_ffn_hidden or 0)
    layers = tuple(
        float(attention + 2 * matrices * hidden * widths[sparse])
        for sparse in config.layers_with_experts
    )
    output = (2 * hidden + SOFTMAX_OPERATIONS) * config.vocab_size
    return LayerCosts(layers, float(hidden), float(output))
