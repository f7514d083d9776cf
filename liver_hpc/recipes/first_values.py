"""First values as a model's own initialization draws them: what was recorded, drawn anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from liver_hpc.errors import ConfigError
from liver_hpc.layout.tensors import TensorSpec

TRUNCATED = "trunc_normal_"
# fmt: off
DRAWS = frozenset({
    "normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "bernoulli_",
    TRUNCATED,
})
"""What gives every element a random value of its own, whatever it was before."""
ARITHMETIC = frozenset({
    "add_", "sub_", "mul_", "div_", "pow_", "clamp_", "clamp_min_", "clamp_max_", "neg_", "abs_",
    "exp_", "expm1_", "log_", "log1p_", "sqrt_", "rsqrt_", "reciprocal_", "erfinv_", "tanh_",
    "sigmoid_", "sin_", "cos_", "square_",
})
"""What computes each element from its value before, and from numbers."""
# fmt: on
FILL = "fill_"


def replayed(tensor: TensorSpec, generator: torch.Generator) -> torch.Tensor:
    """The first value of a whole tensor, fp32, of its global shape: `tensor.first`, in order.

    Raises ConfigError where that is not known.
    """
    if isinstance(tensor.first, str):
        raise ConfigError(
            f"the first values of {tensor.name} are not known: {tensor.first}; "
            "give them in the recipe's `initial`"
        )
    value = torch.empty(tensor.shape)
    for name, numbers in tensor.first:
        if name in DRAWS:
            draw: Any = torch.nn.init.trunc_normal_ if name == TRUNCATED else getattr(Tensor, name)
            draw(value, *numbers, generator=generator)
        elif name in ARITHMETIC or name == FILL:
            getattr(value, name)(*numbers)
        else:
            raise ConfigError(f"{tensor.name}: no first value comes of {name}{numbers}")
    return value
