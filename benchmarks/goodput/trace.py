"""A day of events that alternate, workers join and are warned of their end, and what is left of a
job that answers them. Pure.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from liver_hpc.report.traces import Cost, Event, Strategy, Trace, play

DAY_S = 86_400.0
LIVER_EVENTS_A_DAY = 47
"""What LiveR (arXiv 2605.22014) reports of its 24 hours."""


def goodput_of_a_day(costs: Sequence[Cost]) -> float:
    """The share of a day in which training makes progress, 0 to 1. Its events are equally far
    apart, none at its start or end; costs are taken in turn, again and again."""
    gap_s, turns = DAY_S / (LIVER_EVENTS_A_DAY + 1), itertools.cycle(costs)
    events = tuple(
        Event(gap_s * number, workers=1 if number % 2 else -1, warning_s=DAY_S)
        for number in range(1, LIVER_EVENTS_A_DAY + 1)
    )
    strategy = Strategy("measured", lambda _source, _target: next(turns), late=Cost(0.0, 0.0))
    return play(Trace(1, DAY_S, events), strategy, lambda _workers: 0.0).goodput
