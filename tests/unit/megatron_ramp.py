"""Megatron's own ramp-up of the batch, which megatron-core has up to 0.17."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core import num_microbatches_calculator

_CALCULATOR: Any = getattr(
    num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator", None
)
has_ramp = pytest.mark.skipif(_CALCULATOR is None, reason="this megatron-core has no ramp-up")


def ramp_calculator(start: int, increment: int, samples: int, whole: int) -> Any:
    """Of micro-batches of one sample and one replica."""
    return _CALCULATOR(whole, 1, 1, False, 1, start, increment, samples)
