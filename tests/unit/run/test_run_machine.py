"""Whole runs, played: whatever comes in whatever order, the run keeps its promises.

What is promised is in `watch.py` (after every event) and `endings.py` (at the end of a schedule).
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from liver_hpc.run import actions as a
from liver_hpc.run.actions import Ending
from liver_hpc.run.records import NoticeRecord, ReconfigurationRecord, RecoveryRecord
from tests.unit.run.endings import schedule

SCHEDULES = 1_000
MANY_SCHEDULES = 40_000
SEEN = ReconfigurationRecord | NoticeRecord

play_many = settings(
    derandomize=True, database=None, deadline=None, phases=(Phase.generate, Phase.shrink)
)
play_others = settings(play_many, derandomize=False)
"""Other ones each time."""


@pytest.mark.timeout(600)
@settings(play_many, max_examples=SCHEDULES)
@given(st.binary(min_size=64, max_size=192))
def test_whatever_comes_the_run_keeps_its_promises(data: bytes) -> None:
    schedule(data)


@pytest.mark.long
@pytest.mark.timeout(3600)
@settings(play_others, max_examples=MANY_SCHEDULES)
@given(st.binary(min_size=192, max_size=600))
def test_however_long_it_lasts_the_run_keeps_its_promises(data: bytes) -> None:
    schedule(data)


def test_two_workers_that_are_both_wrong_do_not_agree() -> None:
    """In this schedule both copies' digests are wrong; they once were the same wrong ones."""
    rng = random.Random(19_350)
    schedule(rng.randbytes(rng.randrange(64, 192)))


def test_schedules_show_all_that_can_become_of_a_run() -> None:
    """Or their promises would be cheap."""
    outcomes: Counter[str] = Counter()
    for seed in range(400):
        play = schedule(random.Random(seed).randbytes(160))
        outcomes[f"{play.starts} starts"] += 1
        for _, _, actions in play.entries:
            for action in actions:
                if isinstance(action, a.End):
                    outcomes[action.state] += 1
                elif isinstance(action, a.Record) and isinstance(action.row, RecoveryRecord):
                    outcomes["recoveries"] += 1
                elif isinstance(action, a.Record) and isinstance(action.row, SEEN):
                    outcomes[f"{type(action.row).__name__} {action.row.outcome}"] += 1
    handoffs = {f"ReconfigurationRecord {how}" for how in ("completed", "aborted", "failed")}
    notices = {"in time", "late", "lost", "in use", "not needed", "to disk", "open"}
    wanted = {
        "recoveries",
        *Ending,
        *handoffs,
        *(f"NoticeRecord {how}" for how in notices),
        "2 starts",
    }
    assert not {what for what in wanted if outcomes[what] < 3}, outcomes


def journals_digest(schedules: int) -> str:
    """Of what is decided in some schedules."""
    found = hashlib.sha256()
    for seed in range(schedules):
        for entry in schedule(random.Random(seed).randbytes(160)).journal():
            found.update(repr(entry).encode())
    return found.hexdigest()


def test_another_process_decides_the_same(repository: Path) -> None:
    """The order of a set differs from process to process; no decision may depend on it."""
    code = (
        "from tests.unit.run.test_run_machine import journals_digest; print(journals_digest(100))"
    )
    elsewhere = subprocess.run(
        [sys.executable, "-c", code],
        cwd=repository,
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert elsewhere.stdout.strip() == journals_digest(100)
