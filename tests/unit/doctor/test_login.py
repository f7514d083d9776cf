"""What the answers of Slurm's commands mean for a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.config.schema import RunConfig
from liver_hpc.doctor import login as module
from liver_hpc.doctor.checks import Examination, Level, Order, Result
from liver_hpc.doctor.login import LOGIN_CHECKS, slowest_handoff_s
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.memory import fullest_worker
from liver_hpc.run.records import RunRecords
from tests.slurm_answers import Answer
from tests.unit.config.runs import minimal
from tests.unit.layout.models import TIED
from tests.unit.report.journals import write_journal
from tests.unit.report.rows import reconfiguration

CONFIG = """\
AuthType                = auth/munge
ClusterName             = alps
KillWait                = 30 sec
PreemptType             = preempt/partition_prio
ProctrackType           = proctrack/cgroup
SLURM_VERSION           = 22.05.8
SlurmctldParameters     = (null)
SwitchType              = switch/none
"""
PARTITIONS = """\
PartitionName=stable GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-3] PreemptMode=OFF PriorityTier=10
PartitionName=spot GraceTime=30 MaxTime=UNLIMITED Nodes=n[1-3] PreemptMode=REQUEUE PriorityTier=1
PartitionName=abrupt GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-3] PreemptMode=CANCEL PriorityTier=1
PartitionName=gang GraceTime=0 Nodes=n[1-3] PreemptMode=GANG,SUSPEND PriorityTier=1
"""


def cluster(**slurm: Any) -> RunConfig:
    return minimal(cluster={"kind": "slurm", "slurm": slurm})


def components(**partitions: str) -> list[dict[str, str]]:
    return [{"name": name, "partition": partition} for name, partition in partitions.items()]


@pytest.fixture
def results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Any:  # a function of the cluster section, and of answers that differ
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in module.COMMANDS:
        program = programs / name
        program.write_text("#!/bin/sh\necho slurm-wlm 22.05.8\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.delenv("SLURM_CONF", raising=False)

    def examine(
        config: RunConfig, replies: Mapping[str, Answer] | None = None, **order: Any
    ) -> dict[str, Result]:
        replies = replies or {}

        def run(words: Sequence[str], limit_s: float) -> Answer:
            key = " ".join(words[-2:])
            answers = {"show config": CONFIG, "show partition": PARTITIONS}
            return replies.get(key, Answer(0, answers[key]))

        wanted = config.model_copy(update={"runs_directory": tmp_path / "runs"})
        results: dict[str, Result] = {}
        commands = SlurmCommands(1.0, 0.0, run=run)
        asked = Order(wanted, commands=commands, derive=lambda _config: TIED, **order)
        Examination(results.__setitem__).run(LOGIN_CHECKS, asked)
        return results

    return examine


def test_a_cluster_on_which_all_is_well(results: Any, tmp_path: Path) -> None:
    found = results(cluster(burst={"partition": "spot", "max_nodes": 2}))
    assert {check: r.found for check, r in found.items() if r.level is not Level.PASS} == {}
    assert "grace 30 s" in found["partitions"].found
    assert "spot: REQUEUE with 30 s of grace" in found["preemption"].found
    assert not (tmp_path / "runs").exists()


def test_without_slurm_nothing_of_it_is_looked_at(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = results(cluster())
    assert found["commands"].level is Level.FAIL
    assert "sbatch" in found["commands"].found
    skipped = {check for check, result in found.items() if result.level is Level.SKIP}
    assert skipped == {"controller", "partitions", "preemption", "signals", "switch"}


@pytest.mark.parametrize(
    "complaint",
    [
        'Munge encode failed: Failed to access "/run/munge/munge.socket.2"',
        "slurm_load_ctl_conf error: Protocol authentication error",
        "failed to connect to any sack sockets",
        "slurm_load_ctl_conf error: Zero Bytes were transmitted or received",
    ],
)
def test_a_broken_munge_is_named_and_nothing_else(results: Any, complaint: str) -> None:
    found = results(cluster(), {"show config": Answer(1, "", f"scontrol: error: {complaint}")})
    assert complaint in found["controller"].found
    assert "munged" in found["controller"].advice
    assert [c for c, result in found.items() if result.level is Level.FAIL] == ["controller"]


def test_a_controller_that_does_not_answer_is_named_and_not_munge(results: Any) -> None:
    complaint = "scontrol: error: Unable to contact slurm controller (connect failure)"
    found = results(cluster(), {"show config": Answer(1, "", complaint)})
    assert "slurmctld" in found["controller"].advice
    assert [c for c, result in found.items() if result.level is Level.FAIL] == ["controller"]


def test_a_cluster_that_is_not_the_one_to_which_sbatch_would_submit(
    results: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "cm4")
    found = results(cluster())["controller"]
    assert found.level is Level.FAIL
    assert "SLURM_CLUSTERS names cluster cm4" in found.found


@pytest.mark.parametrize(
    ("version", "level"),
    [("21.08.5", Level.WARN), ("22.05.0-0rc1", Level.PASS), ("25.11.1", Level.PASS)],
)
def test_a_slurm_whose_steps_share_no_gpus(results: Any, version: str, level: Level) -> None:
    shown = CONFIG.replace("22.05.8", version)
    found = results(cluster(), {"show config": Answer(0, shown)})["controller"]
    assert found.level is level
    assert f"Slurm {version}" in found.found


def test_a_slurm_that_cancels_several_components_together(results: Any) -> None:
    replies = {"show config": Answer(0, CONFIG.replace("22.05.8", "25.11.3"))}
    parts = components(main="stable", extra="stable")
    assert results(cluster(components=parts), replies)["controller"].level is Level.WARN
    assert results(cluster(components=parts[:1]), replies)["controller"].level is Level.PASS
    assert results(cluster(components=parts))["controller"].level is Level.PASS


def test_a_slurm_that_preempts_nobody_says_so_in_any_release(results: Any) -> None:
    """As 23.11 shows it."""
    shown = CONFIG.replace("preempt/partition_prio", "(null)").replace("switch/none", "(null)")
    found = results(cluster(burst=BURST), {"show config": Answer(0, shown)})
    assert found["preemption"].found == "none: no job is preempted"
    assert found["switch"].found == "none"


def test_a_partition_that_is_not_there(results: Any) -> None:
    found = results(cluster(components=components(main="stable", extra="gpu")))["partitions"]
    assert found.level is Level.FAIL
    assert found.found.startswith("no partition 'gpu'; there are stable")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (cluster(burst={"partition": "abrupt", "max_nodes": 1}), "gives no grace time"),
        (
            cluster(
                components=components(main="gang"), burst={"partition": "spot", "max_nodes": 1}
            ),
            "gang: PreemptMode SUSPEND stops a job's processes",
        ),
        (
            cluster(components=components(main="stable", extra="spot")),
            "components extra are never preempted: main of the same job cannot be",
        ),
    ],
)
def test_preemption_that_is_not_what_it_looks_like(
    results: Any, config: RunConfig, told: str
) -> None:
    found = results(config)["preemption"]
    assert found.level is Level.WARN
    assert told in found.found
    assert found.advice


@pytest.mark.parametrize(
    ("kind", "mode", "level", "told"),
    [
        ("none", "GANG", Level.PASS, "preempt/none: no job is preempted"),
        ("qos", "REQUEUE", Level.PASS, "as their QOS says"),
        ("partition_prio", "GANG,SUSPEND", Level.WARN, "stops a job's processes"),
    ],
)
def test_what_a_cluster_preempts_by(
    results: Any, kind: str, mode: str, level: Level, told: str
) -> None:
    replies = {
        "show config": Answer(0, CONFIG.replace("partition_prio", kind)),
        "show partition": Answer(0, PARTITIONS.replace("CANCEL", mode)),
    }
    config = cluster(burst={"partition": "abrupt", "max_nodes": 1})
    found = results(config, replies)["preemption"]
    assert found.level is level
    assert told in found.found


@pytest.mark.parametrize(
    ("slurm", "level"),
    [({"burst": {"partition": "spot", "max_nodes": 1}}, Level.WARN), ({}, Level.PASS)],
)
def test_a_scancel_that_reaches_srun_ends_burst_workers(
    results: Any, slurm: dict[str, Any], level: Level
) -> None:
    shown = CONFIG.replace("proctrack/cgroup", "proctrack/linuxproc")
    found = results(cluster(**slurm), {"show config": Answer(0, shown)})["signals"]
    assert found.level is level
    assert found.found.startswith("proctrack/linuxproc")
    assert ("liver stop --checkpoint" in found.advice) == (level is Level.WARN)


BURST = {"partition": "spot", "max_nodes": 1}


@pytest.mark.parametrize(
    ("kind", "slurm", "do"),
    [
        ("hpe_slingshot", {}, "step_options: {network: 'single_node_vni,job_vni'}"),
        ("hpe_slingshot", {"step_options": {"network": "single_node_vni,job_vni"}}, ""),
        ("hpe_slingshot", {"burst": BURST, "step_options": {"network": "job_vni"}}, "NCCL_NET"),
        ("nvidia_imex", {"burst": BURST}, "NCCL_MNNVL_ENABLE"),
        (
            "nvidia_imex",
            {"components": components(main="stable", extra="stable")},
            "NCCL_MNNVL_ENABLE",
        ),
        ("nvidia_imex", {}, ""),
        ("none", {"burst": BURST}, ""),
    ],
)
def test_a_switch_that_keeps_steps_or_jobs_apart(
    results: Any, kind: str, slurm: dict[str, Any], do: str
) -> None:
    shown = CONFIG.replace("switch/none", f"switch/{kind}")
    found = results(cluster(**slurm), {"show config": Answer(0, shown)})["switch"]
    assert found.level is (Level.WARN if do else Level.PASS)
    assert do in found.advice


def test_a_component_without_a_partition_comes_to_the_default(results: Any) -> None:
    partitions = PARTITIONS.replace("PreemptMode=OFF", "Default=YES PreemptMode=OFF")
    parts = [{"name": "main"}, *components(extra="spot")]
    replies = {"show partition": Answer(0, partitions)}
    found = results(cluster(components=parts), replies)["preemption"]
    assert "extra are never preempted: main" in found.found
    parts = [{"name": "main"}, *components(extra="stable")]  # where main comes to is not known
    assert results(cluster(components=parts))["preemption"].level is Level.PASS


def test_partitions_that_preempt_nobody_give_no_grace_time(results: Any) -> None:
    found = results(cluster(burst={"partition": "stable,spot", "max_nodes": 1}))["preemption"]
    assert "stable,spot: REQUEUE with 30 s of grace" in found.found


def test_a_grace_time_is_held_against_the_slowest_handoff_of_the_newest_run(
    results: Any, tmp_path: Path
) -> None:
    assert slowest_handoff_s(tmp_path / "runs") == 0.0
    run = tmp_path / "runs" / "latest"
    run.mkdir(parents=True)
    attempts = [
        reconfiguration(
            outcome=outcome,
            notice_s=3.0,  # it waits for its turn
            began_s=7.0,
            released_s=7.0 + took_s,
            target_workers=workers,
        )
        for took_s, outcome, workers in [
            (12.0, "completed", "0"),
            (41.5, "completed", "1"),
            (55.0, "completed", "0,1,2"),  # whoever leaves a node boots no joiners
            (99.0, "aborted", "0"),
        ]
    ]
    write_journal(run, RunRecords([], attempts, [], {}))
    assert slowest_handoff_s(tmp_path / "runs") == 41.5
    found = results(cluster(), partition="spot")["preemption"]
    assert found.level is Level.WARN
    assert "30 s of grace, the slowest handoff measured took 41.5 s" in found.found


def test_a_job_may_be_offered_several_partitions(results: Any) -> None:
    burst = {"partition": "spot,abrupt", "max_nodes": 1}
    found = results(cluster(components=components(main="stable,spot"), burst=burst))
    assert found["partitions"].level is Level.PASS
    assert found["preemption"].found.startswith("spot,abrupt gives no grace time")
    found = results(cluster(components=components(main="stable,gpu")))["partitions"]
    assert found.found.startswith("no partition 'gpu'; there are stable")


def test_a_runs_directory_that_cannot_be_made(results: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    found = results(cluster())
    assert found["run directory"].level is Level.FAIL


def test_a_runs_directory_in_which_others_may_write(results: Any, tmp_path: Path) -> None:
    """What is to be made in one is as open as that; in a sticky one nobody takes a name away."""
    for path, mode, level in (
        (tmp_path, 0o775, Level.WARN),
        (tmp_path, 0o1777, Level.PASS),
        (tmp_path / "runs", 0o2775, Level.WARN),
        (tmp_path / "runs", 0o755, Level.PASS),
    ):
        path.mkdir(exist_ok=True)
        path.chmod(mode)
        found = results(cluster())["run directory"]
        assert found.level is level, found
        assert level is Level.PASS or f"{path} (mode {mode:o})" in found.found


# ---- memory


def test_memory_that_a_handoff_takes(results: Any) -> None:
    found = results(cluster())["memory"]
    assert found.level is Level.PASS
    assert found.found.startswith("a handoff takes up to ")
    assert "(replacing a worker of tp1 pp1 dp2)" in found.found
    assert results(RunConfig.model_construct())["memory"].level is Level.SKIP


def test_memory_that_is_too_little_for_a_layout(results: Any) -> None:
    staging = minimal().handoff.staging_bytes
    found = results(minimal(policy={"memory_bytes": staging + 1}))["memory"]
    assert found.level is Level.FAIL
    assert found.found.startswith("tp1 pp1 dp2: its fullest worker holds")
    assert "policy.memory_bytes" in found.advice


def test_memory_for_one_world_is_enough_where_it_is_bounded(results: Any) -> None:
    one_world = minimal().handoff.staging_bytes + sum(
        fullest_worker(TIED, Layout(1, 1, 2)).values()
    )
    found = results(minimal(policy={"memory_bytes": one_world}))["memory"]
    assert found.level is Level.WARN
    assert "in bounded memory, as both worlds would take" in found.found
    assert "a checkpoint" in found.advice
