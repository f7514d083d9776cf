"""What a rank reads of global batches, and in which thread."""

from __future__ import annotations

import contextlib
import threading
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.world import thread
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


class ThreeSamples(OneSample):
    """Two steps of three samples each, which two ranks do not share evenly."""

    config = SimpleNamespace(train=SimpleNamespace(read_ahead=4, steps=2, micro_batch=1))

    def __init__(self) -> None:
        super().__init__()
        self.fetched = SimpleQueue[int]()

    def batch(self, step: int) -> list[int]:
        return [10 * step, 10 * step + 1, 10 * step + 2]

    def sample_numbers(self, step: int) -> range:
        return range(3 * step, 3 * step + 3)

    def fetch(self, samples: Any, **_where: Any) -> None:
        self.fetched.put(samples[0])


def second_of_two(recipe: Any, per_token: bool = False) -> Batches:
    at, layout = Coordinate(0, 0, 1), Layout(1, 1, 2)
    return Batches(recipe, layout, at, None, recipe.enter, per_token)


@pytest.mark.parametrize(
    ("together", "per_token", "weights"),
    [
        (False, False, [2 / 3]),
        (True, False, [4 / 3, 0.0]),
        (False, True, [1.0]),
        (True, True, [1.0, 0.0]),
    ],
)
def test_ranks_whose_loss_may_talk_compute_equally_many(
    together: bool, per_token: bool, weights: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is computed for that counts nothing; by tokens each other one counts as it is."""
    monkeypatch.setattr(ThreeSamples, "loss_communicates", together)
    computed = second_of_two(ThreeSamples(), per_token).of_step(1)
    assert [each.weight for each in computed] == pytest.approx(weights)
    assert [each.padding for each in computed] == [weight == 0.0 for weight in weights]
    assert (computed[0].samples, computed[0].first_sample) == ([11], 4)


def test_a_batch_of_more_samples_than_its_step_has_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ThreeSamples, "sample_numbers", lambda self, step: range(2))
    with pytest.raises(ConfigError, match=r"batch\(0\) gives 3 samples, the global batch .* has 2"):
        second_of_two(ThreeSamples()).of_step(0)


@pytest.mark.parametrize("of_numbers", [True, False])
def test_a_batch_of_an_iterator_is_refused_in_a_rehearsal(
    of_numbers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles that are not numbers may be equal to nothing."""
    drawn = count()
    monkeypatch.setattr(
        ThreeSamples,
        "batch",
        lambda self, step: [next(drawn) if of_numbers else object() for _ in range(3)],
    )
    batches = second_of_two(ThreeSamples())
    assert len(batches.of_step(0)) == 1
    refused = pytest.raises(ConfigError, match=r"batch\(0\) gives other samples when it is asked")
    with thread.rehearsal(), refused if of_numbers else contextlib.nullcontext():
        batches.of_step(0)


def test_the_next_step_is_read_while_one_is_computed() -> None:
    recipe = ThreeSamples()
    batches = second_of_two(recipe)
    batches.begin(0)
    assert [recipe.fetched.get(timeout=10.0) for _ in range(2)] == [1, 11]
    batches.close()
