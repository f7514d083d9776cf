"""Attention without Transformer Engine gives the same whoever has which tokens of a sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.recipes import local_attention
from liver_hpc.recipes.local_attention import LocalAttention, positions

LENGTH = 16


class Group:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def attention(kind: Any, cp: int, rank: int, window: tuple[int, int] | None) -> Any:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    config = TransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        window_size=window,
        masked_softmax_fusion=False,
    )
    groups = SimpleNamespace(tp=Group(1, 0), cp=Group(cp, rank))
    return kind(config, 1, AttnMaskType.causal, "self", pg_collection=groups)


@pytest.mark.parametrize("window", [None, (4, 0), (0, 0), (2, 1)])
def test_each_rank_of_a_context_parallel_group_has_its_rows_of_the_whole(
    window: tuple[int, int] | None, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the whole is Megatron's own."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    torch.manual_seed(0)
    query, key, value = (torch.randn(LENGTH, 1, 2, 8) for _ in range(3))
    whole = attention(LocalAttention, 1, 0, window)(query, key, value)
    causal = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    assert torch.equal(
        whole, attention(DotProductAttention, 1, 0, window)(query, key, value, causal)
    )
    order = torch.cat([positions(LENGTH, 2, rank) for rank in range(2)])
    for rank in range(2):
        mine = positions(LENGTH, 2, rank)
        gathered = iter([key[order], value[order]])
        monkeypatch.setattr(
            local_attention,
            "gather_from_sequence_parallel_region",
            lambda part, group, gathered=gathered: next(gathered),
        )
        part = attention(LocalAttention, 2, rank, window)(query[mine], key[mine], value[mine])
        torch.testing.assert_close(part, whole[mine])
