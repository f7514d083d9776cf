"""Buffers that a forward replaces, and that are put back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.world import buffers
from liver_hpc.world.chunks import undisturbed


class Counts(torch.nn.Module):
    """Replaces what it counts in; what is made for a length is no state."""

    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2), persistent=persistent)

    def forward(self) -> None:
        self.count = self.count + 1


@pytest.mark.parametrize("persistent", [True, False])
def test_what_a_forward_replaces_by_its_like_is_put_back(persistent: bool) -> None:
    module = Counts(persistent)
    before = module.count
    with buffers.kept([module]):
        module()
    assert module.count is before
    assert module.count.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("length", "dtype"), [(48, torch.float32), (16, torch.bfloat16)])
def test_yarns_tables_are_those_that_it_believes_to_have(
    device: Any, length: int, dtype: torch.dtype
) -> None:
    """Longer than those that it begins with, or of another dtype; also behind an evaluation."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    def yarn() -> Any:
        return YarnRotaryEmbedding(
            8, original_max_position_embeddings=32, use_cpu_initialization=True
        )

    tables = yarn()
    chunk = torch.nn.ModuleList([tables])
    wrapped: Any = chunk
    wrapped.config = SimpleNamespace(param_sync_func=None)
    wrapped.bucket_groups = wrapped.expert_parallel_bucket_groups = ()
    with undisturbed([chunk]):
        tables.get_cached_cos_sin(length, dtype=dtype)
    wanted = yarn().get_cached_cos_sin(length, dtype=dtype)
    for mine, its in zip(tables.get_cached_cos_sin(length, dtype=dtype), wanted, strict=True):
        assert mine.dtype == dtype
        assert torch.equal(mine, its)
