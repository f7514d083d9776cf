"""What a schedule draws from: bytes; a smaller schedule is one of fewer and smaller bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Choices:
    """Draws from bytes; 0 once they are used up, which is everywhere the least that can happen."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def used_up(self) -> bool:
        return self._at >= len(self._data)

    def below(self, number: int) -> int:
        """One of 0 to `number` - 1; `number` is at most 256."""
        if self.used_up:
            return 0
        self._at += 1
        return self._data[self._at - 1] % number

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def now_and_then(self, one_in: int) -> bool:
        """True once in so many times."""
        return self.below(one_in) == one_in - 1
