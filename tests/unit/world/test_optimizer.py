"""What Adam counts its steps in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from liver_hpc.world.optimizer import create_state, step_counters


class Fused:
    """Counts in the parameter group, but where that is empty, as Transformer Engine's does."""

    def __init__(self, *sizes: tuple[int, ...]) -> None:
        self.param_groups: list[dict[str, Any]] = [
            {"params": [torch.zeros(size) for size in group]} for group in sizes
        ]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        for group in self.param_groups:
            if group["params"]:
                group["step"] += 1


def test_a_fused_adam_counts_where_this_rank_owns_something() -> None:
    adam = Fused((4, 2), ())
    one = SimpleNamespace(optimizer=adam)
    create_state([one])
    adam.step()
    assert [held["step"] for held in step_counters([one])] == [1]


def test_torchs_counts_in_one_tensor_a_parameter() -> None:
    one = SimpleNamespace(optimizer=torch.optim.Adam([torch.zeros(4), torch.zeros(2)]))
    create_state([one])
    assert [float(held["step"]) for held in step_counters([one])] == [0.0, 0.0]
