"""Traces of events. Pure; what they cost a job is in `liver_hpc/report/traces.py`.

Events alternate: workers join, and are warned of their end.
"""

from __future__ import annotations

import random

DAY_S = 86_400.0
LIVER_EVENTS_A_DAY = 47
"""What LiveR (arXiv 2605.22014) reports of its 24 hours."""


def even_trace(events: int, length_s: float) -> list[float]:
    """So many events, equally far apart; none at the start or the end. Seconds from the start."""
    gap_s = length_s / (events + 1)
    return [gap_s * (number + 1) for number in range(events)]


def poisson_trace(events_a_day: float, length_s: float, seed: int) -> list[float]:
    """Arrivals at a constant rate, independent of each other. Seconds from the start."""
    draw, at_s, found = random.Random(seed), 0.0, []
    while (at_s := at_s + draw.expovariate(events_a_day / DAY_S)) < length_s:
        found.append(at_s)
    return found
