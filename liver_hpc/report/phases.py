"""When each phase of a handoff attempt was, as drawings show it."""

from __future__ import annotations

import math

from liver_hpc.report.derive import ReconfigurationFigures


def first_known(*times_s: float) -> float:
    return next(filter(math.isfinite, times_s), math.nan)


def spans(record: ReconfigurationFigures) -> list[tuple[str, float, float]]:
    """An attempt's phases as far as they were reached, each with begin and end in epoch time."""
    boundary_s = record.source_last_step_ended_s
    # PREPARE ends with the wait for the boundary, as far as the attempt has come.
    prepared_s = first_known(boundary_s, record.armed_s, record.prepare_ended_s)
    edges = (
        ("boot", record.boot_ended_s - record.phases.boot_s, record.boot_ended_s),
        ("prepare", record.prepare_started_s, prepared_s),
        ("crossing", boundary_s, record.first_step_ended_s),
        ("release", record.first_step_ended_s, record.released_s),
    )
    return [edge for edge in edges if edge[2] >= edge[1]]  # false where either is NaN
