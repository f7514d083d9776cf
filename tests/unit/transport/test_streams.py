"""No communicator and no lane gets the stream of another one that lives."""

from __future__ import annotations

import itertools
import logging

import pytest

from liver_hpc.transport.streams import LaneStreams, Streams


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


# ---- lanes


class Stream:
    """done: whether what was launched on it has ended."""

    def __init__(self, handle: int) -> None:
        self.cuda_stream = handle
        self.done = True

    def query(self) -> bool:
        return self.done


class Lane:
    def __init__(self, streams: LaneStreams) -> None:
        self.stream = streams.take(self)


@pytest.fixture
def lane_streams() -> LaneStreams:
    pool = Pool(4)
    return LaneStreams(lambda: Stream(pool.draw()))


def test_lanes_that_live_differ_and_others_take_the_streams_of_those_that_are_gone(
    lane_streams: LaneStreams,
) -> None:
    stays, used = Lane(lane_streams), set()
    for _ in range(20):
        pair = Lane(lane_streams), Lane(lane_streams)
        live = {lane.stream.cuda_stream for lane in (stays, *pair)}
        assert len(live) == 3
        used |= live
        del pair
    assert len(used) == 3, "each keeps memory"


def test_a_stream_on_which_something_has_not_ended_is_not_given_out(
    lane_streams: LaneStreams,
) -> None:
    lane = Lane(lane_streams)
    stream = lane.stream
    stream.done = False
    del lane
    other = Lane(lane_streams)
    assert other.stream is not stream
    stream.done = True
    assert Lane(lane_streams).stream is stream


def test_where_all_have_a_lane_it_is_said(
    lane_streams: LaneStreams, caplog: pytest.LogCaptureFixture
) -> None:
    live = [Lane(lane_streams) for _ in range(4)]
    assert not caplog.text
    live.append(Lane(lane_streams))
    assert "all 4 streams have a lane" in caplog.text
