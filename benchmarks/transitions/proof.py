"""What is asked of a transition, and how it is found out.

The source world has trained some steps. Its state is kept, it trains on (the run that stayed), and
the state is put back. Then for each target, in a world built for it: there, from there to other
workers in the same layout, back from those, and in the target the steps that the source has done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter

from benchmarks.transitions.cases import COMPARED, TRAINED, Family
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.messages import ClassDigest, ScalarState
from liver_hpc.protocol.votes import Side, disagreements

LIMIT_S = 180.0
"""The longest that the workers may take for what one call asks of them."""

SOURCE, TARGET, ELSEWHERE = "source", "target", "target elsewhere"

_ON = range(TRAINED, TRAINED + COMPARED)

Steps = Sequence[tuple[float, float]]
"""Loss and gradient norm of steps."""


@dataclass(frozen=True)
class Held:
    """What a worker holds in a world: a hash of every bit of it, its digests by kind, and what is
    in no tensor."""

    bits: str
    digests: tuple[ClassDigest, ...]
    scalars: ScalarState


@dataclass(frozen=True)
class Proof:
    """What a transition came to.

    disagreements: how the digests of both worlds differ, empty where they do not. back: whether
    the source has every bit again. same_layout: whether the same layout on other workers has every
    bit. apart: the largest relative difference of a loss or gradient norm from the run that stayed.
    losses: of the first and the last step of that run.
    """

    source: Layout
    target: Layout
    disagreements: tuple[str, ...]
    back: bool
    same_layout: bool
    apart: float
    losses: tuple[float, float]

    @property
    def bit_equal(self) -> bool:
        return not self.disagreements and self.back and self.same_layout


class Workers(Protocol):
    """A pool of workers, each of which has a Seat (seat.py)."""

    @property
    def workers(self) -> range: ...

    def call(self, what: str, limit_s: float, method: str, *arguments: Any) -> list[Any]: ...


class Prover:
    """Proves the transitions of one family after the other in a pool of workers."""

    def __init__(self, pool: Workers) -> None:
        self._pool = pool
        self._generations = itertools.count(1)
        self._proving = ""

    def proofs(self, family: Family, config: RunConfig) -> Iterator[Proof]:
        """Every transition of a family."""
        self._proving = family.name
        self._call("open the model", "open", config)
        spec = self._call("derive the spec", "derive", 0, family.layouts)[0]
        self._call("read the spec", "take_spec", spec)
        for layout, targets in family.transitions:
            self._proving = f"{family.name}, {layout}"
            source = RankMap(layout, tuple(self._pool.workers[: layout.workers]))
            yield from self._from(source, targets, spec)

    def _from(self, source: RankMap, targets: Sequence[Layout], spec: bytes) -> Iterator[Proof]:
        model = TypeAdapter(ModelSpec).validate_json(spec)
        self._build(SOURCE, source)
        self._call("fill the first world", "start", SOURCE)
        trained = self._train(SOURCE, source, range(TRAINED))[0]
        before = self._held(SOURCE, source)
        self._call("keep the state", "keep", SOURCE)
        stayed = [*trained, *self._train(SOURCE, source, _ON)[0]]
        for layout in targets:
            self._proving = f"{self._proving.partition(' to ')[0]} to {layout}"
            # Also where an earlier transition has failed.
            self._call("put the state back", "put_back", SOURCE, before[source.workers[0]].scalars)
            target = place(model, source, layout, self._pool.workers)
            yield self._prove(source, target, before, stayed)
        self._call("close the source", "close", SOURCE)

    def _prove(
        self, source: RankMap, target: RankMap, before: Mapping[int, Held], stayed: Steps
    ) -> Proof:
        scalars = before[source.workers[0]].scalars
        elsewhere = on_other_workers(target, self._pool.workers)
        self._build(TARGET, target, SOURCE)
        self._move(SOURCE, TARGET, scalars)
        there = self._held(TARGET, target)
        self._build(ELSEWHERE, elsewhere)
        self._move(TARGET, ELSEWHERE, scalars)
        moved = self._held(ELSEWHERE, elsewhere)
        self._move(ELSEWHERE, SOURCE, scalars)
        back = self._held(SOURCE, source)
        self._call("close it", "close", ELSEWHERE)
        went_on = self._train(TARGET, target, _ON)
        self._call("close it", "close", TARGET)
        sides = (_side(SOURCE, source, before), _side(TARGET, target, there))
        return Proof(
            source.layout,
            target.layout,
            disagreements=tuple(disagreements(*sides)),
            back=back == before,
            same_layout=[*there.values()] == [*moved.values()],
            apart=max(apart(steps, stayed[TRAINED:]) for steps in went_on),
            losses=(stayed[0][0], stayed[-1][0]),
        )

    # ---- what workers are asked

    def _call(self, what: str, method: str, *arguments: Any) -> list[Any]:
        return self._pool.call(f"{what} ({self._proving})", LIMIT_S, method, *arguments)

    def _build(self, name: str, rank_map: RankMap, previous: str | None = None) -> None:
        what = f"build {name}, {rank_map}"
        self._call(what, "build", name, rank_map, next(self._generations), previous)

    def _move(self, source: str, target: str, scalars: ScalarState) -> None:
        what = f"move the state from {source} to {target}"
        self._call(what, "move", (source, target), next(self._generations), scalars)
        self._call("close the connections of the move", "drop_transfer")

    def _train(self, name: str, rank_map: RankMap, steps: range) -> list[Steps]:
        """What each worker of a world says of its steps, in rank order."""
        what = f"train steps {steps[0]} to {steps[-1]} in {name}"
        answers = self._call(what, "train", name, steps)
        return [answers[worker] for worker in rank_map.workers]

    def _held(self, name: str, rank_map: RankMap) -> dict[int, Held]:
        """By worker, in rank order."""
        answers = self._call(f"tell the state of {name}", "held", name, TRAINED)
        return {worker: answers[worker] for worker in rank_map.workers}


def on_other_workers(rank_map: RankMap, workers: Sequence[int]) -> RankMap:
    """The same layout with another worker in every seat: first those that have none."""
    free = [worker for worker in workers if worker not in rank_map.workers]
    first, *rest = rank_map.workers
    others = (*free, *rank_map.workers) if free else (*rest, first)
    return RankMap(rank_map.layout, others[: len(rank_map.workers)])


def apart(steps: Steps, others: Steps) -> float:
    """The largest relative difference between losses or gradient norms; infinite where one of
    them is not finite."""
    both = [pair for a, b in zip(steps, others, strict=True) for pair in zip(a, b, strict=True)]
    differences = [abs(mine - theirs) / max(abs(theirs), 1e-30) for mine, theirs in both]
    return max(value if value == value else float("inf") for value in differences)


def _side(name: str, rank_map: RankMap, held: Mapping[int, Held]) -> Side:
    return Side(name, rank_map, {worker: held[worker].digests for worker in rank_map.workers})
