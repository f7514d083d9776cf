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
    kept = [(place, *place.copy()) for place in buffers.all_buffers(chunks)]
    try:
        with megatron.without_gathers(chunks), megatron.kept_streams(), torch.no_grad():
            for chunk in chunks:
                chunk.eval()
            yield
    finally:
        for part, mode in modes:
            part.training = mode
        for place, tensor, values in kept:
            place.put(tensor, values)
