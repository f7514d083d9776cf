"""A run in which everything happens that a report can show."""

from __future__ import annotations

import math

from liver_hpc.run.records import (
    CrossingRecord,
    MetricRecord,
    NoticeRecord,
    ObservationRecord,
    ReconfigurationRecord,
    RunRecords,
    StepRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)
from tests.unit.report.rows import (
    baseline,
    crossing,
    evaluation,
    reconfiguration,
    recovery,
    step,
    straggler,
)

HOSTILE = '<script>alert("x")</script> & \u00fc'
"""A name that would do harm where it is not escaped."""

SHAPES = ("tp1 pp1 dp2", "tp2 pp1 dp2", "tp1 pp2 dp2", "tp2 pp1 dp1")


def everything() -> RunRecords:
    """Three worlds, an aborted attempt, nodes that come and go, and two restarts for comparison."""
    steps: list[StepRecord] = [step(n) for n in range(20)]
    attempts: list[ReconfigurationRecord] = []
    phases: list[WorkerPhaseRecord] = []
    traffic: list[TrafficRecord] = []
    crossings: list[CrossingRecord] = []
    for generation, aborted in ((1, False), (2, True), (3, False)):
        boundary_s = 100.0 + 20 * len(attempts) + 20
        attempts.append(_attempt(generation, boundary_s, aborted))
        phases += _phases(generation, boundary_s, aborted)
        traffic += [TrafficRecord(generation, w, w + 1, 2**20 * (w + 1)) for w in range(3)]
        crossings += [] if aborted else _crossings(generation, boundary_s)
        world = 1 if aborted else generation
        first = "release" if aborted else "first"
        steps += [
            step(20 * len(attempts) + n, generation=world, phase="" if n else first)
            for n in range(20)
        ]
    return RunRecords(
        steps,
        attempts,
        [baseline(), baseline(lost_s=11.0), baseline(method="torch dcp", lost_s=8.0)],
        {"config": f"name: {HOSTILE}\n", "host": "n1", "name": HOSTILE, "torch": "2"},
        notices=_notices(),
        recoveries=[recovery(source_generation=3, generation=4, noticed_s=178.0, refilled_s=179.0)],
        worker_phases=phases,
        traffic=traffic,
        crossings=crossings,
        metrics=[MetricRecord(n, 0, name, n / 10) for n in (3, 4) for name in ("a", "lm loss")],
        observations=[
            ObservationRecord(
                180.0, 60, "nodes granted", SHAPES[3], SHAPES[1], "", 4.0, 1.5, "stays as it is"
            ),
            ObservationRecord(
                181.0,
                61,
                f"leaving {HOSTILE}: preempted",
                SHAPES[3],
                SHAPES[0],
                HOSTILE,
                math.nan,
                0.25,
                "to disk",
            ),
        ],
        stragglers=[straggler(HOSTILE, action="named alone")],
        evaluations=[evaluation(step=20 * n, loss=4.5 - n / 10) for n in (1, 2, 3)],
    )


def _attempt(generation: int, boundary_s: float, aborted: bool) -> ReconfigurationRecord:
    never = math.nan
    return reconfiguration(
        generation=generation,
        source_generation=0 if generation == 1 else 1,
        source=SHAPES[0] if generation == 1 else SHAPES[1],
        target=SHAPES[generation],
        target_workers="0,1,2,3",
        notice=f"resize ({HOSTILE})",
        outcome="aborted" if aborted else "completed",
        detail=f"PREPARE: {HOSTILE}" if aborted else "",
        notice_s=boundary_s - 10,
        boot_ended_s=boundary_s - 5,
        prepare_started_s=boundary_s - 5,
        prepare_ended_s=never if aborted else boundary_s - 1,
        armed_s=never if aborted else boundary_s - 1,
        source_last_step_ended_s=never if aborted else boundary_s,
        transfer_ended_s=never if aborted else boundary_s + 0.2,
        first_step_started_s=never if aborted else boundary_s + 0.2,
        committed_s=never if aborted else boundary_s + 0.9,
        first_step_ended_s=never if aborted else boundary_s + 1.25,
        released_s=never if aborted else boundary_s + 1.5,
        pause_s=never if aborted else 0.2,
    )


def _crossings(generation: int, boundary_s: float) -> list[CrossingRecord]:
    """Two workers of which the first is the last to vote, the second the last to end."""
    return [
        crossing(
            generation=generation,
            worker=worker,
            parameter_wire_s=0.125,
            parameter_pack_s=0.0625,
            started_s=boundary_s + 0.25 - worker / 8,
            forward_backward_s=0.5,
            optimizer_after_s=0.03125,
            voted_s=boundary_s + 0.78125 - worker / 8,
            verdict_s=0.0625 + worker / 8,
            update_s=0.375,
            ended_s=boundary_s + 1.125 + worker / 8,
        )
        for worker in (0, 1)
    ]


def _phases(generation: int, boundary_s: float, aborted: bool) -> list[WorkerPhaseRecord]:
    found = []
    for worker in range(4):
        late_s = 0.1 * worker
        ends = [("boot", -9.0, -5.0)] if worker > 1 else []
        ends += [("prepare", -5.0, -3.0 + late_s)]
        if aborted and worker == 3:
            ends[-1] = ("prepare", -5.0, math.nan)
        elif not aborted:
            ends += [
                ("connect", -3.0 + late_s, -2.0 + late_s),
                ("transfer", 0.0, 0.1 + late_s / 3),
                ("first step", 0.2, 0.9),
                ("update", 0.9, 1.2 + late_s / 10),
                ("release", 1.2 + late_s / 10, 1.4),
            ]
        found += [
            WorkerPhaseRecord(
                generation,
                worker,
                f"n{1 + worker // 2}",
                name,
                boundary_s + start,
                boundary_s + end,
            )
            for name, start, end in ends
        ]
    return found


def _notices() -> list[NoticeRecord]:
    never = math.nan
    return [
        NoticeRecord("granted", "n2", "7", 110.0, never, never, HOSTILE, 1, never, never, "in use"),
        NoticeRecord("preempted", "n2", "7", 150.0, 170.0, 2.0, "left", 3, 162.0, 163.0, "in time"),
        NoticeRecord("lost", HOSTILE, "8", 165.0, never, never, "", -1, never, never, "open"),
    ]
