"""What a run asks of a Slurm cluster, held against itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cli.check import check_run
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from tests.unit.cli.test_check import FourHeads, problems
from tests.unit.config.runs import minimal, write_minimal

MAIN: dict[str, Any] = {"name": "main", "nodes": 2, "workers_per_node": 2}
BURST: dict[str, Any] = {"partition": "preempt", "max_nodes": 2}


def on_slurm(*components: dict[str, Any], timeout_min: int = 60, **slurm: Any) -> RunConfig:
    section = {"components": list(components), **slurm}
    return minimal(cluster={"kind": "slurm", "timeout_min": timeout_min, "slurm": section})


def test_what_a_container_cannot_be_given_is_named(tmp_path: Path) -> None:
    container = {"runtime": "apptainer", "image": "/image"}
    config = on_slurm({**MAIN, "workers_per_node": 2}, container=container)
    named = {"runs_directory": tmp_path / "runs,here"}
    assert problems(config.model_copy(update=named)) == [
        f"cluster.slurm.container: {tmp_path}/runs,here cannot be mounted: it has ':' or ',' in it"
    ]


def test_a_container_wants_slurm() -> None:
    container = {"runtime": "apptainer", "image": "/image"}
    said = "cluster.slurm.container: a run on this machine starts no container; it wants Slurm"
    slurm = {"container": container}
    assert problems(minimal(cluster={"kind": "local", "slurm": slurm})) == [said]


def test_a_right_run_passes() -> None:
    options = {"constraint": "ib&a100", "mem": 0, "exclusive": True}
    extra = {"name": "extra", "join": "asked", "options": options}
    check_run(on_slurm(MAIN, extra, burst={**BURST, "options": options}), FourHeads())


@pytest.mark.parametrize(
    ("components", "slurm", "said"),
    [
        ([], {}, "cluster.slurm.components: a run on Slurm wants at least one component, got none"),
        ([MAIN, MAIN], {}, "cluster.slurm.components.1.name: 'main' is given twice"),
        ([{**MAIN, "join": "asked"}], {},
         "cluster.slurm.components.0.join: the first component is used from the start; "
         "only another one can wait to be asked for"),
        ([{"name": "main"}], {},
         "workers.initial is 2, but the nodes asked for take 1 "
         "(1 x 1 of main, as nodes x workers)"),
        ([{"name": "main"}], {"burst": BURST},
         "workers.max is 4, but the nodes asked for take 3 "
         "(1 x 1 of main + 2 x 1 of burst, as nodes x workers)"),
        ([MAIN], {"burst": {**BURST, "min_nodes": 3}},
         "cluster.slurm.burst.min_nodes is 3, more than max_nodes, 2"),
        ([MAIN], {"burst": {**BURST, "nodes_per_request": 3}},
         "cluster.slurm.burst.nodes_per_request is 3, more than max_nodes, 2"),
        ([MAIN], {"burst": {**BURST, "backoff_s": 30, "backoff_max_s": 20}},
         "cluster.slurm.burst.backoff_s is 30, more than backoff_max_s, 20"),
        ([MAIN], {"end_window_s": 3600},
         "cluster.slurm.end_window_s is 3600, wanted less than the job's time limit, "
         "cluster.timeout_min: 3600 s"),
        ([MAIN], {"burst": {**BURST, "time_min": 2}, "end_window_s": 120},
         "cluster.slurm.burst.time_min is 2, wanted more than end_window_s, 120 s: its nodes "
         "would be left at once"),
    ],
)  # fmt: skip
def test_keys_that_do_not_fit_together(
    components: list[dict[str, Any]], slurm: dict[str, Any], said: str
) -> None:
    assert said in problems(on_slurm(*components, **slurm))


@pytest.mark.parametrize(
    ("components", "slurm", "said"),
    [
        ([{**MAIN, "options": {"time": 5}}], {},
         "cluster.slurm.components.0.options.time: liver gives --time itself; its key is "
         "cluster.timeout_min, or time_min of a burst"),
        ([MAIN], {"burst": {**BURST, "options": {"array": "0-3"}}},
         "cluster.slurm.burst.options.array: liver gives --array itself"),
        ([{**MAIN, "options": {"gpus": 8}}], {},
         "cluster.slurm.components.0.options.gpus: liver gives --gpus itself; its key is "
         "gpus_per_node"),
        ([MAIN], {"burst": {**BURST, "options": {"gpus-per-task": "h100:8"}}},
         "cluster.slurm.burst.options.gpus-per-task: liver gives --gpus-per-task itself; its key "
         "is gpus_per_node"),
        ([{**MAIN, "options": {"gpus-per-socket": 4}}], {},
         "cluster.slurm.components.0.options.gpus-per-socket: liver gives --gpus-per-socket "
         "itself; its key is gpus_per_node"),
        *(([{**MAIN, "options": {name: asked}}], {},
           f"cluster.slurm.components.0.options: liver gives --{name}={asked} itself; its key is "
           "gpus_per_node")
          for name, asked in [("gres", "gpu"), ("gres", "gpu:8"), ("gres", "nvme:1,gpu:h100:8"),
                              ("gres", "gres/gpu:8"), ("tres-per-task", "cpu=4,gres/gpu=1"),
                              ("tres-per-task", "gres:gpu:1")]),
        ([{**MAIN, "options": {"exclusive": False}}], {},
         "cluster.slurm.components.0.options.exclusive: wanted a value, or true for none; "
         "leave it out instead"),
        ([{**MAIN, "options": {"constraint": "a\n#SBATCH hetjob"}}], {},
         "cluster.slurm.components.0.options.constraint: 'a\\n#SBATCH hetjob' is empty or has "
         "control characters"),
        ([{**MAIN, "partition": "a\nb"}], {},
         "cluster.slurm.components.0.partition: 'a\\nb' is empty or has control characters"),
        ([MAIN], {"account": " "},
         "cluster.slurm.account: ' ' is empty or has control characters"),
    ],
)  # fmt: skip
def test_values_that_cannot_stand_on_a_line_of_sbatch(
    tmp_path: Path, components: list[dict[str, Any]], slurm: dict[str, Any], said: str
) -> None:
    section = {"kind": "slurm", "slurm": {"components": components, **slurm}}
    with pytest.raises(ConfigError, match=f"{re.escape(said)}$"):
        load_run(write_minimal(tmp_path, cluster=section))


@pytest.mark.parametrize(
    ("component", "workers_per_node", "slots"),
    [
        ({}, None, 1),
        ({"gpus_per_node": 4}, None, 4),
        ({"gpus_per_node": 4}, 2, 2),
        ({"gpus_per_node": 4, "workers_per_node": 3}, 2, 3),
        ({"gpus_per_node": "h100:4"}, None, 4),
        ({"gpus_per_node": "a100_3g.20gb:2"}, 1, 1),
    ],
)
def test_slots_of_a_node(
    component: dict[str, Any], workers_per_node: int | None, slots: int
) -> None:
    section = {"components": [{"name": "main", **component}]}
    cluster = minimal(cluster={"workers_per_node": workers_per_node, "slurm": section}).cluster
    assert cluster.slots(cluster.slurm.components[0]) == slots


def test_resources_other_than_gpus_are_options(tmp_path: Path) -> None:
    options = {"gres": "nvme:1", "tres-per-task": "license/gpu_tool=1", "mem-per-gpu": "4G"}
    section = {"kind": "slurm", "slurm": {"components": [{**MAIN, "options": options}]}}
    config = load_run(write_minimal(tmp_path, cluster=section))
    assert config.cluster.slurm.components[0].options == options


@pytest.mark.parametrize("gpus", [-1, True, "h100", "h100:0", "4", "h100:4,a100:2", ":4", 1.5])
def test_gpus_are_a_number_or_a_type_and_a_number(tmp_path: Path, gpus: object) -> None:
    section = {"kind": "slurm", "slurm": {"components": [{"name": "main", "gpus_per_node": gpus}]}}
    wanted = r"cluster.slurm.components.0.gpus_per_node: wanted .*got "
    with pytest.raises(ConfigError, match=wanted):
        load_run(write_minimal(tmp_path, cluster=section))


def test_nodes_with_gpus_and_without_are_not_of_one_run() -> None:
    main, extra = {"name": "main", "gpus_per_node": 2}, {"name": "extra"}
    assert problems(on_slurm(main, extra, burst=BURST)) == [
        "cluster.slurm: gpus_per_node of extra, burst is 0, others have some: workers on CPUs "
        "cannot train with those on GPUs"
    ]
    burst = {**BURST, "gpus_per_node": "h100:2"}
    check_run(on_slurm(main, burst=burst), FourHeads())
    (said,) = problems(on_slurm(main, {"name": "burst"}, burst=burst))
    assert said.startswith("cluster.slurm: gpus_per_node of burst is 0, others have some")


def test_a_worker_wants_a_gpu_of_its_own_where_all_nodes_with_its_place_have_one() -> None:
    assert on_slurm(MAIN).cluster.wanted_gpus(0) == 0
    main, two = {"name": "main", "gpus_per_node": 4}, {**BURST, "gpus_per_node": "h100:2"}
    cluster = on_slurm(main, burst=two).cluster
    assert [*map(cluster.wanted_gpus, range(4))] == [2, 2, 4, 4]
    shared = on_slurm(main, burst={**two, "workers_per_node": 4}).cluster
    assert [*map(shared.wanted_gpus, range(4))] == [2, 2, 2, 2]


def test_what_was_found_before_is_told_with_the_rest() -> None:
    with pytest.raises(ConfigError, match=r"^2 problems\n  elsewhere\n  cluster.slurm.comp"):
        check_run(on_slurm(), FourHeads(), ["elsewhere"])
