"""The line on which probes are asked: what is passed over, what is told, and that it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

import psutil
import pytest

from liver_hpc.cli.main import main as liver
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.doctor import command
from liver_hpc.doctor.checks import Order
from liver_hpc.doctor.nodes import Nodes, nodes_of
from liver_hpc.errors import DeadlineError, LiverError
from tests.unit.config.runs import minimal

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


def test_a_step_that_does_not_end_with_its_input_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liver_hpc.doctor.nodes._END_S", 0.5)
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


GREETS = """
import json, sys
number = json.loads(sys.stdin.readline())["number"]
print("liver doctor: " + json.dumps({"number": number, "node": "n1", "job": "77"}), flush=True)
sys.stdin.read()
"""


CHEAP = ("--qos=cheap", "--exclusive")


@pytest.mark.parametrize(
    ("partition", "account", "wanted"),
    [
        ("gpu", None, {"--cpus-per-task=8", "--mem=0", "--constraint=ib", "--account=physics"}),
        ("preempt", None, {"--cpus-per-task=4", "--mem-per-gpu=8G", *CHEAP, "--account=guest"}),
        ("preempt", "mine", {"--cpus-per-task=4", "--mem-per-gpu=8G", *CHEAP, "--account=mine"}),
        ("other", None, {"--account=physics"}),
    ],
)
def test_probes_start_as_what_a_run_starts(
    partition: str,
    account: str | None,
    wanted: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind `setup`, which brings the srun here, and gets nothing of what is said to it."""
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    (tmp_path / "module").mkdir()
    srun = tmp_path / "module" / "srun"
    greets = f"exec {sys.executable} -c '{GREETS}'"
    told = f'echo "$SRUN_EXPORT_ENV" > {tmp_path}/exported'
    srun.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{told}\n{greets}\n')
    srun.chmod(0o755)
    options = {"mem": 0, "constraint": "ib"}
    main = {"name": "main", "partition": "gpu", "cpus_per_node": 8, "options": options}
    burst = {"partition": "preempt", "max_nodes": 1, "cpus_per_node": 4}
    cheap = {"mem-per-gpu": "8G", "account": "guest", "qos": "cheap", "exclusive": True}
    slurm = {
        "account": "physics",
        "components": [main],
        "burst": {**burst, "options": cheap},
        "setup": ["cat", f'export PATH={tmp_path}/module:"$PATH"'],
        "step_options": {"export": "ALL,TOKEN=secret"},
    }
    config = minimal(cluster={"kind": "slurm", "slurm": slurm}, runs_directory=tmp_path / "runs")
    commands = SlurmCommands(1.0, 1.0, run=lambda words, _: CompletedProcess(words, 0, "", ""))
    order = Order(config, nodes=1, partition=partition, account=account, commands=commands)
    with nodes_of(order) as (nodes, job):
        assert (nodes.names, job) == (["n1"], "77")
    given = {*(tmp_path / "words").read_text().split()}
    some = ("--cpus-per-task", "--mem", "--constraint", "--account", "--qos", "--exclusive")
    assert {word for word in given if word.startswith(some)} == wanted
    assert (tmp_path / "exported").read_text() == "ALL,TOKEN=secret\n"


def test_probes_in_a_job_are_a_step_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    srun = tmp_path / "srun"
    greets = f"exec {sys.executable} -c '{GREETS}'"
    srun.write_text(f'#!/bin/sh\necho "$SLURM_JOB_ID $@" > {tmp_path}/words\n{greets}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    config = minimal(runs_directory=tmp_path / "runs")
    with nodes_of(Order(config, nodes=1, partition="other")) as (_, job):
        assert job == "77"
    job, *given = (tmp_path / "words").read_text().split()
    assert job == "77"
    assert {"--jobid=77", "--overlap"} <= {*given}
    assert not any(word.startswith(("--partition", "--time")) for word in given)


def test_probes_start_in_an_image_before_the_first_run_has_made_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    srun = tmp_path / "srun"
    greets = f"exec {sys.executable} -c '{GREETS}'"
    srun.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{greets}\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    container = {"runtime": "charliecloud", "image": "/image"}
    config = minimal(
        cluster={"kind": "slurm", "slurm": {"container": container}},
        checkpoint={"directory": tmp_path / "to-come", "load": tmp_path},
        runs_directory=tmp_path / "runs",
    )
    commands = SlurmCommands(1.0, 1.0, run=lambda words, _: CompletedProcess(words, 0, "", ""))
    with nodes_of(Order(config, nodes=1, commands=commands)):
        told = (tmp_path / "words").read_text()
    assert "to-come" not in told
    assert f"--bind={tmp_path}:{tmp_path} " in told


@pytest.mark.parametrize(
    ("refusal", "advice"),
    [
        ("Invalid account or account/partition combination specified", "--account"),
        ("Invalid qos specification", "`qos`"),
        ("Job's QOS not permitted to use this partition", "`qos`"),
        ("the request is pending, AccountNotAllowed", "--account"),
        ("the request is pending, Resources", "fewer nodes"),
        ("Job violates accounting/QOS policy (job submit limit)", "fewer nodes"),
    ],
)
def test_who_is_refused_for_an_account_is_told_where_it_is_given(
    refusal: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refused(_order: Order) -> NoReturn:
        raise LiverError(f"the hello probe on 2 nodes: srun: error: {refusal}")

    monkeypatch.setattr(command, "nodes_of", refused)
    monkeypatch.setattr(command, "LOGIN_CHECKS", ())
    monkeypatch.setattr(command, "_NEEDED", ())
    assert liver(["doctor", "--nodes", "2"]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert advice in line.partition(refusal)[2]


def test_the_command_says_what_it_takes() -> None:
    words = [sys.executable, "-m", "liver_hpc", "doctor", "--help"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S).stdout
    assert "--nodes N" in printed
