"""Burst requests as jobs: refused, taken unheard, hopeless."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.cluster.slurm.burst_jobs import REJECTED_S, BurstJobs
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.config.schema import RunConfig
from tests.slurm_answers import Answer

BURST = {"partition": "preempt", "max_nodes": 2, "time_min": 60}
CONFIG = RunConfig.model_validate(
    {
        "data": {"text": "python-stdlib"},
        "train": {"steps": 1, "global_batch": 8},
        "workers": {"initial": 1, "max": 1},
        "layouts": {1: {}},
        "cluster": {"slurm": {"burst": BURST}},
    }
)


class Cluster:
    """Answers each command by its name, and notes what was asked."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | BaseException] = {}
        self.asked: list[list[str]] = []
        self.notes: list[str] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        self.asked.append(list(words))
        answer = self.answers.get(words[0], Answer(0, ""))
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def burst_jobs(cluster: Cluster, clock: FakeClock, run_directory: Path) -> BurstJobs:
    commands = SlurmCommands(5.0, 0.0, clock, cluster)
    return BurstJobs(CONFIG, commands, run_directory, clock, cluster.notes.append)


@pytest.fixture
def jobs(cluster: Cluster, tmp_path: Path) -> BurstJobs:
    jobs = burst_jobs(cluster, FakeClock(), tmp_path)
    jobs.policy.want(1)
    return jobs


def test_a_request_whose_answer_was_lost_is_found_by_its_name(
    cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = TimeoutExpired("slurm", 5.0)
    with pytest.raises(ControllerUnreachable):
        jobs.act()
    assert jobs.policy.pending == {}
    # It runs already when the controller answers again.
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    (granted,) = jobs.observe({})
    assert (granted.job, granted.nodes, granted.burst) == ("7", ("n4",), True)
    assert cluster.notes == ["burst request 7 was taken after all"]
    jobs.act()
    assert [words[0] for words in cluster.asked].count("sbatch") == 1


def test_a_request_is_found_by_its_name_however_long_slurm_was_silent(
    cluster: Cluster, tmp_path: Path
) -> None:
    """As while one controller takes over from another; and so by the next coordinator."""
    clock = FakeClock()
    first = burst_jobs(cluster, clock, tmp_path)
    first.open(adopt=False)
    first.policy.want(1)
    cluster.answers["sbatch"] = TimeoutExpired("slurm", 5.0)
    with pytest.raises(ControllerUnreachable):
        first.act()
    clock.advance(300.0)
    first.save()
    second = burst_jobs(cluster, clock, tmp_path)
    second.open(adopt=True)
    clock.advance(300.0)
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    for each in (first, second):
        assert [granted.job for granted in each.observe({})] == ["7"]
    cluster.answers["squeue"] = Answer(0, "")
    for each in (first, second):
        each.close()


def test_a_request_that_slurm_carries_out_late_is_found_too(
    cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = TimeoutExpired("slurm", 5.0)
    with pytest.raises(ControllerUnreachable):
        jobs.act()
    assert jobs.observe({}) == []
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    assert [granted.job for granted in jobs.observe({})] == ["7"]


def test_a_request_whose_id_is_not_in_what_sbatch_prints_is_found_and_none_follows_it(
    cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = Answer(0, "Welcome\n")
    for _ in range(3):
        jobs.act()
    assert [words[0] for words in cluster.asked].count("sbatch") == 1
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    assert [granted.job for granted in jobs.observe({})] == ["7"]
    assert "wanted a job id" in cluster.notes[0]


@pytest.mark.parametrize(
    ("reason", "hopeless"),
    [
        ("QOSMaxWallDurationPerJobLimit", True),
        ("AssocMaxNodePerJobLimit", True),
        ("QOSMaxGRESPerJob", True),
        ("AssocMaxCpuPerNode", True),
        ("QOSMaxMemoryPerNode", True),
        ("QOSMinCpuNotSatisfied", True),
        ("QOSMinGRES", True),
        ("MaxMemPerLimit", True),
        ("PartitionConfig", True),
        ("AccountNotAllowed", True),
        ("Job's account not permitted to use this partition (p allows a not b)", True),
        ("uid 7 not in group permitted to use this partition (p). groups allowed: g", True),
        ("QOSNotAllowed", True),
        ("Job's QOS not permitted to use this partition (p allows a not b)", True),
        ("DependencyNeverSatisfied", True),
        ("ReservationDeleted", True),
        ("ReservationInvalid", True),
        ("QOSMaxJobsPerUserLimit", False),
        ("QOSMaxCpuPerUserLimit", False),
        ("QOSMaxNodePerUserLimit", False),
        ("QOSMaxSubmitJobPerUserLimit", False),
        ("QOSGrpNodeLimit", False),
        ("QOSUsageThreshold", False),
        ("MaxNodePerAccount", False),
        ("AssocMaxJobsLimit", False),
        ("AssocGrpNodeLimit", False),
        ("Dependency", False),
        ("Reservation", False),
        ("Resources", False),
    ],
)
def test_what_no_waiting_mends_is_not_waited_for(reason: str, hopeless: bool) -> None:
    assert JobInfo("7", None, "PENDING", reason, (), None).hopeless is hopeless


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ("PENDING", "PartitionTimeLimit"),
        ("PENDING", "QOSNotAllowed"),
        ("PENDING", "Job's QOS not permitted to use this partition (p allows a not b)"),
        ("RESV_DEL_HOLD", "Reservation r was deleted"),
    ],
)
def test_a_request_that_can_never_start_is_a_refused_one(
    state: str, reason: str, cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = Answer(0, "7\n")
    jobs.act()
    assert jobs.policy.pending == {"7": 1}
    cluster.answers["squeue"] = Answer(0, f"7|7|{state}|{reason}|N/A||burst\n")
    assert jobs.observe(_now(cluster)) == []
    assert cluster.notes == [f"burst request 7 was refused: {reason}"]
    assert cluster.asked[-1] == ["scancel", "7"]
    jobs.act()
    assert jobs.policy.pending == {}, "not before the back-off is over"


def _now(cluster: Cluster) -> dict[str, JobInfo]:
    return SlurmCommands(5.0, 0.0, FakeClock(), cluster).jobs(["7"])


def test_a_grant_is_one_when_the_prolog_of_its_nodes_is_over(
    cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = Answer(0, "7\n")
    jobs.act()
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|Prolog|9999|n4|burst\n")
    assert jobs.observe(_now(cluster)) == []
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    assert [granted.job for granted in jobs.observe(_now(cluster))] == ["7"]


def test_what_was_used_of_the_cap_outlives_a_coordinator(cluster: Cluster, tmp_path: Path) -> None:
    clock = FakeClock()
    first = burst_jobs(cluster, clock, tmp_path)
    first.policy.granted("7", 2)
    clock.advance(3600.0)
    first.ended("7", by_us=False)
    second = burst_jobs(cluster, clock, tmp_path)
    assert second.policy.node_hours == pytest.approx(2.0)
    assert second.name != first.name


def test_what_the_next_coordinator_adopts_is_held_as_long_as_it_was(
    cluster: Cluster, tmp_path: Path
) -> None:
    """By what was noted; nobody is asked."""
    clock = FakeClock()
    first = burst_jobs(cluster, clock, tmp_path)
    first.open(adopt=False)
    first.policy.submitted("7", 1)
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    assert [granted.job for granted in first.observe(_now(cluster))] == ["7"]
    clock.advance(3600.0)
    cluster.asked.clear()
    second = burst_jobs(cluster, clock, tmp_path)
    (held,) = second.open(adopt=True)
    assert (held.job, held.nodes, second.name) == ("7", ("n4",), first.name)
    assert not cluster.asked
    clock.advance(1800.0)
    assert second.policy.node_hours == pytest.approx(1.5)
    assert second.observe({}) == [], "which is known already"
    cluster.answers["squeue"] = Answer(0, "")
    for each in (first, second):
        each.close()


def test_what_is_held_counts_against_the_cap_when_its_coordinator_is_killed(
    cluster: Cluster, tmp_path: Path
) -> None:
    clock = FakeClock()
    first = burst_jobs(cluster, clock, tmp_path)
    first.policy.submitted("7", 1)
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    first.observe(_now(cluster))
    for _ in range(60):
        clock.advance(60.0)
        first.observe({})
    clock.advance(30.0)
    second = burst_jobs(cluster, clock, tmp_path)
    assert second.policy.node_hours == pytest.approx(1.0)


def test_a_disk_that_is_full_does_not_cost_a_grant(
    cluster: Cluster, jobs: BurstJobs, tmp_path: Path
) -> None:
    cluster.answers["sbatch"] = Answer(0, "7\n")
    jobs.act()
    (tmp_path / "burst.json").mkdir()  # where the record would be
    cluster.answers["squeue"] = Answer(0, "7|7|RUNNING|None|9999|n4|burst\n")
    assert [granted.job for granted in jobs.observe(_now(cluster))] == ["7"]


def test_a_node_that_was_drained_is_not_asked_for_again(cluster: Cluster, jobs: BurstJobs) -> None:
    cluster.answers["sbatch"] = Answer(0, "8\n")
    jobs.avoided |= {"n4"}
    jobs.avoided |= {"n3"}
    jobs.act()
    (asked,) = [words for words in cluster.asked if words[0] == "sbatch"]
    assert "--exclude=n3,n4" in asked


def test_a_node_that_was_not_well_is_not_asked_for_again_soon(
    cluster: Cluster, tmp_path: Path
) -> None:
    clock = FakeClock()
    jobs = burst_jobs(cluster, clock, tmp_path)
    jobs.policy.want(1)
    jobs.reject("n5")
    jobs.avoided |= {"n4"}
    cluster.answers["sbatch"] = Answer(0, "8\n")
    jobs.act()
    clock.advance(REJECTED_S)
    jobs.policy.ended("8", by_us=True)
    jobs.act()
    asked = [words for words in cluster.asked if words[0] == "sbatch"]
    excluded = [word for words in asked for word in words if word.startswith("--exclude")]
    assert excluded == ["--exclude=n4,n5", "--exclude=n4"]


def test_a_node_that_is_drained_no_longer_is_asked_for_again(
    cluster: Cluster, jobs: BurstJobs
) -> None:
    cluster.answers["sbatch"] = Answer(0, "8\n")
    jobs.avoided |= {"n4"}
    jobs.avoided -= {"n4"}
    jobs.avoided -= {"n9"}
    jobs.act()
    (asked,) = [words for words in cluster.asked if words[0] == "sbatch"]
    assert not [word for word in asked if word.startswith("--exclude")]
