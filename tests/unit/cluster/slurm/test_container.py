"""How an agent's Python is started in an image, and what of the host is seen there."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from liver_hpc.cluster.slurm.container import step_words
from liver_hpc.cluster.slurm.script import batch_script, burst_script, python_words
from liver_hpc.config.load import parse_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.run.directory import RunDirectory
from tests.golden_files import Golden
from tests.unit.config.runs import MINIMAL, minimal

RUN = Path("/runs/a b")
CONTAINERS: dict[str, dict[str, Any]] = {
    "pyxis": {
        "image": "nvcr.io#nvidia/pytorch:26.01",
        "options": ["--no-container-mount-home", "--container-env=NCCL_DEBUG"],
    },
    "apptainer": {"image": "/images/liver.sif", "options": ["--no-home"], "python": "/venv/py -E"},
    "charliecloud": {"image": "/images/liver", "options": ["--set-env"]},
}


def run_in(container: dict[str, Any] | None, **sections: Any) -> RunConfig:
    slurm = {"container": container, "step_options": {"mem-bind": "local", "exact": True}}
    sections = {"recipe": "liver_hpc.recipes.gpt:GPT", **sections}
    return minimal(cluster={"kind": "slurm", "slurm": slurm}, **sections)


def complaint(slurm: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        parse_run(yaml.safe_dump({**MINIMAL, "cluster": {"slurm": slurm}}))
    return str(error.value)


def mounts(mounted: list[str], **sections: Any) -> list[str]:
    container = {"runtime": "charliecloud", "image": "/image", "mounts": mounted}
    words = step_words(run_in(container, **sections), RUN).python
    return [word.removeprefix("--bind=") for word in words if word.startswith("--bind=")]


def test_every_runtimes_command_line(golden: Golden) -> None:
    lines = []
    for runtime, given in CONTAINERS.items():
        container = {"runtime": runtime, "mounts": ["/scratch", "/home/me:/me"], **given}
        step = step_words(run_in(container), RUN)
        words = [*step.options, *step.python, "liver_hpc.node.agent"]
        lines.append(f"# {runtime}\nsrun ... {shlex.join(words)} ...\n")
    golden.check("slurm/containers.sh", "\n".join(lines))


@pytest.mark.parametrize(("options", "nvidia"), [([], True), (["--rocm"], False)])
def test_apptainer_is_asked_for_the_gpus_of_one_vendor(options: list[str], nvidia: bool) -> None:
    """Before 1.3 it takes --nv of both."""
    container = {"runtime": "apptainer", "image": "/liver.sif", "options": options}
    assert ("--nv" in step_words(run_in(container), RUN).python) is nvidia


def test_without_one_the_nodes_own_python_is_started() -> None:
    config = run_in(None)
    step = step_words(config, RUN)
    assert step.options == ("--mem-bind=local", "--exact")
    assert step.python == (*python_words(config.cluster), "-m")


def test_pyxis_is_told_all_mounts_at_once() -> None:
    """Of two options Slurm hands its nodes the last: the run would lack its own directory."""
    options = ["--container-mounts=/data:/data:ro", "--container-writable"]
    container = {"runtime": "pyxis", "image": "/i.sqsh", "mounts": ["/scratch"], "options": options}
    told = step_words(run_in(container), RUN).options
    assert [one for one in told if one.startswith("--container-mounts")] == [
        f"--container-mounts=/scratch:/scratch,{RUN}:{RUN},/data:/data:ro"
    ]
    assert told[-1] == "--container-writable"


@pytest.mark.parametrize("container", [None, {"runtime": "pyxis", **CONTAINERS["pyxis"]}])
def test_what_is_exported_to_agents_stands_on_no_command_line(
    container: dict[str, Any] | None,
) -> None:
    slurm = {"container": container, "step_options": {"export": "ALL,KEY=hunter2", "exact": True}}
    config = minimal(cluster={"kind": "slurm", "slurm": slurm})
    step = step_words(config, RUN)
    assert step.options[0] == "--exact"
    assert "hunter2" not in " ".join([*step.options, *step.python])
    assert step.environment == {"SRUN_EXPORT_ENV": "ALL,KEY=hunter2"}


def test_the_coordinator_and_the_keeper_of_burst_nodes_stay_on_the_host() -> None:
    slurm = {"components": [{"name": "main"}], "burst": {"partition": "p", "max_nodes": 1}}
    cluster = {"kind": "slurm", "slurm": slurm}
    inside = {**slurm, "container": {"runtime": "apptainer", "image": "/images/liver.sif"}}
    plain, contained = minimal(cluster=cluster), minimal(cluster={**cluster, "slurm": inside})
    run = RunDirectory(RUN)
    assert batch_script(contained.cluster, run) == batch_script(plain.cluster, run)
    assert burst_script(contained.cluster) == burst_script(plain.cluster)


def test_what_the_run_files_keys_name_is_mounted_where_it_is_not_yet(tmp_path: Path) -> None:
    named = {
        "recipe": "mine:Model",
        "recipe_directory": "/code",
        "checkpoint": {"directory": "/fast/checkpoints", "load": "/fast/old"},
        "data": {"blend": [{"prefix": "/data/a/text"}, {"prefix": "/data/b/text"}]},
    }
    run = f"{RUN}:{RUN}"
    code, *further = ["/code:/code", "/data/a:/data/a", "/data/b:/data/b"]
    assert mounts(["/fast", "/disks/d1:/data"], **named) == [
        "/fast:/fast", "/disks/d1:/data", "/code:/code", run,
    ]  # fmt: skip
    assert mounts([], **named) == [
        code, run, "/fast/checkpoints:/fast/checkpoints", "/fast/old:/fast/old", *further,
    ]  # fmt: skip
    text = {"text": "python-stdlib", "directory": "/tokens"}
    assert mounts([], data=text) == ["/tokens:/tokens", run]
    assert mounts(["/runs"]) == ["/runs:/runs"]


def test_what_is_mounted_below_a_directory_of_the_run_is_not_hidden_by_it() -> None:
    mounted = mounts(["/nvme/tokens:/code/tokens"], recipe="mine:Model", recipe_directory="/code")
    assert mounted == ["/code:/code", "/nvme/tokens:/code/tokens", f"{RUN}:{RUN}"]


@pytest.mark.parametrize(
    ("container", "said"),
    [
        ({"runtime": "docker"}, "runtime: wanted one of 'pyxis', 'apptainer' or 'charliecloud'"),
        ({"image": " "}, "image: ' ' is empty or has control characters"),
        ({"mounts": ["data"]}, "mounts.0: wanted /PATH or /PATH:/PATH_IN_IMAGE without commas"),
        ({"mounts": ["/a:/b:ro"]}, "mounts.0: wanted /PATH or /PATH:/PATH_IN_IMAGE"),
        ({"mounts": ["/a:b"]}, "mounts.0: wanted /PATH or /PATH:/PATH_IN_IMAGE"),
        ({"mounts": ["/a,/b"]}, "mounts.0: wanted /PATH or /PATH:/PATH_IN_IMAGE"),
        ({"mounts": ["/a/$USER"]}, "mounts.0: '/a/$USER': $ is not expanded here"),
        ({"image": "~/a.sif"}, "image: '~/a.sif': ~ is not expanded here"),
        ({"options": ["--env", "A=b"]}, "options.1: wanted one word as --rocm"),
        ({"name": "x"}, "name: unknown key (valid keys here: image, mounts"),
    ],
)
def test_what_is_wrong_is_told_by_its_key(container: dict[str, Any], said: str) -> None:
    container = {"runtime": "apptainer", "image": "/image", **container}
    assert f"cluster.slurm.container.{said}" in complaint({"container": container})


def test_an_image_that_would_lose_the_environment_is_refused() -> None:
    """Slurm tells a task by it on which node it is."""
    container = {"runtime": "apptainer", "image": "/image", "options": ["--cleanenv"]}
    said = "cluster.slurm.container: options: --cleanenv keeps from agents what Slurm tells them"
    assert said in complaint({"container": container})


@pytest.mark.parametrize("export", ["NONE", "PATH,KEY=hunter2", "ALLOWED"])
def test_steps_that_would_lose_the_environment_are_refused(export: str) -> None:
    said = complaint({"step_options": {"export": export}})
    assert "step_options: --export without ALL keeps from agents" in said
    assert "hunter2" not in said


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("container-image", "its key is cluster.slurm.container.image"),
        ("gpus-per-node", "its key is gpus_per_node of a component or a burst"),
        ("mpi", "liver gives --mpi itself to the steps of agents"),
        ("ntasks-per-node", "liver gives --ntasks-per-node itself"),
    ],
)
def test_srun_options_that_are_not_the_users(option: str, said: str) -> None:
    assert said in complaint({"step_options": {option: "x"}})
