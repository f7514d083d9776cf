"""How long the parts of a handoff take: measured, fitted, predicted.

    boot_s, prepare_s   medians of the measured ones
    boundary            boundary_steps x the source's step
    pause               cross_s + busiest parameter bytes x s_per_parameter_byte
    first step          the target's step + extra_s + busiest state bytes x s_per_state_byte

The fit of the last two minimizes relative errors, with weights that are not negative. The target's
step has no weight of its own: a first step is at least a step, and where all measured handoffs move
about as many bytes, a weight could not be told from the bytes'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from scipy.optimize import nnls

from benchmarks.simulate.traffic import SampledTraffic, sampled_traffic
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.report.derive import run_figures
from liver_hpc.run.records import ReconfigurationRecord, RunRecords

FEWEST = 3
"""Measured handoffs that a fit wants."""


@dataclass(frozen=True)
class Work:
    """What the time of a handoff depends on. Steps in seconds, undisturbed."""

    joiners: int
    traffic: SampledTraffic
    source_step_s: float
    target_step_s: float


@dataclass(frozen=True)
class Times:
    """Parts of one handoff, in seconds; boot_s is 0 without joiners."""

    boot_s: float
    prepare_s: float
    boundary_s: float
    pause_s: float
    first_step_s: float

    @property
    def reconfiguration_s(self) -> float:
        """From the notice to the end of the target's first step."""
        return self.boot_s + self.prepare_s + self.boundary_s + self.pause_s + self.first_step_s


@dataclass(frozen=True)
class Measured:
    """One completed handoff of a run: its name, what it had to do, and how long it took."""

    name: str
    work: Work
    times: Times
    slowdown_s: float


@dataclass(frozen=True)
class Timings:
    """The model's parameters; see the module's docstring. slowdown_s: lost beside PREPARE."""

    boot_s: float
    prepare_s: float
    boundary_steps: float
    cross_s: float
    s_per_parameter_byte: float
    extra_s: float
    s_per_state_byte: float
    slowdown_s: float

    def predict(self, work: Work) -> Times:
        return Times(
            boot_s=self.boot_s if work.joiners else 0.0,
            prepare_s=self.prepare_s,
            boundary_s=self.boundary_steps * work.source_step_s,
            pause_s=self.cross_s + self.transfer_s(work),
            first_step_s=self.first_s(work),
        )

    def transfer_s(self, work: Work) -> float:
        """How long the busiest worker's parameters take."""
        return work.traffic.busiest_parameters * self.s_per_parameter_byte

    def first_s(self, work: Work) -> float:
        """The target's first step, with what is left of the optimizer's state behind it."""
        state_s = work.traffic.busiest_state * self.s_per_state_byte
        return work.target_step_s + self.extra_s + state_s

    def over(self, link_bytes_per_s: float, memory_bytes_per_s: float) -> Timings:
        """The same software over another link: a byte crosses once, and memory is passed five
        times (packed, unpacked, and digested on both sides; read once more by the wire)."""
        each = 1 / link_bytes_per_s + 5 / memory_bytes_per_s
        return replace(self, s_per_parameter_byte=each, s_per_state_byte=each)


def measured_handoffs(model: ModelSpec, records: RunRecords) -> list[Measured]:
    """The completed handoffs of a run, as far as all of their times are known."""
    figures = run_figures(records)
    worlds = {world.generation: world for world in figures.generations}
    found = []
    for record in figures.reconfigurations:
        if not record.completed or not {record.generation, record.source_generation} <= {*worlds}:
            continue
        source = _rank_map(record.source, record.source_workers)
        target = _rank_map(record.target, record.target_workers)
        joiners = len({*target.workers} - {*source.workers})
        times = _times(record, record.phases.boot_s if joiners else 0.0)
        work = Work(
            joiners,
            sampled_traffic(model, source, target, len(source.workers) + joiners),
            worlds[record.source_generation].median_step_s,
            worlds[record.generation].median_step_s,
        )
        known = (times.reconfiguration_s, work.source_step_s, work.target_step_s)
        if all(math.isfinite(value) for value in known):
            name = f"{record.source} > {record.target}"
            found.append(Measured(name, work, times, record.slowdown_s))
    return found


def _rank_map(layout: str, workers: str) -> RankMap:
    return RankMap(Layout.parse(layout), tuple(map(int, workers.split(","))))


def _times(record: ReconfigurationRecord, boot_s: float) -> Times:
    return Times(
        boot_s=boot_s,
        prepare_s=record.prepare_ended_s - record.prepare_started_s,
        boundary_s=record.source_last_step_ended_s - record.armed_s,
        pause_s=record.pause_s,
        first_step_s=record.first_step_ended_s - record.first_step_started_s,
    )


def fit(handoffs: Sequence[Measured]) -> Timings:
    """Raises LiverError for too few handoffs."""
    if len(handoffs) < FEWEST:
        raise LiverError(f"wanted at least {FEWEST} completed handoffs, got {len(handoffs)}")
    boots = [one.times.boot_s for one in handoffs if one.work.joiners]
    pauses_s = [one.times.pause_s for one in handoffs]
    cross_s, per_parameter = _weights(
        [one.work.traffic.busiest_parameters for one in handoffs], pauses_s, pauses_s
    )
    firsts_s = [one.times.first_step_s for one in handoffs]
    beyond_s = [one.times.first_step_s - one.work.target_step_s for one in handoffs]
    extra_s, per_state = _weights(
        [one.work.traffic.busiest_state for one in handoffs], beyond_s, firsts_s
    )
    return Timings(
        boot_s=median(boots) if boots else 0.0,
        prepare_s=median(one.times.prepare_s for one in handoffs),
        boundary_steps=median(one.times.boundary_s / one.work.source_step_s for one in handoffs),
        cross_s=cross_s,
        s_per_parameter_byte=per_parameter,
        extra_s=extra_s,
        s_per_state_byte=per_state,
        slowdown_s=max(0.0, median(one.slowdown_s for one in handoffs)),
    )


def held_out(handoffs: Sequence[Measured]) -> list[tuple[Measured, Times]]:
    """Each handoff with what a fit of all the others predicts for it."""
    return [
        (one, fit([*handoffs[:number], *handoffs[number + 1 :]]).predict(one.work))
        for number, one in enumerate(handoffs)
    ]


def _weights(
    num_bytes: Sequence[int], wanted_s: Sequence[float], relative_to_s: Sequence[float]
) -> tuple[float, float]:
    """Seconds in any case and seconds a byte, not negative, of least error relative to a time."""
    base = np.array(relative_to_s)
    rows = np.stack([np.ones(len(base)), np.array(num_bytes, dtype=float)], axis=1) / base[:, None]
    scale = np.maximum(rows.max(axis=0), 1e-300)  # bytes and ones differ by many magnitudes
    weights, _ = nnls(rows / scale, np.array(wanted_s) / base)
    fixed_s, per_byte_s = weights / scale
    return float(fixed_s), float(per_byte_s)
