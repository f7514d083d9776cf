"""Micro-batches are read ahead, in order, so many and no more, and each gets its own data."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from liver_hpc.world.read_ahead import ReadAhead
from liver_hpc.world.thread import MicroBatch

LIMIT_S = 10.0


def micro_batch(first: int) -> MicroBatch:
    return MicroBatch([first], first, 1.0, padding=False, aux_scale=1.0)


class Disk:
    """Reads what it is allowed to, and tells what was asked for, and by which thread."""

    def __init__(self, allowed: int = 1000) -> None:
        self.asked: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.readers: set[str] = set()
        self.allowed = threading.Semaphore(allowed)

    def read(self, samples: Sequence[int]) -> str:
        self.asked.put(samples[0])
        self.readers.add(threading.current_thread().name)
        assert self.allowed.acquire(timeout=LIMIT_S)
        if samples[0] < 0:
            raise OSError("the disk is gone")
        return f"data of {samples[0]}"


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def ahead(disk: Disk) -> Iterator[ReadAhead]:
    made = ReadAhead(disk.read, most=2)
    yield made
    made.close()


def read(ahead: ReadAhead, batches: Sequence[MicroBatch]) -> list[tuple[int, Any]]:
    return [(each.first_sample, data) for each, data in ahead.read(batches)]


def test_each_has_its_own_data_and_the_training_thread_reads_none(
    ahead: ReadAhead, disk: Disk
) -> None:
    steps = [[micro_batch(10 * step + at) for at in range(3)] for step in range(3)]
    ahead.want(steps[0])
    for number, step in enumerate(steps):
        ahead.want(steps[number + 1] if number < 2 else [])
        firsts = [each.first_sample for each in step]
        assert read(ahead, step) == [(first, f"data of {first}") for first in firsts]
    assert disk.readers == {"read-ahead"}


def test_as_many_are_read_before_they_are_computed_as_allowed(ahead: ReadAhead, disk: Disk) -> None:
    wanted = [micro_batch(at) for at in range(5)]
    ahead.want(wanted)
    assert [disk.asked.get(timeout=LIMIT_S) for _ in range(2)] == [0, 1]
    assert disk.asked.empty()
    reading = ahead.read(wanted)
    next(reading)
    assert disk.asked.get(timeout=LIMIT_S) == 2
    assert disk.asked.empty()


def test_what_nobody_wanted_is_read_by_who_asks_and_takes_nobodys_turn(
    ahead: ReadAhead, disk: Disk
) -> None:
    wanted = [micro_batch(at) for at in range(3)]
    ahead.want(wanted)
    validation = [micro_batch(100), micro_batch(101)]
    assert read(ahead, validation) == [(100, "data of 100"), (101, "data of 101")]
    assert threading.current_thread().name in disk.readers
    assert read(ahead, wanted) == [(at, f"data of {at}") for at in range(3)]


def test_two_of_the_same_samples_are_two(ahead: ReadAhead) -> None:
    """As where a rank computes one again for the others' sake."""
    wanted = [micro_batch(4), micro_batch(4)]
    ahead.want(wanted)
    assert read(ahead, wanted) == [(4, "data of 4")] * 2


def test_a_failure_is_raised_where_the_data_is_wanted(ahead: ReadAhead) -> None:
    wanted = [micro_batch(1), micro_batch(-1)]
    ahead.want(wanted)
    reading = ahead.read(wanted)
    assert next(reading)[1] == "data of 1"
    with pytest.raises(OSError, match="the disk is gone"):
        next(reading)


def test_without_reading_ahead_there_is_no_thread(disk: Disk) -> None:
    before = threading.active_count()
    ahead, wanted = ReadAhead(disk.read, most=0), [micro_batch(1)]
    ahead.want(wanted)
    assert threading.active_count() == before
    assert read(ahead, wanted) == [(1, "data of 1")]


def test_once_closed_its_thread_ends(disk: Disk) -> None:
    ahead, wanted = ReadAhead(disk.read, most=1), [micro_batch(1)]
    ahead.want(wanted)
    read(ahead, wanted)
    (thread,) = (each for each in threading.enumerate() if each.name == "read-ahead")
    ahead.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
