"""What is left of the state after a loss: the newest boundary of which every share is held by
somebody, and whether a world that was filled from it holds that."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.messages import HeldSnapshot, Refilled, ScalarState
from liver_hpc.protocol.votes import MODULUS, Side, disagreements


@dataclass(frozen=True)
class Salvage:
    """A boundary that can be gone back to. generation, layout: of the world that was there.

    holders: by its ranks, the worker that gives its snapshot. digests: of the whole state, by kind.
    """

    generation: int
    layout: Layout
    scalars: ScalarState
    holders: tuple[int, ...]
    digests: Mapping[str, int]


def newest(held: Mapping[int, Iterable[HeldSnapshot]]) -> Salvage | None:
    """The newest boundary that all shares are left of, given what each worker holds; None where
    there is none.

    Of two workers that hold the same share, the one that gives fewer others does.
    """
    boundaries: dict[tuple[int, int, str], dict[int, list[int]]] = {}
    told: dict[tuple[int, int, str, int], HeldSnapshot] = {}
    for worker, snapshots in sorted(held.items()):
        for each in snapshots:
            which = (each.scalars.step, each.generation, each.layout)
            boundaries.setdefault(which, defaultdict(list))[each.rank].append(worker)
            told.setdefault((*which, each.rank), each)
    for which, by_rank in sorted(boundaries.items(), reverse=True):
        _, generation, text = which
        layout = Layout.parse(text)
        if len(by_rank) == layout.workers:
            shares = [told[*which, rank] for rank in range(layout.workers)]
            digests = _summed(each.digests for each in shares)
            return Salvage(generation, layout, shares[0].scalars, _givers(by_rank), digests)
    return None


def _givers(by_rank: Mapping[int, list[int]]) -> tuple[int, ...]:
    gives: Counter[int] = Counter()
    chosen = {}
    for rank, workers in sorted(by_rank.items(), key=lambda each: (len(each[1]), each[0])):
        chosen[rank] = min(workers, key=lambda worker: (gives[worker], worker))
        gives[chosen[rank]] += 1
    return tuple(worker for _, worker in sorted(chosen.items()))


def _summed(digests: Iterable[Mapping[str, str]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for each in digests:
        for kind, value in each.items():
            totals[kind] += int(value, 16)
    return {kind: total % MODULUS for kind, total in totals.items()}


def difference(salvage: Salvage, rank_map: RankMap, refilled: Mapping[int, Refilled]) -> str:
    """How a world differs from what it was to be filled with, as text; empty where it does not.

    refilled: by worker, of all that have a seat.
    """
    for worker in rank_map.workers:
        if refilled[worker].scalars != salvage.scalars:
            return f"worker {worker} is at {refilled[worker].scalars}, wanted {salvage.scalars}"
    digests = {worker: refilled[worker].digests for worker in rank_map.workers}
    if found := disagreements(Side("world", rank_map, digests)):
        return "; ".join(found)
    got = _summed(refilled[worker].shares for worker in rank_map.workers)
    for kind in sorted({*got, *salvage.digests}):
        if got.get(kind) != salvage.digests.get(kind):
            values = (f"{known.get(kind, 0):016x}" for known in (salvage.digests, got))
            return "{}: the snapshots were {}, the world is {}".format(kind, *values)
    return ""
