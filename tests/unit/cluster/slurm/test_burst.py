"""When burst nodes are asked for, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.cluster.slurm.burst import BurstPolicy, Request
from liver_hpc.config.schema import BurstSection


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def policy(clock: FakeClock, slots: int = 1, spent: float = 0.0, **keys: Any) -> BurstPolicy:
    values = {"partition": "preempt", "max_nodes": 4, "backoff_s": 5.0, "backoff_max_s": 15.0}
    return BurstPolicy(BurstSection.model_validate({**values, **keys}), slots, clock, spent)


def nodes(requests: list[Request]) -> list[int]:
    return [request.nodes for request in requests]


def test_requests_stand_until_the_wanted_workers_fit(clock: FakeClock) -> None:
    burst = policy(clock, slots=2)
    assert burst.to_submit() == []
    burst.want(3)
    assert burst.to_submit() == [Request(1, 60)] * 2
    burst.submitted("1", 1)
    assert nodes(burst.to_submit()) == [1]
    burst.granted("1", 1)
    burst.submitted("2", 1)
    assert burst.to_submit() == []
    burst.want(100)
    assert nodes(burst.to_submit()) == [1, 1]  # max_nodes


def test_requests_of_several_nodes_stay_within_max_nodes(clock: FakeClock) -> None:
    burst = policy(clock, nodes_per_request=3)
    burst.want(4)
    assert nodes(burst.to_submit()) == [3, 1]
    burst.want(1)
    assert nodes(burst.to_submit()) == [3]


def test_others_are_asked_for_in_the_place_of_nodes_that_have_to_be_left(clock: FakeClock) -> None:
    """Which their allocation holds on to: all together are `max_nodes` at most."""
    burst = policy(clock, max_nodes=3, nodes_per_request=2)
    burst.want(2)
    burst.submitted("1", 2)
    burst.granted("1", 2)
    burst.note_useful(1)
    assert [request.nodes for request in burst.to_submit()] == [1]
    burst.submitted("2", 1)
    assert burst.to_submit() == []
    assert burst.to_cancel() == []
    burst.note_useful(2)
    assert burst.to_cancel() == ["2"]


def test_min_nodes_are_asked_for_whatever_is_wanted(clock: FakeClock) -> None:
    burst = policy(clock, min_nodes=2)
    assert nodes(burst.to_submit()) == [1, 1]
    burst.submitted("1", 1)
    burst.submitted("2", 1)
    assert burst.to_cancel() == []


def test_the_newest_requests_are_withdrawn_when_less_is_wanted(clock: FakeClock) -> None:
    burst = policy(clock)
    burst.want(3)
    for job in ("1", "2", "3"):
        burst.submitted(job, 1)
    burst.granted("1", 1)
    burst.want(2)
    assert burst.to_cancel() == ["3"]
    burst.ended("3", by_us=True)
    burst.want(0)
    assert burst.to_cancel() == ["2"]  # a grant is given back, not cancelled
    burst.ended("2", by_us=True)
    burst.want(3)
    assert nodes(burst.to_submit()) == [1, 1]  # withdrawing is no refusal


def test_refusals_are_answered_ever_more_rarely(clock: FakeClock) -> None:
    burst = policy(clock)
    burst.want(1)
    for pause_s in (5.0, 10.0, 15.0, 15.0):  # backoff_max_s
        assert len(burst.to_submit()) == 1
        burst.refused()
        clock.advance(pause_s - 0.1)
        assert burst.to_submit() == []
        clock.advance(0.2)


def test_a_grant_that_is_lost_at_once_counts_as_refused(clock: FakeClock) -> None:
    burst = policy(clock)
    burst.want(1)
    burst.submitted("1", 1)
    burst.granted("1", 1)
    clock.advance(9.0)
    burst.ended("1", by_us=False)
    assert burst.to_submit() == []
    clock.advance(5.1)
    assert len(burst.to_submit()) == 1


def test_a_grant_that_held_ends_the_back_off(clock: FakeClock) -> None:
    burst = policy(clock)
    burst.want(2)
    burst.refused()
    burst.refused()
    clock.advance(11.0)
    burst.submitted("1", 1)
    burst.granted("1", 1)
    clock.advance(10.0)
    assert len(burst.to_submit()) == 1
    burst.ended("1", by_us=False)
    assert len(burst.to_submit()) == 2  # at once
    burst.refused()
    clock.advance(5.1)
    assert len(burst.to_submit()) == 2  # the first pause again


def test_the_cap_bounds_requests_and_ends_what_is_held(clock: FakeClock) -> None:
    burst = policy(clock, node_hours=2.0, time_min=60)
    burst.want(4)
    assert [request.time_min for request in burst.to_submit()] == [60, 60, 40, 30]
    for job in ("1", "2"):
        burst.submitted(job, 1)
        burst.granted(job, 1)
    clock.advance(1800.0)
    assert burst.node_hours == pytest.approx(1.0)
    assert [request.time_min for request in burst.to_submit()] == [20, 15]
    burst.submitted("3", 1)
    assert not burst.exhausted
    clock.advance(1800.0)
    assert burst.exhausted
    assert burst.to_submit() == []
    assert burst.to_cancel() == ["3"]
    burst.ended("1", by_us=True)
    clock.advance(3600.0)
    assert burst.node_hours == pytest.approx(3.0)  # one of them was given back


def test_nothing_comes_once_what_is_left_of_the_cap_is_too_short(clock: FakeClock) -> None:
    """It is never used up to the last minute: allocations end before."""
    burst = policy(clock, node_hours=1.0)
    burst.submitted("1", 1)
    clock.advance(3590.0)
    burst.granted("1", 1)
    burst.submitted("2", 1)
    clock.advance(3590.0)
    assert burst.over == "", "the second request stands"
    burst.ended("2", by_us=True)
    assert not burst.exhausted
    assert burst.over == "1.00 of 1 node hours are used, and 0 min are too short for an allocation"
    assert policy(clock).over == ""


def test_what_earlier_lives_used_counts(clock: FakeClock) -> None:
    assert policy(clock, spent=2.0, node_hours=2.0, min_nodes=1).to_submit() == []
