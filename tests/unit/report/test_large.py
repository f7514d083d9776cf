"""A long run: how large its journal is, and how long its report takes."""

from __future__ import annotations

import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from liver_hpc.run.entries import JOURNAL_FILE
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.journal import Journal
from tests.unit.config.runs import write_minimal

STEPS = 100_000
MOST_BYTES_A_STEP = 300
MOST_TIMES = 5.0


def write_steps(path: Path) -> None:
    """With figures of as many digits as there are."""
    numbers = random.Random(1)
    journal = Journal(path, lambda told: None, Epoch(path.parent, 1), 0)
    end_s = 1.8e9
    for step in range(STEPS):
        start_s, end_s = end_s, end_s + 1.0 + numbers.random()
        event = {
            "type": "step_done", "worker": 0, "generation": step // 10_000, "step": step,
            "loss": numbers.random(), "grad_norm": numbers.random(),
            "learning_rate": numbers.random(), "tokens": 2**22,
            "started_s": start_s, "ended_s": end_s,
        }  # fmt: skip
        phase = [{"type": "step_phase", "phase": "first"}] if step % 10_000 == 0 else []
        journal.append(end_s, event, phase)
    journal.close(60.0)
    assert journal.error == ""


def cpu_s(*words: str) -> tuple[float, str]:
    """The CPU seconds of a Python process, and what it prints."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-P", *words], capture_output=True, text=True, timeout=100, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


@pytest.mark.slow
def test_a_long_run_takes_little_room_and_its_report_little_time(tmp_path: Path) -> None:
    """Little: not many times as much as Python's own reading of the lines, of the same moment. How
    fast the machine is, and what else it does, counts on both sides."""
    write_minimal(tmp_path)
    path = tmp_path / JOURNAL_FILE
    write_steps(path)
    assert path.stat().st_size <= MOST_BYTES_A_STEP * STEPS
    taken_s, printed = cpu_s("-m", "liver_hpc", "report", str(tmp_path))
    plain_s, _ = cpu_s("-c", f"import json; [*map(json.loads, open({str(path)!r}))]")
    assert f"{STEPS} in" in printed
    print(f"{path.stat().st_size / 1e6:.1f} MB, {taken_s:.2f} s, plain {plain_s:.2f} s")
    assert taken_s < MOST_TIMES * plain_s
