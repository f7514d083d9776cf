"""How a micro-batch gets to a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.recipes.gpt import GPT


class Copied(Exception):
    """Tells of a copy."""


def reading(tokens: torch.Tensor) -> Any:
    """A recipe whose samples are these, of a model with two words."""
    samples = SimpleNamespace(sample=lambda _index: [tokens] * 3)
    return SimpleNamespace(_samples=samples, options=SimpleNamespace(vocab_size=2))


def test_a_token_that_the_model_has_no_row_for_is_refused() -> None:
    """Over tp ranks Megatron's embedding gives zeros for it, and trains."""
    with pytest.raises(ConfigError, match=r"has a token 2, model\.vocab_size is 2"):
        GPT.fetch(reading(torch.arange(3)), [4], Layout.parse("tp2"), Coordinate(0, 0, 0))


@pytest.mark.parametrize("has_cuda", [True, False])
def test_it_is_read_into_memory_from_which_a_gpu_copies_by_itself(
    has_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[tuple[int, ...]] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.shape)
        return tensor

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    read = GPT.fetch(reading(torch.ones(8)), [4, 5], Layout.parse("dp1"), Coordinate(0, 0, 0))
    assert [part.shape for part in read] == [(2, 8)] * 3
    assert pinned == [(2, 8)] * 3 * has_cuda


def test_its_copy_does_not_hold_up_the_host() -> None:
    """Which would else wait, at each one, for all that the device has to do."""

    class Part:
        def to(self, _device: torch.device, non_blocking: bool = False) -> None:
            raise Copied(non_blocking)

    model: Any = SimpleNamespace(parameters=lambda: iter([torch.ones(1)]))
    with pytest.raises(Copied, match="True"):
        GPT.loss(SimpleNamespace(), model, [Part()] * 3)  # type: ignore[arg-type]
