"""What holds the doctor's nodes ends with the doctor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from liver_hpc.clock import Deadline, SystemClock, poll_until

# As a salloc whose controller is gone: neither SIGTERM nor the end of its command ends it.
SALLOC = """#!/bin/sh
trap '' TERM
echo $$ > {pid_file}
while :; do sleep 0.1; done
"""

DOCTOR = """
from pathlib import Path
from liver_hpc.cluster.slurm.commands import Answer, SlurmCommands
from liver_hpc.doctor import allocation
from liver_hpc.doctor.order import Order

allocation._KILL_S = 0.5
order = Order.of(None, Path("runs"))
with allocation.taken(order, SlurmCommands(1.0, 1.0, run=lambda words, limit_s: Answer(0, "", ""))):
    pass
"""


def test_a_salloc_that_does_not_end_is_killed_with_the_doctor(tmp_path: Path) -> None:
    salloc, pid_file = tmp_path / "salloc", tmp_path / "pid"
    salloc.write_text(SALLOC.format(pid_file=pid_file))
    salloc.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    doctor = subprocess.Popen([sys.executable, "-c", DOCTOR], env=environment)
    waits_for = Deadline.after(SystemClock(), 20.0, "salloc to start")
    poll_until(lambda: pid_file.exists() and bool(pid_file.read_text()), waits_for, 0.05)
    pid = int(pid_file.read_text())
    doctor.send_signal(signal.SIGKILL)
    doctor.wait(10.0)
    waits_for = Deadline.after(SystemClock(), 10.0, "salloc to be killed")
    poll_until(lambda: not psutil.pid_exists(pid), waits_for, 0.05)
