"""What Megatron keeps of a world that is closed, and with it the world's memory and connections."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from liver_hpc.world import module_globals


def forget(chunks: Sequence[torch.nn.Module], groups: Any) -> None:
    """Drops it. Worlds that train meanwhile lose nothing but what is computed again."""
    for part in [part for chunk in chunks for part in chunk.modules()]:
        _clear_dispatcher(getattr(part, "token_dispatcher", None))
    clear_caches(chunks)
    module_globals.forget(groups)


def _clear_dispatcher(dispatcher: Any) -> None:
    """A token dispatcher keeps the probabilities of its last forward, and so the graph of that: a
    cycle through autograd's own memory, which Python does not collect."""
    for name, value in vars(dispatcher).items() if dispatcher is not None else ():
        if isinstance(value, torch.Tensor):
            setattr(dispatcher, name, None)


def clear_caches(chunks: Iterable[torch.nn.Module]) -> None:
    """A method's cache keeps the object; rotary embeddings, which have one, keep a group, and
    tensors that were made in the lane of whoever asked first."""
    for layer in {type(part) for chunk in chunks for part in chunk.modules()}:
        for ancestor in layer.__mro__:
            for method in vars(ancestor).values():
                clear = getattr(method, "cache_clear", None)
                if callable(clear):
                    clear()
