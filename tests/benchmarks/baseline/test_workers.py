"""Workers that are scripts: who has ended in good order, and who has not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.baseline.lines import Orders, Written
from benchmarks.baseline.workers import Start, Workers
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout

WRITTEN = Written(step=3, boundary_s=1.0, saved_s=2.0, digests=()).model_dump_json()
SCRIPT = """
import os, sys, time
time.sleep(float(sys.argv[1]))
if sys.argv[2]:
    os.write(int(sys.argv[3]), (sys.argv[2] + "\\n").encode())
"""


OPENS = """
import os, sys, types
def open_device(rank):
    print(os.environ["CUDA_MODULE_LOADING"], file=sys.stderr, flush=True)
    os._exit(0)
sys.modules["liver_hpc.world.device"] = types.SimpleNamespace(open_device=open_device)
from benchmarks.baseline.worker import main
main()
"""


@contextmanager
def workers_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: list[tuple[float, str]]
) -> Iterator[Workers]:
    """A worker a part: after so many seconds it says this, and ends."""

    def command(workers: Workers, rank: int, read_fd: int, write_fd: int) -> list[str]:
        after_s, line = parts[rank]
        return [sys.executable, "-c", SCRIPT, str(after_s), line, str(write_fd)]

    monkeypatch.setattr(Workers, "_command", command)
    workers = Workers(Start(tmp_path, Layout(1, 1, len(parts)), 0), lambda step: None)
    try:
        yield workers
    finally:
        workers.kill()


def test_who_has_saved_may_end_while_others_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with workers_of(monkeypatch, tmp_path, [(0.0, WRITTEN), (1.0, WRITTEN)]) as workers:
        assert [line.step for line in workers.written(20.0)] == [3, 3]
        workers.join(10.0)


def test_who_ends_without_having_saved_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (
        workers_of(monkeypatch, tmp_path, [(0.0, WRITTEN), (0.2, "")]) as workers,
        pytest.raises(LiverError, match=r"workers \[1\] of .* ended before Written"),
    ):
        workers.written(20.0)


@pytest.mark.parametrize(("exported", "found"), [({}, "LAZY"), ({"CUDA_MODULE_LOADING": "X"}, "X")])
def test_nothing_that_only_a_handoff_needs_makes_a_restart_slower(
    exported: dict[str, str], found: str, tmp_path: Path
) -> None:
    """Where the runtime opens its device, all kernels are loaded unless the environment says."""
    orders = Orders(run_directory=tmp_path, layout="dp1", rank=0, generation=0)
    known = {name: v for name, v in os.environ.items() if name != "CUDA_MODULE_LOADING"}
    done = subprocess.run(
        [sys.executable, "-c", OPENS, orders.model_dump_json(), "0", "1"],
        env=known | exported,
        capture_output=True,
        encoding="utf-8",
        timeout=60.0,
        check=True,
    )
    assert done.stderr.split() == [found]
