"""A model that is evaluated, and afterwards trains on as if it had not been."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from liver_hpc.world import buffers, megatron


@contextlib.contextmanager
def undisturbed(chunks: Sequence[Any]) -> Iterator[None]:
    """While it lasts, chunks compute as in validation, and no gradients. At its end everything is
    as it was: which parts train, buffers with routers' counts among them, random streams.

    Parameters must be up to date: none are gathered meanwhile. Not collective.
    """
    modes = [(part, part.training) for chunk in chunks for part in chunk.modules()]
    gathers = [(chunk.config, chunk.config.param_sync_func) for chunk in chunks]
    kept = [(place, *place.copy()) for place in buffers.all_buffers(chunks)]
    try:
        with megatron.kept_streams(), torch.no_grad():
            for chunk in chunks:
                chunk.eval()
                chunk.config.param_sync_func = None
            yield
    finally:
        for config, gather in gathers:
            config.param_sync_func = gather
        for part, mode in modes:
            part.training = mode
        for place, tensor, values in kept:
            place.put(tensor, values)
