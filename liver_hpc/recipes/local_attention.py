"""Attention without Transformer Engine, with context parallelism too; for recipes of one's own.

With context parallelism a sample's tokens are shared among neighbouring replicas: of 2 cp chunks,
rank r has the r-th from the front and the r-th from the end, as Megatron has it, so that causal
attention is equal work for all. `share_of_sequence` gives a rank's tokens; `LocalAttention` gathers
keys and values of all.

    layer = get_gpt_layer_local_spec()
    layer.submodules.self_attention.submodules.core_attention = LocalAttention
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.dot_product_attention import DotProductAttention


def positions(length: int, cp: int, rank: int, device: Any = None) -> torch.Tensor:
    """Of a context-parallel rank's tokens in a sample of `length`: [length / cp]."""
    chunk = length // (2 * cp)
    if chunk * 2 * cp != length:
        raise ValueError(f"a sequence of {length} is not a multiple of 2 cp = {2 * cp}")
    places = torch.arange(length, device=device).view(2 * cp, chunk)
    return torch.cat([places[rank], places[2 * cp - 1 - rank]])


def share_of_sequence(group: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """This rank's share of tensors [micro batch, sequence, ...] in a context-parallel group."""
    if group.size() == 1:
        return tensors
    mine = positions(tensors[0].shape[1], group.size(), group.rank(), tensors[0].device)
    return tuple(tensor.index_select(1, mine) for tensor in tensors)


class LocalAttention(DotProductAttention):  # type: ignore[misc]
    """Causal attention of a rank's queries to the keys and values of whole samples, or to as many
    before a query as `window_size` says. Collective over the context-parallel group.

    The mask is made here, so none is to be given. Dropout's mask is a part of the one that a whole
    sample has.
    """

    def __init__(self, config: Any, *args: Any, pg_collection: Any, **options: Any) -> None:
        plain = copy.copy(config)
        plain.context_parallel_size = 1  # which Megatron's class asks for
        super().__init__(plain, *args, pg_collection=pg_collection, **options)
        self.cp_group = pg_collection.cp
        softmax = self.scale_mask_softmax
        self._window: Any = softmax.window_size
        if self._window is not None or self.cp_group.size() > 1:
            # Megatron's masks are of rows that are the last ones of the sample.
            softmax.window_size, softmax.scaled_masked_softmax_fusion = None, False
        if self.cp_group.size() > 1:
            plain_dropout: torch.nn.Dropout = self.get_submodule("attention_dropout")
            self.attention_dropout = _RowsOfDropout(plain_dropout.p, self.cp_group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        """query, key, value: [sequence / cp, micro batch, heads or groups / tp, head dim]."""
        if attention_mask is not None:
            raise ValueError("LocalAttention makes its causal mask itself: give the model None")
        group = self.cp_group
        cp, length = group.size(), query.shape[0] * group.size()
        mine = torch.arange(length, device=query.device)
        if cp > 1:
            order = torch.cat([positions(length, cp, rank, query.device) for rank in range(cp)])
            natural = torch.argsort(order)
            key, value = (
                gather_from_sequence_parallel_region(part, group=group).index_select(0, natural)
                for part in (key, value)
            )
            mine = positions(length, cp, group.rank(), query.device)
        later = torch.arange(length, device=query.device) - mine[:, None]
        before, after = (-1, 0) if self._window is None else self._window  # as Megatron has it
        hidden = later > after
        if before >= 0:
            hidden |= later < -before
        attend = super().forward
        context: torch.Tensor = attend(query, key, value, hidden[None, None], *args, **options)
        return context  # [sequence / cp, micro batch, hidden / tp]


class _RowsOfDropout(torch.nn.Module):
    """Dropout of attention probabilities [micro batch, heads / tp, sequence / cp, sequence]."""

    def __init__(self, p: float, group: Any) -> None:
        super().__init__()
        self.p = p
        self._group = group

    def forward(self, probabilities: torch.Tensor) -> torch.Tensor:
        if not (self.training and self.p):
            return probabilities
        *batch_and_heads, _, length = probabilities.shape
        mine = positions(length, self._group.size(), self._group.rank(), probabilities.device)
        whole = probabilities.new_ones((*batch_and_heads, length, length))
        kept = torch.nn.functional.dropout(whole, self.p)
        return probabilities * kept.index_select(-2, mine)
