"""What many handoffs leave: the arithmetic, the footprint of real processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.handoffs.__main__ import Sample, growth, result
from benchmarks.processes import Footprint, footprint, living


def held(memory_bytes: int, more: int = 0) -> Footprint:
    return Footprint(4 + more, 20 + more, 100 + more, memory_bytes)


def test_growth_is_of_medians_at_both_ends_without_the_first() -> None:
    """The first three load what none has used before; one sample in between is off."""
    samples = [held(500), held(700), held(800)]
    samples += [held(1000), held(1000), held(9000), held(1000)]
    samples += [held(1020), held(1020, 2), held(1020, 2)]
    assert growth(samples) == pytest.approx(
        {
            "memory_growth_percent": 2.0,
            "descriptors_growth": 2,
            "threads_growth": 2,
            "processes_growth": 2,
        }
    )


def test_of_few_samples_the_ends_are_compared() -> None:
    assert growth([held(1000), held(1100), held(1500)])["memory_growth_percent"] == pytest.approx(
        50
    )
    assert growth([held(1000)])["memory_growth_percent"] == 0.0


def test_the_worse_part_is_told() -> None:
    samples = [Sample("handoffs", n, held(1000)) for n in range(4)]
    samples += [Sample("replacements", n, held(1000 + 10 * n, n)) for n in range(6)]
    found = result(samples, 1)
    assert found.figures["memory_growth_percent"] == pytest.approx(100 * (1040 / 1010 - 1))
    assert found.figures["processes_growth"] == 3
    assert found.figures["processes_left"] == 1
    assert [row["part"] for row in found.rows] == ["handoffs"] * 4 + ["replacements"] * 6


@pytest.fixture
def sleeper() -> Iterator[tuple[str, psutil.Process]]:
    """A process with a child, known by a word of its command line."""
    script = (
        "import subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);"
        "print('ready', flush=True); input(); child.kill(); child.wait()"
    )
    word = "test-handoffs-sleeper"
    process = subprocess.Popen(
        [sys.executable, "-c", script, word], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield word, psutil.Process(process.pid)
    process.communicate(b"\n")


def test_a_run_is_its_named_processes_and_their_children(
    sleeper: tuple[str, psutil.Process],
) -> None:
    word, process = sleeper
    found = living(word)
    assert {each.pid for each in found} == {process.pid, *(c.pid for c in process.children())}
    seen = footprint(found)
    assert (seen.processes, seen.threads) == (2, 2)
    assert seen.descriptors >= 6
    assert 2**20 < seen.memory_bytes < 2**30


def test_of_no_process_nothing_is_held() -> None:
    assert footprint([]) == Footprint(0, 0, 0, 0)
