"""What Megatron keeps of a world that is closed, and with it the world's memory and connections."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from liver_hpc.world import module_globals

# Any: it has no types.
moe_utils: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")


def forget(chunks: Sequence[torch.nn.Module], groups: Any) -> None:
    """Drops it. Worlds that train meanwhile lose nothing but what is computed again."""
    for part in [part for chunk in chunks for part in chunk.modules()]:
        _clear_dispatcher(getattr(part, "token_dispatcher", None))
    clear_caches(chunks)
    module_globals.forget(groups)
    _clear_losses([group for group in vars(groups).values() if group is not None])


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


def _clear_losses(groups: list[Any]) -> None:
    """The process's record of auxiliary losses keeps the group over which they are to be summed."""
    for record in _records():
        for name, value in record.items():
            if any(value is group for group in groups):
                record[name] = None


def _records() -> list[dict[str, Any]]:
    predictions = MTPLossLoggingHelper.tracker
    if hasattr(moe_utils, "get_moe_metrics_tracker"):  # after 0.16: objects
        metrics = [*moe_utils.get_moe_metrics_tracker().metrics.values()]
        return [predictions, *map(vars, metrics)]
    return [predictions, *moe_utils.get_moe_layer_wise_logging_tracker().values()]
