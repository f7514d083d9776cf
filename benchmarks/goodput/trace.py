"""Traces of events that alternate, workers join and are warned of their end, and what is left of a
job that answers them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from liver_hpc.report.traces import Cost

DAY_S = 86_400.0
LIVER_EVENTS_A_DAY = 47
"""What LiveR (arXiv 2605.22014) reports of its 24 hours."""


def even_trace(events: int, length_s: float) -> list[float]:
    """So many events, equally far apart; none at the start or the end. Seconds from the start."""
    gap_s = length_s / (events + 1)
    return [gap_s * (number + 1) for number in range(events)]


def answers(trace_s: Sequence[float], costs: Sequence[Cost]) -> Iterator[tuple[float, Cost]]:
    """When each change that a trace leads to begins, and its cost; costs are taken in turn, again
    and again."""
    free_s, number = 0.0, 0
    for index, at_s in enumerate(trace_s):
        begun_s = max(at_s, free_s)
        if index + 1 < len(trace_s) and trace_s[index + 1] <= begun_s:
            continue  # the next one has come before this could be answered
        cost = costs[number % len(costs)]
        free_s, number = begun_s + cost.busy_s, number + 1
        yield begun_s, cost


def goodput(trace_s: Sequence[float], length_s: float, costs: Sequence[Cost]) -> float:
    """The share of `length_s` in which training makes progress, 0 to 1."""
    lost_s = math.fsum(
        min(cost.lost_s, max(0.0, length_s - begun_s)) for begun_s, cost in answers(trace_s, costs)
    )
    return 1.0 - lost_s / length_s
