"""Snapshots between threads of this process, over real connections."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.snapshots import partners
from liver_hpc.snapshot import exchange as exchange_module
from liver_hpc.snapshot.exchange import Exchange, in_order
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.world.device import Device
from liver_hpc.world.network import Network
from tests.unit.layout.models import TIED
from tests.unit.snapshot.states import CPU, SCALARS, filled, share_of

LIMIT_S = 20.0
WORLD = RankMap(Layout(1, 1, 3), (4, 5, 6), (0, 1, 0))
"""4 and 6 are on one node, so 5 is the partner of both."""


class Seat:
    """One worker of the world: its exchange, its own share, and memory for those of its wards."""

    def __init__(self, worker: int, store: Any) -> None:
        self.worker = worker
        self.store = store
        self.exchange = Exchange(WORLD, worker, generation=2, step=7)
        layout = WORLD.layout
        state = filled(TIED, layout, layout.coordinate(self.exchange.rank), torch.float32)
        self.own = share_of(state, generation=2)
        self.wards = [Snapshot(TIED, layout, rank, 2) for rank in self.exchange.wards]

    def meet(self) -> None:
        self.exchange.connect(Network(Device(CPU), "127.0.0.1"), self.store, LIMIT_S)

    def swap(self) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "the snapshot to be held")
        self.exchange.swap(self.own, self.wards, deadline)


def all_of(seats: dict[int, Seat], work: Callable[[Seat], None]) -> dict[int, str]:
    """Does something on all of them at once; the errors, by worker."""
    errors: dict[int, str] = {}

    def run(seat: Seat) -> None:
        try:
            work(seat)
        except LiverError as error:
            errors[seat.worker] = str(error)

    threads = [threading.Thread(target=run, args=(seat,)) for seat in seats.values()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * LIMIT_S)
        assert not thread.is_alive(), "it hangs"
    return errors


@pytest.fixture
def seats() -> Iterator[dict[int, Seat]]:
    store: Any = torch.distributed.HashStore()
    found = {worker: Seat(worker, store) for worker in WORLD.workers}
    assert not all_of(found, Seat.meet)
    yield found
    for seat in found.values():
        seat.exchange.close()


def test_a_partner_holds_what_was_sent_again_and_again(seats: dict[int, Seat]) -> None:
    assert [len(seats[worker].wards) for worker in WORLD.workers] == [1, 2, 0]
    for step in (7, 8):
        for seat in seats.values():
            seat.own.scalars = SCALARS.model_copy(update={"step": step})
            seat.own.chunks[0][0] = step
            seat.own.digests = seat.own.digest()
        assert not all_of(seats, Seat.swap)
        for seat in seats.values():
            for ward in seat.wards:
                sender = seats[WORLD.workers[ward.rank]].own
                assert all(map(torch.equal, ward.chunks, sender.chunks))
                assert ward.told() == sender.told()


def test_a_byte_that_flips_on_its_way_is_refused_at_both_ends(
    seats: dict[int, Seat], monkeypatch: pytest.MonkeyPatch
) -> None:
    cross = Exchange._cross

    def flipping(self: Exchange, parcels: Any, deadline: Deadline) -> None:
        cross(self, parcels, deadline)
        arrived = [p for p in parcels if not p.is_send and p.tag == exchange_module._FIRST]
        if self._worker == 5 and arrived:
            arrived[0].memory[100] ^= 1

    monkeypatch.setattr(Exchange, "_cross", flipping)
    errors = all_of(seats, Seat.swap)
    assert "has not arrived as it was sent" in errors[5]
    victims = [worker for worker in (4, 6) if worker in errors]
    assert len(victims) == 1
    assert "worker 5 has not got what was sent to it" in errors[victims[0]]


def test_another_boundarys_snapshot_is_refused(seats: dict[int, Seat]) -> None:
    seats[4].own.scalars = SCALARS.model_copy(update={"step": 6})
    errors = all_of(seats, Seat.swap)
    assert "worker 4: its snapshot is" in errors[5]


def test_who_waits_for_a_partner_that_closes_is_freed_and_says_for_whom(
    seats: dict[int, Seat],
) -> None:
    def swap_or_close(seat: Seat) -> None:
        if seat.worker == 5:
            threading.Event().wait(0.3)  # the others wait by then
            seat.exchange.close()
        else:
            seat.swap()

    began = SystemClock().now_s()
    errors = all_of(seats, swap_or_close)
    assert SystemClock().now_s() - began < LIMIT_S / 2
    assert "worker 5" in errors[4]
    assert "worker 5" in errors[6]


def test_thousands_meet_in_few_rounds() -> None:
    """Each worker meets its peers one after the other, and each peer may have others before."""
    rank_map = RankMap(Layout(1, 1, 4096), tuple(range(4096)), tuple(n // 8 for n in range(4096)))
    pairs = {tuple(sorted((worker, its))) for worker, its in enumerate(partners(rank_map))}
    rounds = defaultdict[int, int](int)
    for pair in in_order(pairs):
        mine = 1 + max(rounds[worker] for worker in pair)
        rounds |= dict.fromkeys(pair, mine)
    assert max(rounds.values()) <= 16


def test_a_closed_exchange_connects_no_more() -> None:
    store: Any = torch.distributed.HashStore()
    two = {worker: Seat(worker, store) for worker in WORLD.workers}
    two[4].exchange.close()
    errors = all_of(two, Seat.meet)
    assert "closed" in errors[4]
