"""A model's buffers by the places that they have in it: a forward may put others there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from liver_hpc.errors import PlanError


@dataclass(frozen=True)
class BufferPlace:
    """Where a module has a buffer, which other memory may take the place of."""

    module: Any
    name: str

    @property
    def tensor(self) -> torch.Tensor:
        """Raises PlanError where the module has dropped it."""
        tensor = self.module._buffers.get(self.name)
        if tensor is None:
            raise PlanError(f"{type(self.module).__name__} has dropped its buffer {self.name}")
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Puts a buffer back, with these values.

        One that is no state, and for which there is another size or dtype now, is left: the module
        has noted what it has made it for, as YaRN does of its tables of cosines, and does not make
        it again.
        """
        found = self.module._buffers.get(self.name)
        is_state = self.name not in self.module._non_persistent_buffers_set
        if is_state or found is None or _kind(found) == _kind(tensor):
            self.module._buffers[self.name] = tensor.copy_(values)


def _kind(buffer: torch.Tensor) -> tuple[torch.Size, torch.dtype]:
    return buffer.shape, buffer.dtype


def all_buffers(modules: Iterable[Any]) -> list[BufferPlace]:
    """The buffers of modules, each once."""
    places = [
        BufferPlace(part, name)
        for module in modules
        for part in module.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    return list({id(place.tensor): place for place in places}.values())


@contextmanager
def kept(modules: Iterable[Any]) -> Iterator[None]:
    """At its end the buffers of modules are in their places, with the values that they had."""
    before = [(place, place.tensor, place.tensor.clone()) for place in all_buffers(modules)]
    try:
        yield
    finally:
        for place, tensor, values in before:
            place.put(tensor, values)
