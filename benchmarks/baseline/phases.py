"""A restart as points in time, and the record that they make. Pure.

Lost time has one definition for a restart and for a handoff: from the end of the source's last
step to the end of the target's first, less the target's median step.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

from liver_hpc.run.records import BaselineRecord

EXISTS = ", exists"
"""Ends the method's name where the checkpoint had been there already."""


@dataclass(frozen=True)
class RestartTimes:
    """Epoch seconds, of the last worker to get there."""

    noticed_s: float
    last_step_ended_s: float
    saved_s: float
    stopped_s: float
    entered_s: float
    imported_s: float
    built_s: float
    loaded_s: float
    first_step_ended_s: float


@dataclass(frozen=True)
class Restart:
    """One restart that was done. target_steps_s: length of the target's steps after its first.

    reconfiguration_s: from the request to stop to the end of the target's first step.
    num_bytes: of the checkpoint's files.
    """

    method: str
    source: str
    target: str
    times: RestartTimes
    target_steps_s: tuple[float, ...]
    num_bytes: int

    @property
    def median_step_s(self) -> float:
        return statistics.median(self.target_steps_s)

    @property
    def reconfiguration_s(self) -> float:
        return self.times.first_step_ended_s - self.times.noticed_s

    def record(self) -> BaselineRecord:
        """The phases; `total_s` is their sum, `lost_s` less than that by a median step."""
        times = self.times
        total_s = times.first_step_ended_s - times.last_step_ended_s
        return BaselineRecord(
            method=self.method,
            source=self.source,
            target=self.target,
            save_s=times.saved_s - times.last_step_ended_s,
            stop_s=times.stopped_s - times.saved_s,
            launch_s=times.entered_s - times.stopped_s,
            import_s=times.imported_s - times.entered_s,
            groups_s=times.built_s - times.imported_s,
            load_s=times.loaded_s - times.built_s,
            first_step_s=times.first_step_ended_s - times.loaded_s,
            total_s=total_s,
            detail=f"page cache warm, {self.num_bytes} bytes",
            lost_s=total_s - self.median_step_s,
        )


def as_if_saved_before(record: BaselineRecord) -> BaselineRecord:
    """The best case of the same restart: the checkpoint of this very step exists already."""
    return replace(
        record,
        method=record.method + EXISTS,
        save_s=0.0,
        total_s=record.total_s - record.save_s,
        lost_s=record.lost_s - record.save_s,
    )
