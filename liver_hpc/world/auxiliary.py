"""Auxiliary losses, of experts and of the tokens that are predicted beside the next one: Megatron
has one scale of their gradients a process, and one record of what they are. A process here trains
one world and rehearses another, and has micro-batches that weigh more than others."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from liver_hpc.world import megatron, thread
from liver_hpc.world.metrics import Sums


@cache
def redirect() -> None:
    """Has both asked of the thread that computes a micro-batch; once a process, before the first
    model. No communication."""
    for scaler in (MoEAuxLossAutoScaler, MTPLossAutoScaler):
        _scale_by_micro_batch(scaler)
    megatron.tell_auxiliary_losses(_tell)


def _scale_by_micro_batch(scaler: Any) -> None:
    """Makes an auxiliary loss's gradient scaled by what its micro-batch says."""

    def forward(ctx: Any, output: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        micro_batch = thread.here.micro_batch
        ctx.like = aux_loss.detach()
        ctx.scale = 1.0 if micro_batch is None else micro_batch.aux_scale
        return output

    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.full_like(ctx.like, ctx.scale)

    scaler.forward, scaler.backward = staticmethod(forward), staticmethod(backward)


def _tell(name: str, loss: torch.Tensor, summed_over: dist.ProcessGroup | None) -> None:
    micro_batch = thread.here.micro_batch
    if micro_batch is not None and not micro_batch.padding:
        part = 1.0 if summed_over is None else 1.0 / summed_over.size()
        micro_batch.told.append((name, loss.detach(), part))


def told(micro_batches: Iterable[thread.MicroBatch]) -> Sums:
    """What they are on this worker, as metrics: each a mean over layers and micro-batches."""
    losses: dict[str, list[torch.Tensor]] = {}
    over: dict[str, float] = {}
    for name, loss, part in [one for each in micro_batches for one in each.told]:
        losses.setdefault(name, []).append(loss)
        over[name] = over.get(name, 0.0) + part
    return {name: (float(torch.stack(its).sum()), over[name]) for name, its in losses.items()}
