"""What the page makes of a journal is what the core that wrote it knew, entry by entry."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from liver_hpc.dashboard.attempt import LiveAttempt, follow_attempt
from liver_hpc.dashboard.standing import Standing
from liver_hpc.protocol.attempt import Phase
from liver_hpc.report.holdings import HoldingsFold
from liver_hpc.run.codec import decode_event
from liver_hpc.run.lifecycle import ENDED, RECOVERING, STARTING, STOPPING
from liver_hpc.run.machine import Run
from tests.unit.run.endings import schedule

Step = tuple[Run, Standing, LiveAttempt | None]


def followed(seed: int) -> Iterator[Step]:
    """A schedule of anything that may happen: its core, and what the page knows, after each
    entry."""
    play = schedule(random.Random(seed).randbytes(400))
    core, held, attempt = play.scene.new_run(), HoldingsFold(), None
    standing = Standing(held)
    for entry in play.journal():
        if entry.event["type"] == "coordinator_started":
            core = play.scene.new_run()
        core.handle(decode_event(entry.event), entry.at_s)
        held.take(entry)
        standing.take(entry)
        attempt = follow_attempt(attempt, entry, held.node_of)
        if attempt is not None and core.recorder.attempt is not None:
            known = core.recorder.attempt.worker_phases(core.agents.node_of)
            assert repr(attempt.notes.worker_phases(held.node_of)) == repr(known)
        yield core, standing, attempt


def without_boot(entered_s: dict[Phase, float]) -> dict[Phase, float]:
    """It begins with the attempt, which is noted anyway."""
    return {phase: at_s for phase, at_s in entered_s.items() if phase is not Phase.BOOT}


@pytest.mark.parametrize("seed", range(24))
def test_the_attempt_in_progress_is_the_cores(seed: int) -> None:
    for core, _, attempt in followed(seed):
        status, notes = core.handoffs.status(), core.recorder.attempt
        assert (attempt is None) == (notes is None)
        if attempt is None or notes is None or status is None:
            continue
        assert (attempt.notes.generation, str(attempt.phase)) == (status.generation, status.phase)
        assert attempt.notes.request == notes.request
        assert attempt.notes.entered_s == without_boot(notes.entered_s)
        assert attempt.notes.bytes_total == notes.bytes_total


@pytest.mark.parametrize("seed", range(24))
def test_the_run_stands_where_the_core_stands(seed: int) -> None:
    for core, standing, _ in followed(seed):
        assert standing.ended == (core.state is ENDED)
        if core.ending is not None:
            assert standing.state == core.ending.state
            continue
        assert (standing.state == RECOVERING) == (core.state is RECOVERING)
        if standing.state == STOPPING:
            assert core.state is STOPPING
        world = core.handoffs.committed_world or core.world
        if (
            world is not None
            and core.state not in (STARTING, RECOVERING)
            and standing.world is not None
        ):
            assert standing.world.rank_map == world.rank_map
        held = {name for name, line in standing.nodes.items() if line.held[-1].until_s is None}
        assert held == {*core.elastic.nodes}


def test_schedules_show_all_that_a_handoff_can_come_to() -> None:
    """Else the two tests above say little."""
    seen: Counter[str] = Counter()
    for seed in range(24):
        for _, standing, attempt in followed(seed):
            seen[standing.state] += 1
            seen[str(attempt.phase) if attempt is not None else "none"] += 1
    phases = {"BOOT", "PREPARE", "ARMED", "TRANSFER", "RELEASE", "ABORT", "none"}
    wanted = phases | {"training", "recovering", "stopping"}
    assert wanted - seen.keys() == set()
