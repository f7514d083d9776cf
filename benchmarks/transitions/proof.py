"""What is asked of a transition, and how it is found out.

The source world has trained some steps. Its state is kept, it trains ten steps more (the run that
stayed), and the state is put back. Then for each target, in a world built for it: there, to other
workers in the same layout, back, and the same ten steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from benchmarks.transitions.cases import COMPARED, TRAINED, Family
from benchmarks.transitions.pool import Pool
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.votes import Side, disagreements

LIMIT_S = 180.0
"""The longest that the workers may take for what one call asks of them."""

SOURCE, TARGET, MOVED = "source", "target", "moved"

Steps = list[tuple[float, float]]
"""Loss and gradient norm of steps."""


@dataclass(frozen=True)
class Proof:
    """What a transition came to.

    digests: how the digests of both worlds disagree, empty where they do not. back: whether the
    source has every bit again. moved: whether the same layout on other workers has every bit.
    apart: the largest relative difference of a loss or gradient norm to the run that stayed.
    """

    family: Family
    source: Layout
    target: Layout
    digests: tuple[str, ...]
    back: bool
    moved: bool
    apart: float

    @property
    def bit_equal(self) -> bool:
        return not self.digests and self.back and self.moved


class Prover:
    """Proves the transitions of one family after the other in a pool of workers."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._generations = itertools.count(1)

    def proofs(self, family: Family, config: RunConfig) -> Iterator[Proof]:
        """Every transition of a family."""
        self._doing = family.name
        self._call("open the model", "open", config)
        derived = self._call("derive the spec", "derive", 0, family.layouts)[0]
        self._call("read the spec", "take_spec", derived)
        self._spec = TypeAdapter(ModelSpec).validate_json(derived)
        for source, targets in family.moves.items():
            yield from self._from_source(family, Layout.parse(source), targets)

    def _from_source(
        self, family: Family, layout: Layout, targets: Sequence[str]
    ) -> Iterator[Proof]:
        everybody = range(self._pool.workers)
        source = RankMap(layout, tuple(everybody[: layout.workers]))
        self._doing = f"{family.name}, {layout}"
        self._build(SOURCE, source)
        self._call("fill the first world", "start", SOURCE)
        self._train(SOURCE, range(TRAINED))
        before = self._held(SOURCE)
        scalars = before[source.workers[0]].scalars
        self._call("keep the state", "keep", SOURCE)
        stayed = self._train(SOURCE, range(TRAINED, TRAINED + COMPARED))
        self._call("put the state back", "put_back", SOURCE, scalars)
        for text in targets:
            target = place(self._spec, source, Layout.parse(text), everybody)
            self._doing = f"{family.name}, {layout} to {target.layout}"
            self._build(TARGET, target, SOURCE)
            self._move(SOURCE, TARGET, scalars)
            there = self._held(TARGET)
            elsewhere = others(target, everybody)
            self._build(MOVED, elsewhere)
            self._move(TARGET, MOVED, scalars)
            moved = self._held(MOVED)
            self._move(MOVED, SOURCE, scalars)
            back = self._held(SOURCE)
            went_on = self._train(TARGET, range(TRAINED, TRAINED + COMPARED))
            self._call("close both worlds", "close", TARGET)
            self._call("close both worlds", "close", MOVED)
            yield Proof(
                family,
                layout,
                target.layout,
                digests=tuple(disagreements(_side(SOURCE, source, before), _side(TARGET, target, there))),
                back=back == before,
                moved=[there[worker] for worker in target.workers]
                == [moved[worker] for worker in elsewhere.workers],
                apart=max(apart(went_on[w], stayed[source.workers[0]]) for w in target.workers),
            )
            # A transition that fails is not to spoil the next one.
            self._call("put the state back", "put_back", SOURCE, scalars)
        self._call("close the source", "close", SOURCE)

    # ---- what workers are asked

    def _call(self, what: str, method: str, *arguments: Any) -> list[Any]:
        return self._pool.call(f"{what} ({self._doing})", LIMIT_S, method, *arguments)

    def _build(self, name: str, rank_map: RankMap, previous: str | None = None) -> None:
        self._call(f"build {rank_map}", "build", name, rank_map, next(self._generations), previous)

    def _move(self, source: str, target: str, scalars: Any) -> None:
        what = f"move the state from the {source} to the {target}"
        self._call(what, "move", source, target, next(self._generations), scalars)

    def _train(self, name: str, steps: range) -> list[Steps]:
        what = f"train steps {steps.start} to {steps.stop - 1} in the {name}"
        return self._call(what, "train", name, steps)

    def _held(self, name: str) -> list[Any]:
        return self._call(f"tell the state of the {name}", "held", name, TRAINED)


def others(rank_map: RankMap, everybody: Sequence[int]) -> RankMap:
    """The same layout with another worker on every seat: first who has none."""
    free = [worker for worker in everybody if worker not in rank_map.workers]
    used = rank_map.workers if free else (*rank_map.workers[1:], rank_map.workers[0])
    return RankMap(rank_map.layout, (*free, *used)[: len(used)])


def apart(steps: Steps, others: Steps) -> float:
    """The largest relative difference between losses or gradient norms; NaN counts as such."""
    pairs = [(a, b) for mine, theirs in zip(steps, others, strict=True)
             for a, b in zip(mine, theirs, strict=True)]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max(differences, key=lambda value: (value != value, value))


def _side(name: str, rank_map: RankMap, held: list[Any]) -> Side:
    return Side(name, rank_map, {worker: held[worker].digests for worker in rank_map.workers})
