"""Did what crossed arrive as it left, and do all copies of the state agree, within a world and
across both? Pure arithmetic on digests.

A digest is a sum over boxes modulo 2**64, so the digests of the workers that share one copy of
the state between them add up to the digest of that copy, whatever the layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap, ids_text
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.messages import ClassDigest, PairDigests, Vote

MODULUS = 2**64


class StateClass(NamedTuple):
    """State of one kind whose copies are spread over a layout in the same way."""

    kind: str
    tp_replicated: bool
    multi_stage: bool
    expert: bool = False

    def __str__(self) -> str:
        tp = "replicated over tp" if self.tp_replicated else "split over tp"
        stages = ", on several stages" if self.multi_stage else ""
        experts = ", of experts" if self.expert else ""
        return f"{self.kind} ({tp}{stages}{experts})"


class CopyIndex(NamedTuple):
    """Which copy; an axis that is None is one over which the copy is spread."""

    replica: int | None
    tp: int | None
    stage: int | None

    @classmethod
    def of(cls, state_class: StateClass, layout: Layout, at: Coordinate) -> CopyIndex:
        """The copy to which a coordinate contributes.

        Parameters are whole on every replica, experts on those of all ep ranks together; the
        optimizer's state is split over them.
        """
        replica = at.replica // layout.ep if state_class.expert else at.replica
        return cls(
            replica=replica if state_class.kind == PARAMETER else None,
            tp=at.tp if state_class.tp_replicated else None,
            stage=at.pp if state_class.multi_stage else None,
        )

    def __str__(self) -> str:
        axes = [f"{axis} {at}" for axis, at in self._asdict().items() if at is not None]
        return "copy " + (" ".join(axes) or "of the whole world")


@dataclass(frozen=True)
class Copy:
    """One copy of one class in the world `side`; `value` is None when nobody reported it."""

    side: str
    index: CopyIndex
    workers: tuple[int, ...]
    value: int | None

    def __str__(self) -> str:
        value = "missing" if self.value is None else f"{self.value:016x}"
        return f"{self.side} {self.index} (workers {ids_text(self.workers)}) is {value}"


@dataclass(frozen=True)
class Side:
    """A world by the name that texts have for it, and the digests that each worker reports."""

    name: str
    rank_map: RankMap
    digests: Mapping[int, tuple[ClassDigest, ...]]


def disagreements(*sides: Side) -> list[str]:
    """Every copy that differs from the others, as text; empty when all copies are equal.

    A class without a report in one of the worlds, or no report at all, is a disagreement too.
    Worker ids of one side need not have to do with those of another.
    """
    copies: dict[StateClass, list[Copy]] = defaultdict(list)
    for side in sides:
        for state_class, copy in _copies(side):
            copies[state_class].append(copy)
    if not copies:
        return ["no worker reported any digest"]
    found = []
    for state_class, known in sorted(copies.items()):
        for side in sides:
            if all(copy.side != side.name for copy in known):
                found.append(f"{state_class}: nobody reported it in the {side.name}")
        common = Counter(copy.value for copy in known).most_common(1)[0][0]
        usual = next(copy for copy in known if copy.value == common)
        found += [f"{state_class}: {copy}, {usual}" for copy in known if copy.value != common]
    return found


def mismatches(votes: Mapping[int, Vote], planned: Mapping[int, Collection[int]]) -> Iterator[str]:
    """How what arrived differs from what left, pair by pair, as text; nothing where all is equal.

    votes: by worker. planned: to whom each worker was to send state; a pair of which nobody told a
    digest is a mismatch too.
    """
    if _agree(votes, planned):
        return
    left = {
        (w, peer, kind): value
        for w, vote in votes.items()
        for told in vote.sent
        for kind, peer, value in told.items()
    }
    arrived = {
        (peer, w, kind): value
        for w, vote in votes.items()
        for told in vote.received
        for kind, peer, value in told.items()
    }
    for sender, receiver, kind in sorted({*left, *arrived}):
        told = [known.get((sender, receiver, kind), "missing") for known in (left, arrived)]
        if told[0] != told[1]:
            way = f"in worker {sender}"
            if sender != receiver:
                way = f"from worker {sender} to {receiver}"
            yield f"{kind} {way}: {told[0]} left, {told[1]} arrived"
    told_of = {(sender, receiver) for sender, receiver, _ in left}
    pairs = {(sender, receiver) for sender, to in planned.items() for receiver in to}
    for sender, receiver in sorted(pairs - told_of):
        yield f"nobody told what crossed from worker {sender} to {receiver}"


def _agree(votes: Mapping[int, Vote], planned: Mapping[int, Collection[int]]) -> bool:
    """Whether all is equal, of digests by the hundred thousand."""
    kinds: dict[str, int] = {}
    by, to, left_kinds, left = _columns([(w, d) for w, v in votes.items() for d in v.sent], kinds)
    receivers, senders, arrived_kinds, arrived = _columns(
        [(w, d) for w, v in votes.items() for d in v.received], kinds
    )
    counts = [len(peers) for peers in planned.values()]
    plans = np.repeat(np.fromiter(planned, np.int64, len(planned)), counts)
    planned_to = np.fromiter(chain.from_iterable(planned.values()), np.int64, sum(counts))
    all_ids = (by, to, receivers, senders, plans, planned_to)
    workers = 1 + max((int(ids.max()) for ids in all_ids if ids.size), default=0)
    limit = max(workers, len(kinds))
    sent = _in_order(limit, by, to, left_kinds)
    came = _in_order(limit, senders, receivers, arrived_kinds)
    crossed = (by[sent], to[sent], left_kinds[sent], left[sent])
    arrive = (senders[came], receivers[came], arrived_kinds[came], arrived[came])
    if not all(map(np.array_equal, crossed, arrive)):
        return False
    pairs = np.append(crossed[0] * workers + crossed[1], -1)  # in order, but for the end
    wanted = plans * workers + planned_to
    return np.array_equal(pairs[pairs[:-1].searchsorted(wanted)], wanted)


def _in_order(limit: int, *keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """As the first key sorts them, then the second ...; all are below a limit. Numbers of two bytes
    are sorted in a tenth of the time."""
    small = np.min_scalar_type(limit)
    return np.lexsort([key.astype(small) for key in reversed(keys)])


def _columns(
    told: Sequence[tuple[int, PairDigests]], kinds: dict[str, int]
) -> tuple[NDArray[Any], ...]:
    """Who tells, of which peer, the kind's number, and the digest."""
    num_peers = np.array([len(digests.peers) for _, digests in told], np.int64)
    num_kinds = np.array([len(digests.kinds) for _, digests in told], np.int64)
    counts = num_peers * num_kinds
    workers = np.repeat(np.array([worker for worker, _ in told], np.int64), counts)
    of_kinds = chain.from_iterable(digests.kinds for _, digests in told)
    numbers = [kinds.setdefault(kind, len(kinds)) for kind in of_kinds]
    peers = np.fromiter(chain.from_iterable(d.peers for _, d in told), np.int64, num_peers.sum())
    # Where in those two a digest's kind and peer stand: kind by kind, in each all peers.
    within = np.arange(len(workers)) - np.repeat(np.cumsum(counts) - counts, counts)
    kind, peer = np.divmod(within, np.repeat(num_peers, counts))
    kind += np.repeat(np.cumsum(num_kinds) - num_kinds, counts)
    peer += np.repeat(np.cumsum(num_peers) - num_peers, counts)
    values = bytes.fromhex("".join(digests.values for _, digests in told))
    digests = np.frombuffer(values, ">u8").astype(np.uint64)
    return workers, peers[peer], np.array(numbers, np.int64)[kind], digests


def unlike(one: Side, other: Side) -> list[str]:
    """How two worlds of the same tensors differ, as text, also where their specs class the tensors
    otherwise, as those of runs with other layouts do; empty when all is equal."""
    if {which for which, _ in _copies(one)} == {which for which, _ in _copies(other)}:
        return disagreements(one, other)
    found = [*disagreements(one), *disagreements(other)]
    kinds, others = _of_kinds(one), _of_kinds(other)
    for kind in sorted({*kinds, *others}) if not found else ():
        if kinds.get(kind) != others.get(kind):
            mine, theirs = (f"{known.get(kind, 0):016x}" for known in (kinds, others))
            found.append(f"{kind}: {one.name} is {mine}, {other.name} is {theirs}")
    return found


def _of_kinds(side: Side) -> dict[str, int]:
    """The digest of all state of a kind, each tensor once."""
    classes = {state_class: copy.value or 0 for state_class, copy in _copies(side)}
    totals: Counter[str] = Counter()
    for state_class, value in classes.items():
        totals[state_class.kind] += value
    return {kind: total % MODULUS for kind, total in totals.items()}


def _copies(side: Side) -> Iterator[tuple[StateClass, Copy]]:
    """All copies that must exist of what anybody reports: of a class on several stages, those on
    the stages of the reports. A worker that reports a class twice adds up."""
    layout = side.rank_map.layout
    reports: dict[StateClass, dict[Coordinate, int]] = defaultdict(lambda: defaultdict(int))
    for rank, worker in enumerate(side.rank_map.workers):
        for digest in side.digests[worker]:
            state_class = StateClass(
                digest.kind, digest.tp_replicated, digest.multi_stage, digest.expert
            )
            reports[state_class][layout.coordinate(rank)] += int(digest.value, 16)
    for state_class, values in reports.items():
        stages = {at.pp for at in values} if state_class.multi_stage else range(layout.pp)
        members: dict[CopyIndex, list[Coordinate]] = defaultdict(list)
        for replica, tp, stage in product(range(layout.replicas), range(layout.tp), sorted(stages)):
            at = Coordinate(tp, stage, replica)
            members[CopyIndex.of(state_class, layout, at)].append(at)
        for index, coordinates in members.items():
            told = [values[at] for at in coordinates if at in values]
            workers = tuple(side.rank_map.worker_at(at) for at in coordinates)
            value = sum(told) % MODULUS if told else None
            yield state_class, Copy(side.name, index, workers, value)
