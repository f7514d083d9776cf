"""No communicator gets the stream of another one that lives."""

from __future__ import annotations

import itertools
import logging

import pytest

from liver_hpc.transport.streams import Streams


class Pool:
    """Gives its streams out in turn, as torch does."""

    def __init__(self, size: int = 32) -> None:
        self._next = itertools.cycle(range(1000, 1000 + size))

    def draw(self) -> int:
        return next(self._next)


class Backend:
    """Connects: takes the pool's next stream."""

    def __init__(self, pool: Pool, streams: Streams) -> None:
        streams.take(self, streams.make_room())
        self.stream = pool.draw()


@pytest.mark.parametrize("kept", [1, 5, 28])
@pytest.mark.parametrize("others", [0, 1, 7])
def test_whatever_is_kept_and_drawn_by_others_all_that_live_differ(kept: int, others: int) -> None:
    pool = Pool()
    streams = Streams(pool.draw)
    stay = [Backend(pool, streams) for _ in range(kept)]
    target: list[Backend] = []
    for _ in range(50):
        target.clear()
        target += [Backend(pool, streams) for _ in range(3)]
        live = [backend.stream for backend in (*stay, *target)]
        assert len({*live}) == len(live)
        for _ in range(others):
            pool.draw()


def test_where_all_are_taken_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(4)
    streams = Streams(pool.draw)
    kept = [Backend(pool, streams) for _ in range(4)]
    assert not caplog.text
    assert streams.make_room() == -1
    assert "all 4 streams have a communicator" in caplog.text
    del kept
    assert streams.make_room() >= 0


def test_streams_without_a_turn_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert Streams(itertools.count().__next__).make_room() == -1
    assert "none are looked at" in caplog.text
