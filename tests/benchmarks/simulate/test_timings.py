"""The fit: it finds what made the times, and cannot promise what no handoff can keep."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulate.timings import Measured, Timings, Work, fit, held_out
from benchmarks.simulate.traffic import SampledTraffic
from liver_hpc.errors import LiverError

TRUE = Timings(7.0, 0.5, 1.5, 0.02, 1e-9, 0.1, 3e-9, 0.2)


def work(parameters: int, state: int, step_s: float = 0.3, joiners: int = 1) -> Work:
    return Work(joiners, SampledTraffic(parameters, state, 0, {}), step_s, step_s)


def measured(one: Work, **changed: float) -> Measured:
    return Measured("", one, dataclasses.replace(TRUE.predict(one), **changed), 0.2)


KNOWN = [
    measured(work(10**7 * number, 2 * 10**7 * (number % 3 + 1), 0.1 * number))
    for number in range(1, 7)
]


def test_the_parameters_are_found_again() -> None:
    for name, value in dataclasses.asdict(TRUE).items():
        assert getattr(fit(KNOWN), name) == pytest.approx(value, rel=1e-6), name
    for one, predicted in held_out(KNOWN):
        assert predicted.pause_s == pytest.approx(one.times.pause_s, rel=1e-6)


@given(st.lists(st.floats(0.01, 2.0), min_size=3, max_size=8), st.floats(0.01, 500.0))
def test_no_first_step_is_shorter_than_a_step(firsts_s: list[float], step_s: float) -> None:
    """Whatever noise was measured, over any link: lost time is never less than nothing."""
    noisy = [measured(work(10**7, 10**7), first_step_s=first_s) for first_s in firsts_s]
    large = work(10**10, 10**10, step_s)
    for timings in (fit(noisy), fit(noisy).over(50e9, 1e12)):
        assert timings.predict(large).first_step_s >= step_s
        assert timings.predict(large).pause_s >= 0


def test_too_few_handoffs_are_refused() -> None:
    with pytest.raises(LiverError, match="wanted at least 3 completed handoffs, got 2"):
        fit(KNOWN[:2])
