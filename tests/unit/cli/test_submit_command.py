"""`liver submit` up to the launch: what it refuses, and what --dry-run shows."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest

from liver_hpc.cli import submission
from liver_hpc.cli.dry_run import describe_run
from liver_hpc.cluster.launcher import AGENT_MODULE
from liver_hpc.config.load import parse_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.recipes.specs import SPEC_FILE
from liver_hpc.run.directory import create_run_directory, point_latest
from tests.golden_files import Golden
from tests.unit.cli.test_main import Captured, liver
from tests.unit.config.runs import minimal, write_minimal
from tests.unit.config.test_megatron_checkpoint import checkpoint


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repository))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.stepz=4", "--set train.stepz=4: unknown key; did you mean 'steps'?"),
        ("model.layerz=4", "--set model.layerz=4: unknown key"),
        ("layouts.2.0={tp: 3}", "layouts.2.0 (tp3 pp1 dp1): tp x pp x dp x cp is 3, wanted 2"),
        ("handoff.bucket_bytes=8", "below the smallest bucket of 65536 bytes"),
        ("data.prefix=corpus", "corpus.idx is missing"),
        ("data.text=[a.txt]", "data.text: no file matches "),
        ("workers.max=1000", "workers.max is 1000, but a local run on this machine may have"),
        ("recipe=nowhere:GPT", "recipe: cannot import 'nowhere'"),
        ("recipe=:GPT", "recipe: wanted module:Class, got ':GPT'"),
        ("recipe=..a:GPT", "recipe: wanted module:Class, got '..a:GPT'"),
        ("recipe=typo:GPT", "typo.py:2: invalid syntax"),
        ("recipe=older:GPT", "recipe: cannot import 'older': cannot import name 'gone' from 'os'"),
    ],
)
def test_nothing_is_made_of_a_run_that_is_wrong(
    tmp_path: Path, override: str, said: str, capsys: Captured
) -> None:
    path = write_minimal(tmp_path)
    Path("typo.py").write_text("\nfrom import os\n")
    Path("older.py").write_text("from os import gone\n")
    assert liver("submit", "--config", str(path), "--cluster", "local", "--set", override) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_slurm_without_sbatch(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write_minimal(tmp_path)
    assert liver("submit", "--config", str(path), "--cluster", "slurm") == 2
    assert "cluster slurm: there is no sbatch on the path" in capsys.readouterr().err


def test_an_absent_sbatch_is_told_with_all_else_that_is_wrong(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = write_minimal(tmp_path, data={"text": ["no.txt"]})
    wrong = ("--cluster", "slurm", "--set", "handoff.bucket_bytes=8")
    assert liver("submit", "--config", str(path), *wrong) == 2
    problems = capsys.readouterr().err.splitlines()
    assert problems[0] == "liver: error: 4 problems"
    assert all(problem.startswith(f"  {path}: ") for problem in problems[1:])
    for said in ("there is no sbatch", "no file matches", "smallest bucket", "at least one comp"):
        assert sum(said in problem for problem in problems) == 1


SLURM = {
    "components": [
        {"name": "main", "partition": "stable", "nodes": 2, "gpus_per_node": 2},
        {"name": "extra", "join": "asked", "gpus_per_node": 2},
    ],
    "burst": {"partition": "preempt", "max_nodes": 2, "time_min": 30, "gpus_per_node": 2},
    "setup": ["module load cuda"],
    "python": "python3",
}


@pytest.fixture
def login_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is an sbatch."""
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sbatch").touch(mode=0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")


def test_another_cluster_than_sbatch_would_submit_to_is_refused(
    login_node: None, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "programs" / "scontrol"
    scontrol.write_text("#!/bin/sh\necho 'ClusterName = inter'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("SLURM_CLUSTERS", "cm4")
    path = write_minimal(tmp_path, cluster={"kind": "slurm", "slurm": SLURM})
    assert liver("submit", "--config", str(path)) == 2
    assert "submit slurm/liver.sbatch by `sbatch -M cm4`" in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("kind", "slurm", "resolved"),
    [("auto", SLURM, "slurm"), ("auto", {}, "local"), ("local", SLURM, "local")],
)
def test_auto_is_slurm_where_components_are_given(
    kind: str,
    slurm: dict[str, Any],
    resolved: str,
    login_node: None,
    tmp_path: Path,
    capsys: Captured,
) -> None:
    path = write_minimal(tmp_path, cluster={"kind": kind, "slurm": slurm})
    assert liver("submit", "--config", str(path), "--dry-run") == 0
    assert parse_run(capsys.readouterr().out).cluster.kind == resolved


def test_dry_run_prints_what_slurm_would_get(
    login_node: None, tmp_path: Path, capsys: Captured, golden: Golden
) -> None:
    path = write_minimal(tmp_path, cluster={"kind": "auto", "slurm": SLURM})
    assert liver("submit", "--config", str(path), "--dry-run") == 0
    shown = capsys.readouterr().out.replace(str(tmp_path), "/shared")
    golden.check("batch/dry-run.txt", shown[shown.index("# /shared/runs/run-DATE-TIME/") :])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["programs", "run.yaml"]


def test_workers_of_a_node_that_may_get_one_core_are_noted(
    login_node: None, tmp_path: Path, capsys: Captured
) -> None:
    path = write_minimal(tmp_path, cluster={"kind": "auto", "slurm": SLURM})
    given = ["components.1.cpus_per_node=8", "burst.options={cpus-per-gpu: 4}"]
    options = [f"--set=cluster.slurm.{each}" for each in given]
    assert liver("submit", "--config", str(path), "--dry-run", *options) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith("liver: note: cluster.slurm.components.0.cpus_per_node is not given: ")
    assert "all 2 workers of a node" in note
    assert liver("submit", "--config", str(path), "--dry-run", "--cluster", "local") == 0
    assert capsys.readouterr().err == ""


def test_burst_nodes_that_would_wait_for_others_are_noted(
    login_node: None, tmp_path: Path, capsys: Captured
) -> None:
    path = write_minimal(
        tmp_path,
        train={"steps": 4, "global_batch": 8, "micro_batch": 1},
        workers={"initial": 4, "max": 8},
        layouts={4: {"dp": 4}, 8: {"dp": 8}},
        cluster={"kind": "slurm", "slurm": SLURM},
    )
    words = ["submit", "--config", str(path), "--dry-run"]
    given = [f"--set=cluster.slurm.{part}.cpus_per_node=8" for part in ("components.0", "burst")]
    words += [*given, "--set=cluster.slurm.components.1.cpus_per_node=8"]
    assert liver(*words) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert "nodes_per_request is 1, and it takes 2 burst nodes from the 4 workers" in note
    for other in ("burst.nodes_per_request=2", "burst.workers_per_node=4", "burst.max_nodes=1"):
        assert liver(*words, f"--set=cluster.slurm.{other}") == 0
        assert capsys.readouterr().err == ""


def test_dry_run_prints_how_an_agent_starts_in_its_image(
    login_node: None, tmp_path: Path, capsys: Captured
) -> None:
    slurm = {**SLURM, "container": {"runtime": "charliecloud", "image": "/images/liver"}}
    path = write_minimal(tmp_path, cluster={"kind": "auto", "slurm": slurm})
    assert liver("submit", "--config", str(path), "--dry-run") == 0
    shown = capsys.readouterr().out.partition("# agents that start together are started by\n")[2]
    line = shlex.split(shown.splitlines()[0])
    run = tmp_path / "runs" / "run-DATE-TIME"
    assert line[1:5] == ["env", "SLURM_JOB_ID=JOB", "srun", "--jobid=JOB"]
    at = line.index("ch-run")
    _, mount, *rest = line[at + 1 :]  # the recipe's directory comes first, of which this is a part
    assert mount == f"--bind={run}:{run}"
    assert rest[-7:] == ["/images/liver", "--", "python3", "-P", "-m", AGENT_MODULE, "..."]


def test_images_that_serve_a_run_badly_are_noted(
    login_node: None, tmp_path: Path, capsys: Captured
) -> None:
    """ch-run ends by the signal that is to warn; what each step fetches is not there in time."""
    path = write_minimal(tmp_path, cluster={"kind": "slurm", "slurm": SLURM})
    file = tmp_path / "liver.sqfs"
    file.write_bytes(b"hsqs")
    for runtime, image, said in (
        ("charliecloud", str(file), "ends when Slurm signals the step"),
        ("charliecloud", str(tmp_path), ""),
        ("pyxis", "nvcr.io#nvidia/pytorch:26.01", "boot_s, 180 s, counts that"),
        ("pyxis", str(file), ""),
        ("apptainer", "docker://nvcr.io/nvidia/pytorch:26.01-py3", "boot_s, 180 s, counts that"),
        ("apptainer", "liver.sif", ""),
    ):
        container = f"--set=cluster.slurm.container={{runtime: {runtime}, image: '{image}'}}"
        assert liver("submit", "--config", str(path), "--dry-run", container) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if "container.image" in line]
        assert len(notes) == bool(said), notes
        assert said in "".join(notes)


def test_dry_run_shows_at_which_steps_the_batch_grows(tmp_path: Path, capsys: Captured) -> None:
    """As far as the run goes."""
    train = {"steps": 12, "global_batch": 10}
    train["rampup"] = {"start": 4, "increment": 2, "samples": 90}  # type: ignore[assignment]
    path = write_minimal(tmp_path, train=train)
    assert liver("submit", "--config", str(path), "--cluster", "local", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert parse_run(shown).train.rampup is not None
    lines = shown.splitlines()
    first = lines.index("# ramp-up: from which step on the global batch has how many samples") + 1
    assert [line.split()[1:] for line in lines[first : first + 3]] == [
        ["from", "step", "samples", "before", "global", "batch"],
        ["0", "0", "4"],
        ["8", "32", "6"],
    ]
    assert not lines[first + 3].startswith("#   13")


def test_dry_run_prints_the_run_and_makes_nothing(tmp_path: Path, capsys: Captured) -> None:
    notices = [{"at_step": 3, "workers": 4}, {"at_step": 5, "replace": 1}]
    path = write_minimal(tmp_path, notices=notices)
    arguments = ["submit", "--config", str(path), "--cluster", "local", "--dry-run"]
    assert liver(*arguments, "--set", "train.steps=20") == 0
    shown = capsys.readouterr().out
    config = parse_run(shown)  # the tables are comments
    assert (config.train.steps, config.cluster.kind) == (20, "local")
    assert config.runs_directory == tmp_path / "runs"
    rows = [line.split() for line in shown.splitlines() if line.startswith("#  ")]
    assert ["#", "2", "tp2", "pp1", "dp1"] in [row[:5] for row in rows]
    assert "tp1 pp1 dp2 on workers 0-1" in shown
    assert "replace worker 1" in shown
    assert shown.endswith("# nothing was launched\n")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.parametrize("memory", ["both", "bounded"])
def test_dry_run_says_which_memory_handoffs_are_made_in(
    memory: str, tmp_path: Path, capsys: Captured
) -> None:
    path = write_minimal(tmp_path, notices=[{"at_step": 3, "layout": {"tp": 2}}])
    options = ["--cluster", "local", "--set", f"handoff.memory={memory}"]
    assert liver("submit", "--config", str(path), "--dry-run", *options) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = [line for line in lines if line.startswith("#   3 ")]
    assert f"  {memory}  " in row
    said = [line for line in lines if line.startswith("# bounded memory, at most ")]
    assert [line.endswith(", where handoff.memory is bounded:") for line in said] == (
        [True] if memory == "bounded" else []
    )


def test_a_login_node_that_cannot_build_the_model_leaves_that_to_the_run(
    login_node: None, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's libraries may want a driver that only the nodes have."""

    def fails(config: RunConfig) -> NoReturn:
        raise LiverError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(submission, "derive_spec", fails)
    config = minimal(cluster={"kind": "slurm", "slurm": SLURM}, runs_directory=tmp_path)
    run = submission.new_run(*submission.checked_run(config))
    said = capsys.readouterr().err
    assert "libcuda.so.1" in said
    assert said.count("not checked here, but before a worker boots, on the run's nodes: ") == 4
    assert not (run.path / SPEC_FILE).exists()
    shown = describe_run(*submission.checked_run(config))
    assert "# nothing was launched" in shown
    assert "fullest worker" not in shown
    with pytest.raises(LiverError, match=r"libcuda\.so\.1"):
        submission.checked_run(config, "local")


@pytest.mark.parametrize("key", ["load", "weights"])
def test_a_new_run_begins_with_what_the_one_that_was_latest_has(
    key: str, login_node: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own start `latest` names itself, and there is nothing: it would begin at step 0."""

    def fails(config: RunConfig) -> NoReturn:
        raise LiverError("there is no torch")

    monkeypatch.setattr(submission, "derive_spec", fails)
    before = create_run_directory(minimal())
    before.checkpoints_path.mkdir()
    checkpoint(before.checkpoints_path, 5, "metadata.json", ".metadata", "common.pt")
    point_latest(before)
    given = Path("runs/latest/checkpoints")
    config = minimal(cluster={"kind": "slurm", "slurm": SLURM}, checkpoint={key: given})
    run = submission.new_run(*submission.checked_run(config))
    point_latest(run)
    named = getattr(run.config().checkpoint, key)
    assert named == before.checkpoints_path.absolute()
