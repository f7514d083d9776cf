"""A worker's output, and its end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRINT_AND_LEAVE = """
import os, socket, sys
import tests.megatron_first
from liver_hpc.worker import main as worker
from liver_hpc.worker.control import leave

def boot(*_):
    for step in range(1000):
        print("step", step)
        print("step", step, file=sys.stderr)
    leave(4)

worker.boot = boot
ours, _agents = socket.socketpair()
os.environ["LIVER_AGENT_FD"] = str(ours.detach())
worker.main(["--run-directory", ".", "--layout", "tp1 pp1 dp1"])
"""


def print_and_leave(output: str, *options: str) -> int:
    """The exit status."""
    command = [sys.executable, *options, "-c", PRINT_AND_LEAVE]
    with open(output, "wb") as log:
        return subprocess.run(command, stdout=log, stderr=log, check=False).returncode


@pytest.mark.timeout(60)
@pytest.mark.parametrize("options", [(), pytest.param(("-u",), marks=pytest.mark.long)])
def test_a_worker_that_prints_onto_a_full_disk_goes_on_to_its_end(options: tuple[str, ...]) -> None:
    assert print_and_leave("/dev/full", *options) == 4


@pytest.mark.timeout(60)
def test_what_a_worker_prints_is_in_its_log(tmp_path: Path) -> None:
    assert print_and_leave(str(tmp_path / "log")) == 4
    assert (tmp_path / "log").read_text().count("step 999\n") == 2
