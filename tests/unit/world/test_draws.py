"""Models that only their shapes are asked of."""

from __future__ import annotations

import pytest
import torch

from liver_hpc.world.draws import OnMeta


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.to("cuda:0"),
        lambda tensor: tensor.to(torch.device("cpu"), torch.bfloat16),
        lambda tensor: tensor.to(device="cuda", dtype=torch.bfloat16),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.cuda(),
        lambda tensor: tensor.cpu(),
    ],
)
def test_what_is_on_the_meta_device_stays_there_whatever_device_is_named(move: object) -> None:
    assert callable(move)
    with OnMeta():
        moved = move(torch.zeros(2, 3))
    assert moved.is_meta
    assert moved.shape == (2, 3)
