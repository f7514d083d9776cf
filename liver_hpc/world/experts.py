"""Mixtures of experts in a process that trains one world and rehearses another, and in batches that
ranks cannot share evenly: which tokens count is asked of the thread that computes them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import torch
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP

from liver_hpc.transport.streams import lane_streams
from liver_hpc.world import thread

# Any: what is replaced in them has no types.
moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")

_COUNTS = "local_tokens_per_expert"


@cache
def redirect() -> None:
    """Mends a global; once a process, before the first model. No communication."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # the router asks for it also without Transformer Engine


def prepare(module: torch.nn.Module) -> None:
    """Makes a chunk's routers count no tokens of micro-batches that count nowhere, and gives its
    token dispatchers and shared experts streams of their own: Megatron has one a process, in which
    training would wait for what is rehearsed, or draws one that a lane may have."""
    for part in module.modules():
        if isinstance(getattr(part, _COUNTS, None), torch.Tensor):
            _keep_counts(part)
    dispatchers: list[Any] = [getattr(part, "token_dispatcher", None) for part in module.modules()]
    with_stream = [each for each in dispatchers if hasattr(each, "cuda_dtoh_stream")]
    if with_stream:
        stream = _own_stream(module)
        for dispatcher in with_stream:
            dispatcher.cuda_dtoh_stream = stream
    shared = [part for part in module.modules() if isinstance(part, SharedExpertMLP)]
    if overlapped := [part for part in shared if part.stream is not None]:
        stream = _own_stream(module)
        for part in overlapped:
            part.stream = stream


def _own_stream(module: torch.nn.Module) -> Any:
    """One that nothing else has as long as the module lives."""
    if torch.cuda.is_available():
        return lane_streams(torch.device("cuda", torch.cuda.current_device())).take(module)
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def _keep_counts(part: torch.nn.Module) -> None:
    """Has a router put back what it has counted of padding."""
    kept: list[torch.Tensor] = []

    def keep(router: Any, _inputs: Any) -> None:
        micro_batch = thread.here.micro_batch
        if micro_batch is not None and micro_batch.padding:
            kept[:] = [getattr(router, _COUNTS).clone()]

    def put_back(router: Any, _inputs: Any, _output: Any) -> None:
        while kept:
            getattr(router, _COUNTS).copy_(kept.pop())

    part.register_forward_pre_hook(keep)
    part.register_forward_hook(put_back)
