"""What a rank reads of global batches, and in which thread."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.world.batches import Batches


class OneSample:
    """A recipe of one step; its data tells what its thread had entered before."""

    config = SimpleNamespace(train=SimpleNamespace(read_ahead=1, steps=1, micro_batch=1))
    loss_communicates = False
    reading = contextlib.nullcontext()

    def __init__(self) -> None:
        self.entered: set[str] = set()

    def batch(self, _step: int) -> list[int]:
        return [0]

    def sample_numbers(self, _step: int) -> range:
        return range(1)

    def enter(self) -> None:
        self.entered.add(threading.current_thread().name)

    def fetch(self, _samples: Any, **_where: Any) -> tuple[str, bool]:
        name = threading.current_thread().name
        return name, name in self.entered


def test_what_is_read_ahead_is_read_with_the_device_of_the_worker() -> None:
    """A thread begins with the first GPU: what it pins would open that one, too."""
    recipe: Any = OneSample()
    batches = Batches(recipe, Layout(1, 1, 1), Coordinate(0, 0, 0), None, recipe.enter)
    [(_, told)] = batches.read(batches.begin(0))
    batches.close()
    assert told == ("read-ahead", True)
