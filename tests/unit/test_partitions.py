"""What `liver submit` finds out of a run's partitions before it launches anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from liver_hpc.cli.submission import check_partitions
from liver_hpc.clock import FakeClock
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError
from tests.slurm_answers import Answer
from tests.unit.config.runs import minimal

SHOWN = """\
PartitionName=stable AllowGroups=ALL Default=YES GraceTime=0 Nodes=n[1-3] PreemptMode=OFF
PartitionName=other AllowGroups=ALL Default=NO GraceTime=0 Nodes=n[3-6] PreemptMode=OFF
PartitionName=one AllowGroups=ALL Default=NO GraceTime=0 Nodes=n7 PreemptMode=OFF
PartitionName=empty AllowGroups=ALL Default=NO GraceTime=0 Nodes=(null) PreemptMode=OFF
"""
AWAY = Answer(
    1, "", "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
)


class Cluster:
    """Four partitions, or a controller that is away."""

    def __init__(self, shown: Answer = Answer(0, SHOWN)) -> None:  # noqa: B008
        self.shown = shown
        self.asked: list[list[str]] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        self.asked.append(list(words))
        if words[:3] != ["scontrol", "show", "hostnames"]:
            return self.shown
        first, last = words[3].removeprefix("n[").removesuffix("]").split("-")
        return Answer(0, "".join(f"n{number}\n" for number in range(int(first), int(last) + 1)))


def run_on(*components: tuple[str | None, int], **burst: Any) -> RunConfig:
    """A run with components of so many nodes in a partition, and perhaps burst nodes."""
    parts = [
        {"name": f"c{index}", "partition": partition, "nodes": nodes}
        for index, (partition, nodes) in enumerate(components)
    ]
    slurm = {"components": parts, "burst": burst or None}
    return minimal(cluster={"kind": "slurm", "slurm": slurm})


def problems(config: RunConfig) -> list[str]:
    try:
        check_partitions(config, SlurmCommands(5.0, 0.0, FakeClock(), Cluster()))
    except ConfigError as error:
        return [line.strip() for line in str(error).splitlines()]
    return []


@pytest.mark.parametrize(
    "config",
    [
        run_on(("stable", 3), ("other", 4), ("one", 1)),
        run_on((None, 99)),
        run_on(("stable,other", 4)),
        run_on(("one", 1), partition="other", max_nodes=4),
        # Each request for nodes may be answered by another partition.
        run_on(("one", 1), partition="stable,other", max_nodes=6, nodes_per_request=4),
    ],
)
def test_partitions_that_are_large_enough(config: RunConfig) -> None:
    assert problems(config) == []


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            run_on(("stabel", 1)),
            "cluster.slurm.components.0.partition: Slurm has no partition 'stabel'; "
            "it has empty, one, other, stable",
        ),
        (
            run_on(("stable", 1), ("stable,gone", 1)),
            "cluster.slurm.components.1.partition: Slurm has no partition 'stable,gone'; "
            "it has empty, one, other, stable",
        ),
        (
            run_on(("stable", 4)),
            "cluster.slurm.components.0: wanted 4 nodes, partition stable has 3",
        ),
        (
            run_on(("stable", 2), ("other", 1), ("stable", 2)),
            "cluster.slurm.components.0,2: wanted 4 nodes, partition stable has 3",
        ),
        (
            run_on(("one,stable", 4)),
            "cluster.slurm.components.0: wanted 4 nodes, partition one,stable has 3",
        ),
        (
            run_on(("empty", 1)),
            "cluster.slurm.components.0: wanted 1 nodes, partition empty has 0",
        ),
        (
            run_on(("one", 1), partition="gone", max_nodes=1),
            "cluster.slurm.burst.partition: Slurm has no partition 'gone'; "
            "it has empty, one, other, stable",
        ),
        (
            run_on(("one", 1), partition="stable", max_nodes=4),
            "cluster.slurm.burst: wanted 4 nodes, partition stable has 3",
        ),
        (
            run_on(("one", 1), partition="stable,other", max_nodes=7),
            "cluster.slurm.burst: wanted 7 nodes, partition stable,other has 6",
        ),
        (
            run_on(("one", 1), partition="stable,other", max_nodes=6, nodes_per_request=5),
            "cluster.slurm.burst: wanted 5 nodes, partition stable,other has 4",
        ),
    ],
)
def test_partitions_that_are_absent_or_too_small(config: RunConfig, said: str) -> None:
    assert problems(config) == [said]


def test_all_problems_are_told_at_once() -> None:
    config = run_on(("gone", 1), ("stable", 9), partition="one", max_nodes=2)
    assert [problem.partition(":")[0] for problem in problems(config)][-3:] == [
        "cluster.slurm.components.0.partition",
        "cluster.slurm.components.1",
        "cluster.slurm.burst",
    ]


def test_hidden_partitions_are_asked_for_too() -> None:
    cluster = Cluster()
    check_partitions(run_on(("stable", 1)), SlurmCommands(5.0, 0.0, FakeClock(), cluster))
    assert cluster.asked[0] == ["scontrol", "--all", "--oneliner", "show", "partition"]


def test_a_controller_that_is_away_is_said_to_be() -> None:
    commands = SlurmCommands(5.0, 0.0, FakeClock(), Cluster(AWAY))
    with pytest.raises(
        ControllerUnreachable, match=r"show partition: .*Unable to contact slurm contr"
    ):
        check_partitions(run_on(("stable", 1)), commands)
