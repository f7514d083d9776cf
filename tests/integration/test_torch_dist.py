"""Checkpoints of Megatron's own in worlds of ours, and ours in Megatron's, bit by bit."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.transitions.pool import Pool
from liver_hpc.layout.coordinates import Layout, RankMap
from tests.integration.megatron_job import ADAM_STEP, Case, MegatronJob, expected, recipe_of
from tests.integration.processes import WorkerProcess, closable, run_workers

pytestmark = pytest.mark.timeout(400)

STEP = 5
BATCH = 8
RANKS = 4
CALL_S = 120.0
BF16 = {"dtype": "bf16", "tied_embeddings": False}
MOE = {"experts": {"number": 4, "topk": 2}}

# A job that saves, a world of ours that loads that and saves, a job that loads this.
CHAINS = {
    "dense": [
        (Case("dp4"), "tp2 pp2", Case("pp2 dp2")),
        (Case("tp2 dp2", BF16), "dp4", Case("tp4", BF16)),
        (Case("pp2 vpp2 dp2", overlap=True), "tp2 dp2", Case("dp4")),
        (Case("tp2 dp2", BF16, distributed=False), "dp4", Case("tp2 dp2", BF16)),
        (Case("tp2 pp2", BF16, "fully_reshardable"), "pp2 dp2", Case("dp4", BF16)),
    ],
    "during a ramp-up": [(Case("dp4"), "tp2 dp2", Case("pp2 dp2"))],
    "experts": [
        (Case("ep2 dp4", MOE), "ep4 dp4", Case("ep2 dp4", MOE)),
        (Case("ep2 pp2 dp2", MOE), "dp4", Case("dp4", MOE)),
    ],
}


def through(
    process: WorkerProcess, chains: list[Any], directory: str, train: dict[str, Any]
) -> list[Any]:
    """Loads what each chain's job has saved, and saves it; what differs from what it must be."""
    import torch.distributed as dist

    from liver_hpc.checkpoint.parts import Save, restore
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World
    from tests.integration.toys import derived

    store = closable(dist.FileStore)
    found = []
    for number, (saved, layout, _loading) in enumerate(chains):
        recipe = recipe_of(saved.model, train=train)
        recipe.spec = derived(recipe, layout, saved.layout)
        install_sentinel(process.worker)
        sizes = Layout.parse(layout)
        rank_map = RankMap(sizes, tuple(range(sizes.workers)))
        world = World(recipe, rank_map, process.worker, number, process.device)
        world.warm_up()
        world.book.connect(process.network, process.store, 30.0)
        context = process.context(
            recipe,
            lambda: store(f"{directory}/store-{number}", RANKS),  # noqa: B023
            checkpoints=Path(directory),
        )
        restored = restore(world, Path(directory, "job", str(number)))
        differ = list(differences(world))
        ours = Path(directory, "ours", str(number))
        written = Save(context, world, restored.scalars.step, ours).now(world)
        found.append((restored.scalars, differ, written.error))
        world.close()
    return found


def differences(world: Any) -> Any:
    """Parameters that are not what their place in a checkpoint says, by Megatron's own words."""
    import torch
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from liver_hpc.world import megatron, thread

    for chunk in world.chunks:
        module = chunk.module
        while hasattr(module, "module"):
            module = module.module
        with thread.groups_in_use(world.groups):
            state = module.sharded_state_dict(metadata=megatron.sharding_metadata(world.groups, {}))
        for item in nested_values(state):
            data = getattr(item, "data", None)
            if isinstance(data, torch.Tensor):
                wanted = expected(item, "", data).to(data.dtype)
                if not torch.equal(data, wanted):
                    yield item.key


@pytest.mark.parametrize(
    ("kind", "samples", "skipped"),
    [
        ("dense", STEP * BATCH, 0),
        pytest.param("experts", STEP * BATCH, 0, marks=pytest.mark.long),
        ("during a ramp-up", 2 * 4 + 2 * 6 + 8, 6),
    ],
)
def test_megatrons_checkpoints_go_through_ours_bit_by_bit(
    kind: str, samples: int, skipped: int, tmp_path: Path
) -> None:
    chains = CHAINS[kind]
    train: dict[str, Any] = {"steps": 100, "global_batch": BATCH}
    if samples != STEP * BATCH:
        train["rampup"] = {"start": 4, "increment": 2, "samples": 16}
    with Pool(RANKS, partial(MegatronJob, str(tmp_path / "jobs"), RANKS)) as jobs:
        for number, (case, _, _) in enumerate(chains):
            path = tmp_path / "job" / str(number)
            jobs.call("save", CALL_S, "save", case, str(path), STEP, samples, False, skipped)
        (tmp_path / "ours").mkdir()
        for worker in run_workers(through, RANKS, tmp_path, chains, str(tmp_path), train):
            for scalars, differ, error in worker:
                assert (differ, error) == ([], "")
                assert (scalars.step, scalars.consumed_samples) == (STEP, samples)
                assert scalars.optimizer_step == ADAM_STEP
                assert scalars.unscheduled_samples == skipped
        for number, (_, _, case) in enumerate(chains):
            path = tmp_path / "ours" / str(number) / f".step-{STEP:08d}-g{number}.partial"
            for rank in jobs.call("load", CALL_S, "load", case, str(path)):
                step, consumed, steps, differ, schedule = rank
                assert (step, consumed, steps) == (STEP, samples, [ADAM_STEP])
                assert differ == []
                assert schedule["num_steps"] == samples - skipped
            about = json.loads((path / "metadata.json").read_bytes())
            assert about["sharded_backend"] == "torch_dist"


# A job that saves its weights, and worlds of ours that begin with them.
WEIGHTS = [
    (Case("tp2 dp2"), "pp2 dp2", {}),
    (Case("pp2 dp2"), "tp2 dp2", BF16),
    (Case("tp2 pp2", BF16), "dp4", BF16),
]


def begun(process: WorkerProcess, directory: str) -> list[Any]:
    """Begins a world with each of the weights; what differs from what it must be."""
    import torch

    from liver_hpc.checkpoint.parts import restore
    from liver_hpc.errors import CheckpointError
    from liver_hpc.layout.tensors import MAIN, PARAMETER
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World
    from tests.integration.toys import derived

    found = []
    for number, (_saved, layout, model) in enumerate(WEIGHTS):
        recipe = recipe_of(
            {"tied_embeddings": False, **model}, train={"steps": 100, "global_batch": BATCH}
        )
        recipe.spec = derived(recipe, layout)
        install_sentinel(process.worker)
        sizes = Layout.parse(layout)
        rank_map = RankMap(sizes, tuple(range(sizes.workers)))
        world = World(recipe, rank_map, process.worker, number, process.device)
        world.warm_up()
        path = Path(directory, "job", str(number))
        with pytest.raises(CheckpointError, match="has no state of the optimizer"):
            restore(world, path)
        for kind in recipe.spec.optimizer_kinds:
            for memory in world.state.memory(kind):
                memory.fill_(3.0)
        restored = restore(world, path, weights=True)
        differ = list(differences(world))
        for kind in recipe.spec.optimizer_kinds:
            for index, box in world.state.boxes(kind):
                held = world.state.view(kind, index, box)
                wanted = torch.zeros_like(held)
                if kind == MAIN:
                    wanted.copy_(world.state.view(PARAMETER, index, box))
                if not torch.equal(held, wanted):
                    differ.append(f"{kind} {index}")
        found.append((restored.scalars, differ))
        world.close()
    return found


def test_a_run_begins_with_the_weights_of_a_job_bit_by_bit(tmp_path: Path) -> None:
    """In another layout, and another precision, to which they are rounded."""
    with Pool(RANKS, partial(MegatronJob, str(tmp_path / "jobs"), RANKS)) as jobs:
        for number, (case, _, _) in enumerate(WEIGHTS):
            model = {"tied_embeddings": False, **case.model}
            saved = Case(case.layout, model)
            path = str(tmp_path / "job" / str(number))
            jobs.call("save", CALL_S, "save", saved, path, STEP, 0, True)
    for worker in run_workers(begun, RANKS, tmp_path, str(tmp_path)):
        for scalars, differ in worker:
            assert differ == []
            assert (scalars.step, scalars.consumed_samples, scalars.optimizer_step) == (0, 0, 0)
