"""What receivers say to senders, before these let go of their copies."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.layout.tensors import PARAMETER, Move
from liver_hpc.transport.moved import Moved, acknowledge
from tests.unit.layout.models import TIED
from tests.unit.transport.conformance import ToyState, random_bits
from tests.unit.transport.memory import MemoryExchange
from tests.unit.transport.plans import plan_of

Digests = Mapping[tuple[int, str], int]
LAST = 2**64 - 1


def within(limit_s: float = 20.0) -> Deadline:
    return Deadline.after(SystemClock(), limit_s, "the word of receivers")


def words(*of: tuple[Digests, Digests]) -> list[str]:
    """What becomes of workers 0, 1, ... that have sent and received so much, all at once."""
    exchange = MemoryExchange()

    def member(worker: int) -> str:
        moved = Moved(*of[worker], {})
        try:
            acknowledge(exchange.wire(worker), worker, moved, within())
        except LiverError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(of)) as pool:
        return [*pool.map(member, range(len(of)))]


def test_all_is_well_where_all_hold_what_was_sent() -> None:
    first = {(1, PARAMETER): LAST, (1, "main"): 5}, {(1, PARAMETER): 7}
    second = {(0, PARAMETER): 7}, {(0, PARAMETER): LAST, (0, "main"): 5}
    assert words(first, second) == ["", ""]
    assert words(({}, {})) == [""]


def test_a_sender_is_told_that_a_receiver_holds_something_else() -> None:
    first = {(1, PARAMETER): 3, (2, PARAMETER): 4}, {}
    assert words(first, ({}, {(0, PARAMETER): 3}), ({}, {(0, PARAMETER): 5})) == [
        "worker 0: workers 2 hold something else than was sent to them, by digest",
        "",
        "",
    ]


def test_a_receiver_that_says_nothing_is_waited_for_until_the_deadline() -> None:
    wire = MemoryExchange().wire(0)
    with pytest.raises(DeadlineError, match="from worker 1"):
        acknowledge(wire, 0, Moved({(1, PARAMETER): 3}, {}, {}), within(0.05))


def test_a_stream_that_is_acknowledged_ends_once_its_receiver_has_ended() -> None:
    """A sender's messages have gone long before."""
    exchange = MemoryExchange()
    moves = [Move(0, PARAMETER, TIED.tensors[0].whole, 0, 1)]
    plans = [plan_of(moves, worker) for worker in range(2)]
    arrived = threading.Event()
    sender_ended = threading.Event()

    def received(_bytes: int) -> None:
        assert not sender_ended.wait(0.2)
        arrived.set()

    def move(worker: int) -> None:
        transport = exchange.transport(worker, TIED, HandoffSection(staging_bytes=1 << 16))
        states = [ToyState(TIED, random_bits(3)), None]
        prepared = transport.prepare(plans[worker])
        moved = transport.stream(
            prepared,
            states[worker],
            states[1 - worker],
            received if worker else lambda _bytes: None,
            within(),
        )
        transport.acknowledge(prepared, moved, within())
        if worker == 0:
            sender_ended.set()
            assert arrived.is_set()

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(move, worker) for worker in range(2)]:
            done.result()
