"""Slurm's commands, with the answers that a Slurm 22.05 gave."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.cluster.slurm.commands import (
    SQUEUE_PACE,
    ControllerUnreachable,
    SlurmCommands,
    SlurmError,
    run_command,
)
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.errors import ConfigError
from tests.slurm_answers import Answer

AWAY = Answer(1, "", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)")
HET_JOB = """\
2|1+1|RUNNING|None|1795264860|n[2-3]|a|b
1|1+0|RUNNING|None|1795264860|n1|a|b
7|7|PENDING|Resources|N/A||a|b
"""


class Played:
    """A runner that plays answers in turn, the last one for ever, and notes what was asked."""

    def __init__(self, *answers: Answer | BaseException) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        self.asked.append(list(words))
        if words[:3] == ["scontrol", "show", "hostnames"]:
            assert words[3] == "n[2-3]"
            return Answer(0, "n2\nn3\n")
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


def commands(*answers: Answer | BaseException, unreachable_s: float = 0.0) -> SlurmCommands:
    return SlurmCommands(5.0, unreachable_s, FakeClock(), Played(*answers))


class Recorded:
    """A runner that notes when squeue was asked."""

    def __init__(self) -> None:
        self.at_s: list[float] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        if words[0] == "squeue":
            self.at_s.append(time.monotonic())
        return Answer(0, "")


def test_squeue_is_asked_at_a_pace_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SQUEUE_PACE, "interval_s", 0.2)
    recorded = Recorded()
    slurm = SlurmCommands(5.0, 0.0, run=recorded)
    threads = [
        threading.Thread(target=ask)
        for ask in (
            lambda: slurm.jobs(["1"]),
            lambda: slurm.once().named("run"),
            lambda: SlurmCommands(5.0, 0.0, run=recorded).steps(["1"]),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(recorded.at_s)]
    assert len(gaps) == 2
    assert min(gaps) > 0.15


def test_jobs_of_a_het_job_come_by_their_own_ids() -> None:
    assert commands(Answer(0, HET_JOB)).jobs(["1", "7"]) == {
        "1": JobInfo("1", "1", "RUNNING", "None", ("n1",), 1795264860.0, "a|b"),
        "2": JobInfo("2", "1", "RUNNING", "None", ("n2", "n3"), 1795264860.0, "a|b"),
        "7": JobInfo("7", None, "PENDING", "Resources", (), None, "a|b"),
    }


def test_jobs_that_nobody_knows_are_absent() -> None:
    unknown = Answer(1, "", "slurm_load_jobs error: Invalid job id specified\n")
    assert commands(unknown).jobs(["99"]) == {}
    assert commands(AWAY).jobs([]) == {}, "nothing was asked for"


def test_what_is_over_needs_no_cancelling() -> None:
    for complaint in (
        "scancel: error: Kill job error on job step id 77.1: Invalid job id specified",
        "scancel: error: Kill job error on job id 3: Job/step already completing or completed",
    ):
        commands(Answer(1, "", complaint)).cancel("77.1", signal="KILL")


def test_what_is_queued_again_needs_no_requeue() -> None:
    commands(Answer(1, "", "Job is pending execution for job 3")).requeue("3")


@pytest.mark.parametrize("answer", [AWAY, TimeoutExpired("slurm", 5.0)])
def test_an_absent_controller_is_asked_again(answer: Answer | BaseException) -> None:
    played = Played(answer, Answer(0, HET_JOB))
    assert len(SlurmCommands(5.0, 60.0, run=played).jobs(["1"])) == 3
    assert len(played.asked) == 3  # two squeues, one hostnames
    with pytest.raises(
        ControllerUnreachable, match=r"squeue .*(Unable to contact|no answer in 5 s)"
    ):
        SlurmCommands(5.0, 60.0, run=Played(answer)).once().jobs(["1"])


def test_a_refusal_is_not_repeated_and_says_what_was_asked() -> None:
    played = Played(Answer(1, "", "sbatch: error: invalid partition specified: nope"))
    with pytest.raises(SlurmError, match=r"^sbatch --parsable -p nope /x/s: exit code 1: .*nope$"):
        SlurmCommands(5.0, 60.0, run=played).sbatch(["-p", "nope"], Path("/x/s"))
    assert len(played.asked) == 1


def test_sbatch_gives_the_id_and_hands_over_the_words() -> None:
    played = Played(Answer(0, "123;east\n"))
    slurm = SlurmCommands(5.0, 0.0, run=played)
    assert slurm.sbatch(["--time=1"], Path("/a b/s"), ["-x", "y z"]) == "123"
    assert played.asked == [["sbatch", "--parsable", "--time=1", "/a b/s", "-x", "y z"]]


def test_what_a_site_has_sbatch_print_beside_the_id_is_passed_over() -> None:
    banner = "\n---- Welcome to the 7th Supercomputer ----\nNo reservation\n"
    for printed in (f"{banner}123\n", f"123;east\n{banner}"):
        slurm = SlurmCommands(5.0, 0.0, run=Played(Answer(0, printed)))
        assert slurm.sbatch([], Path("/s")) == "123"
    slurm = SlurmCommands(5.0, 0.0, run=Played(Answer(0, banner)))
    with pytest.raises(SlurmError, match="exit code 0: wanted a job id, got") as caught:
        slurm.sbatch([], Path("/s"))
    assert caught.value.code == 0


def test_squeue_is_asked_about_this_cluster_and_for_several_own_jobs_not_about_all() -> None:
    played = Played(*[Answer(0, "")] * 5)
    slurm = SlurmCommands(5.0, 0.0, run=played)
    slurm.jobs(["1", "2"], own=True)
    slurm.jobs(["1", "2"])
    slurm.steps(["1"])
    slurm.node_states(["n1"])
    assert all({"--local", "--all"} <= {*words} for words in played.asked)
    assert [any("--user" in word for word in words) for words in played.asked] == [
        True,
        *[False] * 4,
    ]


SHOWN = """\
StepId=1.batch UserId=0 StartTime=2026-11-28T11:48:34 CPUs=0 Name=batch Network=(null)
StepId=1.0 UserId=0 StartTime=2026-11-28T11:48:34 CPUs=4 Name=liver-a|b Network=(null)
"""


def test_steps_that_squeue_lists() -> None:
    listed = Answer(0, "2.1|liver-a\n2.batch|batch\n2.4|liver-a|b\n")
    slurm = SlurmCommands(5.0, 0.0, run=(played := Played(listed)))
    assert slurm.steps(["2"]) == {
        "liver-a": ["2.1"],
        "batch": ["2.batch"],
        "liver-a|b": ["2.4"],
    }
    assert len(played.asked) == 1


def test_steps_that_the_jobs_own_nodes_know() -> None:
    listed = Answer(0, "2.1|liver-a\n1.batch|batch\n")
    gone = Answer(1, "", "slurm_get_job_steps error: Invalid job id specified")
    ended = Answer(1, "Job step 4. not found\n", "")
    slurm = SlurmCommands(5.0, 0.0, run=(played := Played(listed, Answer(0, SHOWN), gone, ended)))
    assert slurm.steps(["1", "2", "3", "4"]) == {
        "liver-a": ["2.1"],
        "batch": ["1.batch"],
        "liver-a|b": ["1.0"],
    }
    assert [words[-1] for words in played.asked[1:]] == ["1", "3", "4"]


def test_whether_steps_are_left_is_not_known_where_nobody_answers() -> None:
    with pytest.raises(ControllerUnreachable):
        commands(Answer(0, "1.batch|batch\n"), AWAY).steps(["1"])


def test_node_states() -> None:
    states = "n1|idle+drain|\nn1|idle+drain|\nn2|allocated|\n"
    assert commands(Answer(0, states)).node_states(["n1", "n2"]) == {
        "n1": "idle+drain",
        "n2": "allocated",
    }


PARTITION = (
    "PartitionName=preempt AllowGroups=ALL AllocNodes=ALL Default=NO GraceTime=6 Hidden=NO "
    "MaxNodes=UNLIMITED MaxTime=1-02:00:00 Nodes=n[1-3] PriorityTier=1 PreemptMode=REQUEUE "
    "State=UP TRES=cpu=12,mem=10500M,node=3,billing=12\n"
)


def test_partitions_and_settings() -> None:
    (partition,) = commands(Answer(0, PARTITION)).partitions().values()
    assert (partition.name, partition.grace_s, partition.preempt_mode) == (
        "preempt",
        6.0,
        "REQUEUE",
    )
    config = Answer(0, "Configuration data as of now\nKillWait                = 5 sec\n")
    assert commands(config).setting("KillWait") == "5 sec"
    with pytest.raises(SlurmError, match="no setting 'Nonsense'"):
        commands(config).setting("Nonsense")


@pytest.mark.parametrize("variable", ["SBATCH_CLUSTERS", "SLURM_CLUSTERS"])
def test_an_environment_that_names_another_cluster_is_refused(variable: str) -> None:
    slurm = commands(*[Answer(0, "ClusterName             = inter\n")] * 2)
    slurm.check_cluster({})
    slurm.check_cluster({variable: "cm4,Inter"})
    with pytest.raises(ConfigError, match=f"{variable} names cluster cm4, .* `sbatch -M cm4`, or"):
        slurm.check_cluster({variable: "cm4"})


def test_a_command_runs_in_the_environment_of_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    printed = run_command(["env"], 5.0).stdout.splitlines()
    assert "SLURM_TIME_FORMAT=%s" in printed
    assert not any(line.startswith("SLURM_JOB_ID") for line in printed)
    hides = {"SQUEUE_PARTITION": "gpu", "SCANCEL_INTERACTIVE": "1", "SBATCH_CLUSTERS": "a"}
    hides |= {"SBATCH_EXPORT": "NONE", "SBATCH_WAIT": "1", "SBATCH_ARRAY_INX": "0-3"}
    hides |= {"SBATCH_ERROR": "errors/%j", "SBATCH_SIGNAL": "B:USR2@60", "SBATCH_ACCOUNT": "a"}
    for name, value in hides.items():
        monkeypatch.setenv(name, value)
    for environment in (None, os.environ):
        printed = run_command(["env"], 5.0, environment).stdout.splitlines()
        told = {line.partition("=")[0] for line in printed} & hides.keys()
        assert told == {"SBATCH_ACCOUNT"}
    with pytest.raises(TimeoutExpired):
        run_command(["sleep", "5"], 0.1)
    with pytest.raises(SlurmError, match="squeue"):
        commands(FileNotFoundError("no such file")).jobs(["1"])
