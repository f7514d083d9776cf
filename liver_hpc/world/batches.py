"""Which micro-batches a rank computes in a step, and what is read for them."""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.layout.batch import share_of
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.recipes.base import Recipe
from liver_hpc.world import thread
from liver_hpc.world.read_ahead import ReadAhead
from liver_hpc.world.thread import MicroBatch


class Batches:
    """A rank's part of global batches.

    groups: those that reading means, in whatever thread it is done. enter: makes this worker's
    device the calling thread's, for which torch takes the first GPU until then. per_token: a
    micro-batch weighs what it has tokens, which Megatron sees to. A `Recipe.fetch` of its own is
    read ahead.
    """

    def __init__(
        self,
        recipe: Recipe,
        layout: Layout,
        at: Coordinate,
        groups: Any,
        enter: Callable[[], None],
        per_token: bool = False,
    ) -> None:
        self._recipe = recipe
        self._layout = layout
        self._at = at
        self._groups = groups
        self._enter = enter
        self._per_token = per_token
        reads = type(recipe).fetch is not Recipe.fetch
        self._ahead = ReadAhead(self.fetch, recipe.config.train.read_ahead if reads else 0)
        self._next: tuple[int, list[MicroBatch]] = (-1, [])  # a step, and what it computes

    def begin(self, step: int) -> list[MicroBatch]:
        """What step `step` computes here; it and what the next one does begin to be read."""
        known, found = self._next
        if known != step:
            found = self.of_step(step)
            self._ahead.want(found)
        following = step + 1
        if following < self._recipe.config.train.steps:
            self._next = following, self.of_step(following)
            self._ahead.want(self._next[1])
        return found

    def of_step(self, step: int) -> list[MicroBatch]:
        """What step `step` computes here. Raises ConfigError where the recipe gives more samples
        than the step's global batch has, or fewer; in a rehearsal also where it gives others when
        it is asked again."""
        recipe = self._recipe
        batch, numbers = recipe.batch(step), recipe.sample_numbers(step)
        if len(batch) != len(numbers):
            raise ConfigError(
                f"recipe {type(recipe).__name__}: batch({step}) gives {len(batch)} samples, the "
                f"global batch of that step has {len(numbers)} (`Recipe.sample_numbers`)"
            )
        if thread.here.rehearsing and handles(recipe.batch(step)) != handles(batch):
            raise ConfigError(
                f"recipe {type(recipe).__name__}: batch({step}) gives other samples when it is "
                "asked again, as an iterator or an unseeded draw does: it must be a function of "
                "the step alone, or workers would take different batches"
            )
        return self.part_of(batch, numbers.start)

    def part_of(self, batch: Sequence[Any], first_sample: int) -> list[MicroBatch]:
        """This rank's part of a global batch (layout/batch.py), whose first sample has that number
        in the run."""
        layout, size = self._layout, self._recipe.config.train.micro_batch
        together = self._recipe.loss_communicates
        share = share_of(len(batch) // size, layout, layout.dp_rank(self._at), together)
        found = []
        for place in range(share.computed):
            padding = place >= len(share.numbers)
            first = size * share.numbers[0 if padding else place]
            weight = 0.0 if padding else 1.0 if self._per_token else share.weight
            aux_scale = weight if self._per_token else weight * layout.cp / share.computed
            samples = batch[first : first + size]
            found.append(MicroBatch(samples, first_sample + first, weight, padding, aux_scale))
        return found

    def read(self, micro_batches: Iterable[MicroBatch]) -> Iterator[tuple[MicroBatch, Any]]:
        """Each with its data. Raises what reading raises."""
        return self._ahead.read(micro_batches)

    def fetch(self, samples: Sequence[Any]) -> Any:
        """From the read-ahead thread, or the one that computes, of this world or of another."""
        self._enter()
        with self._recipe.reading, thread.reading(), thread.groups_in_use(self._groups):
            return self._recipe.fetch(samples, layout=self._layout, at=self._at)

    def close(self) -> None:
        """Nothing more is read ahead."""
        self._ahead.close()
        self._groups = None


def handles(batch: Sequence[Any]) -> str | None:
    """Samples as text, where their handles are numbers or texts, or lists of such; None where they
    are other objects, which may be equal to nothing."""
    try:
        return json.dumps([*batch], default=operator.index)
    except (TypeError, ValueError):
        return None
