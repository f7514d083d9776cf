"""The runs that are played: run files, and the nodes that are there or may come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.placement import place
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.messages import DrainRequest, ReplaceRequest, ResizeRequest
from liver_hpc.run.events import CoordinatorStarted, Node
from liver_hpc.run.machine import Run
from tests.fakes import tiny_recipe, tiny_run

DEADLINES = {
    "boot_s": 20.0,
    "meet_s": 5.0,
    "prepare_s": 20.0,
    "boundary_s": 30.0,
    "transfer_s": 12.0,
    "checkpoint_s": 14.0,
    "release_s": 6.0,
    "exit_s": 2.0,
    "heartbeat_s": 3.0,
}
LONGEST_WAIT_S = 45.0
"""More than any one deadline, or two that are counted together."""
POLICY = {"settle_s": 2.0, "retry_s": 2.0, "drain_window_s": 60.0, "stragglers": {"drain": True}}
ANY_NUMBER = {
    1: [{}],
    2: [{"dp": 2}, {"tp": 2}],
    3: [{"dp": 3}],
    4: [{"dp": 4}, {"tp": 2, "dp": 2}],
}

N1, N2 = Node("n1", "main", 1), Node("n2", "main", 1)
WIDE1, WIDE2 = Node("w1", "main", 2), Node("w2", "other", 2, preemptible=True)
SPARE = Node("s5", "spare", 2, automatic=False)


def burst(number: int, slots: int = 1) -> Node:
    return Node(f"b{number}", f"burst-{number}", slots, preemptible=True, burst=True)


@dataclass(frozen=True)
class Scene:
    """One run. first: nodes that are held from the start; more: nodes that may come."""

    name: str
    config: RunConfig
    first: Sequence[Node]
    more: Sequence[Node] = ()
    layouts: tuple[str, ...] = field(default=("tp=2", "dp=2", "tp=2,dp=2", "dp=1", "dp=9", "tp=x"))

    def new_run(self, event: CoordinatorStarted | None = None) -> Run:
        recipe = tiny_recipe(self.config)
        return Run(self.config, SPEC, recipe.check_layout, place_once)

    @property
    def asks(self) -> list[ResizeRequest | ReplaceRequest | DrainRequest]:
        """What operators may want of it; workers and nodes are filled in by the player."""
        return [ResizeRequest(layout=layout) for layout in self.layouts] + [
            ResizeRequest(workers=workers) for workers in (1, 2, 3, 4, 5)
        ]


def _config(**sections: Any) -> RunConfig:
    train = {"steps": sections.pop("steps", 10_000), "global_batch": 8}
    return tiny_run(**{"train": train, "deadlines": DEADLINES, "policy": POLICY, **sections})


def _slurm(burst_nodes: int = 0, **slurm: Any) -> dict[str, Any]:
    burst_section = {"partition": "burst", "max_nodes": burst_nodes} if burst_nodes else None
    return {"kind": "slurm", "slurm": {"burst": burst_section, **slurm}}


SPEC: ModelSpec = tiny_recipe(tiny_run()).spec

SCENES = (
    Scene("two nodes", _config(layouts=ANY_NUMBER), (N1, N2), (burst(3), burst(4), SPARE)),
    Scene("a machine", _config(cluster={"workers_per_node": 2}), (Node("", "machine"),)),
    Scene(
        "wide nodes",
        _config(layouts=ANY_NUMBER, cluster=_slurm(3)),
        (WIDE1, WIDE2),
        (burst(3, 2), burst(4)),
    ),
    Scene(
        "burst",
        _config(cluster=_slurm(3, requeue=False), workers={"initial": 1, "max": 4}),
        (N1,),
        (burst(3), burst(4, 2), burst(5)),
    ),
    Scene(
        "short and scripted",
        _config(
            steps=12,
            notices=[
                {"at_step": 1, "layout": {"tp": 2, "dp": 2}},
                {"at_step": 2, "replace": 1},
                {"at_step": 3, "workers": 1},
            ],
        ),
        (WIDE1, WIDE2),
        (burst(3),),
    ),
    Scene("nowhere to go", _config(layouts={2: [{"dp": 2}, {"tp": 2}]}), (N1, N2), (burst(3),)),
    Scene(
        "bounded memory",
        _config(layouts=ANY_NUMBER, handoff={"memory": "bounded"}),
        (N1, N2),
        (burst(3), burst(4, 2), SPARE),
    ),
    Scene(
        "snapshots",
        _config(layouts=ANY_NUMBER, snapshots={"every_steps": 1}),
        (WIDE1, WIDE2),
        (burst(3), burst(4, 2), SPARE),
    ),
    Scene(
        "standby",
        _config(layouts=ANY_NUMBER, workers={"initial": 2, "max": 2, "standby": 1}),
        (WIDE1, WIDE2),
        (burst(3), SPARE),
    ),
)

RAMP = {"steps": 10_000, "global_batch": 8, "rampup": {"start": 1, "increment": 1, "samples": 40}}
FASTEST = Scene(
    "the fastest layout of a batch that grows",
    _config(
        train=RAMP,
        layouts=ANY_NUMBER,
        cluster=_slurm(3),
        workers={"initial": 4, "max": 4},
        policy={**POLICY, "layout": "auto"},
    ),
    (WIDE1, WIDE2),
    (burst(3, 2), burst(4)),
)
"""Which may have fewer workers than there are nodes for."""


def observed(scene: Scene) -> Scene:
    policy = scene.config.policy.model_copy(update={"observe": True})
    return replace(scene, config=scene.config.model_copy(update={"policy": policy}))


@cache
def _placed(
    source: RankMap, target: Layout, available: tuple[int, ...], nodes: tuple[tuple[int, int], ...]
) -> RankMap:
    return place(SPEC, source, target, available, dict(nodes))


def place_once(
    model: ModelSpec,
    source: RankMap,
    target: Layout,
    available: Sequence[int],
    nodes: Mapping[int, int],
) -> RankMap:
    """As `place`, which takes a while, and what it once said."""
    assert model == SPEC
    return _placed(source, target, tuple(available), tuple(sorted(nodes.items())))
