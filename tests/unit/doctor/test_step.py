"""The line on which probes are asked: what is passed over, what is told, and that it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.doctor.nodes import Nodes
from liver_hpc.errors import DeadlineError, LiverError

LIMIT_S = 20.0

ANSWERS = """
import json, sys
print("module loaded")
for line in sys.stdin:
    number = json.loads(line)["number"]
    for told in (number - 1, number):  # the one before again, as from a probe that was late
        answer = {"number": told, "node": "n1", "told": told}
        print("liver doctor: " + json.dumps(answer), flush=True)
"""

# As an srun whose controller is gone: neither SIGTERM nor the end of its input ends it.
SRUN = """#!/bin/sh
trap '' TERM
echo $$ > {pid_file}
while :; do sleep 0.1; done
"""

DOCTOR = """
from subprocess import CompletedProcess

from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.config.schema import RunConfig
from liver_hpc.doctor import nodes
from liver_hpc.doctor.checks import Order

nodes._KILL_S = 0.5
commands = SlurmCommands(1.0, 1.0, run=lambda words, limit_s: CompletedProcess(words, 0, "", ""))
with nodes.nodes_of(Order(RunConfig.model_construct(), nodes=1, commands=commands)):
    pass
"""


def python(program: str, count: int = 1) -> Nodes:
    return Nodes([sys.executable, "-c", program], count, Path(), {})


def test_what_else_is_printed_and_answers_that_come_late_are_passed_over() -> None:
    with closing(python(ANSWERS)) as probes:
        assert probes.ask(["n1"], "a", LIMIT_S)["n1"]["told"] == 1
        assert probes.ask((), "b", LIMIT_S)["n1"]["told"] == 2


def test_the_last_words_of_a_step_that_failed_are_told() -> None:
    program = "import sys; sys.exit('srun: error: Unable to create step')"
    with (
        closing(python(program)) as broken,
        pytest.raises(LiverError, match="the a probe on n1: srun: error: Unable to create step"),
    ):
        broken.ask(["n1"], "a", LIMIT_S)


def test_a_step_that_ends_without_a_word_says_how() -> None:
    with (
        closing(python("import sys; sys.exit(3)")) as broken,
        pytest.raises(LiverError, match=r"it said nothing \(exit code 3\)"),
    ):
        broken.ask(["n1"], "a", LIMIT_S)


def test_a_late_node_has_a_deadline_and_the_others_are_named() -> None:
    with (
        closing(python(ANSWERS, count=2)) as probes,
        pytest.raises(DeadlineError, match=r"waited 1 s for the a probe on 2 nodes; only n1 ans"),
    ):
        probes.ask((), "a", 1.0)


def test_a_step_that_does_not_end_with_its_input_is_ended() -> None:
    silent = python("import time; time.sleep(300)")
    with closing(silent), pytest.raises(DeadlineError, match=r"waited 0.3 s for the a probe on n1"):
        silent.ask(["n1"], "a", 0.3)
    assert silent._child.how() == f"signal {signal.SIGTERM:d}"


def test_an_srun_that_does_not_end_is_killed_with_the_doctor(tmp_path: Path) -> None:
    srun, pid_file = tmp_path / "srun", tmp_path / "pid"
    srun.write_text(SRUN.format(pid_file=pid_file))
    srun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    doctor = subprocess.Popen([sys.executable, "-c", DOCTOR], env=environment, cwd=tmp_path)
    waits_for = Deadline.after(SystemClock(), 20.0, "srun to start")
    poll_until(lambda: pid_file.exists() and bool(pid_file.read_text()), waits_for, 0.05)
    pid = int(pid_file.read_text())
    doctor.send_signal(signal.SIGKILL)
    doctor.wait(10.0)
    waits_for = Deadline.after(SystemClock(), 10.0, "srun to be killed")
    poll_until(lambda: not psutil.pid_exists(pid), waits_for, 0.05)


def test_the_command_says_what_it_takes() -> None:
    words = [sys.executable, "-m", "liver_hpc", "doctor", "--help"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert "--nodes N" in printed
