"""Memory that goes on into the target world: nothing moved, same bits, and the way back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.layout.coordinates import Layout, RankMap
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import tiny_recipe
from tests.integration.worlds import begin_at, train

STEPS = 3
DP1, DP2, TP2, PP2 = ("tp1 pp1 dp1", "tp1 pp1 dp2", "tp2 pp1 dp1", "tp1 pp2 dp1")


def _world(process: WorkerProcess, recipe: Any, layout: str, generation: int) -> Any:
    from liver_hpc.world.world import World

    sizes = Layout.parse(layout)
    rank_map = RankMap(sizes, tuple(range(sizes.workers)))
    if process.worker not in rank_map.workers:
        return None
    world = World(recipe, rank_map, process.worker, generation, process.device)
    world.warm_up()
    world.book.connect(process.network, process.store, 30.0)
    return world


def _stream(process: WorkerProcess, recipe: Any, old: Any, new: Any, taken: Any, name: int) -> int:
    """Moves what was not taken over; returns how many bytes this worker copied within itself."""
    from liver_hpc.clock import Deadline, SystemClock
    from liver_hpc.layout.memory import move_bytes
    from liver_hpc.layout.plan import transfer_plan
    from liver_hpc.transport.stream import Transport
    from liver_hpc.transport.wire import group_wire

    maps = [RankMap(world, tuple(range(world.workers))) for world in (old[0], new[0])]
    plan = transfer_plan(recipe.spec, *maps, process.worker)
    local = (move for move in plan.local if (move.kind, move.tensor_index) not in taken)
    plan = replace(plan, local=tuple(local))
    members = tuple(sorted({*maps[0].workers, *maps[1].workers}))
    if process.worker not in members:
        return 0
    group = process.transfer_group(f"transfer-{name}", members)
    wire = group_wire(group.backend, {w: w for w in members}, process.device.torch_device)
    transport = Transport(wire, recipe.spec, recipe.config.handoff)
    moved = transport.stream(
        transport.prepare(plan),
        None if old[1] is None else old[1].state,
        None if new[1] is None else new[1].state,
        lambda _bytes: None,
        Deadline.after(SystemClock(), 60.0, "the state"),
    )
    assert moved is not None
    transport.close()
    return move_bytes(recipe.spec, plan.local)


def cross(process: WorkerProcess, case: dict[str, Any]) -> dict[str, Any]:
    """Trains in the first layout, crosses to the second with take-over, goes back from the first
    attempt, crosses again, and trains on there."""
    import torch

    from liver_hpc.world.take_over import take_over

    recipe = tiny_recipe(**case["model"])
    kinds = ("parameter", *recipe.spec.optimizer_kinds)
    source = _world(process, recipe, case["source"], case["number"])
    answer: dict[str, Any] = {}
    if source is not None:
        source.state.initialize(recipe.initial, seed=3)
        begin_at(source, 0)
        answer["losses"] = train(source, range(STEPS))
        answer["digests"] = source.state.digests(kinds)
    for attempt in (1, 2):
        target, taken = _world(process, recipe, case["target"], case["number"] + attempt), set()
        if source is not None and target is not None:
            taken = take_over(target, source)
        answer["taken"] = sorted({kind for kind, _ in taken})
        if attempt == 1:
            if target is not None:
                target.forward_backward(STEPS)  # what a target computes before the verdict
                process.device.synchronize()
                target.close()
            if source is not None:
                assert source.state.digests(kinds) == answer["digests"]
            continue
        layouts = Layout.parse(case["source"]), Layout.parse(case["target"])
        answer["local"] = _stream(
            process, recipe, (layouts[0], source), (layouts[1], target), taken, case["number"]
        )
        if source is not None:
            source.close(spared=frozenset() if target is None else target.taken)
        if target is not None:
            target.taken = frozenset()
            begin_at(target, STEPS)
            answer["target"] = target.state.digests(kinds)
            answer["losses"] = answer.get("losses", []) + train(target, range(STEPS, 2 * STEPS))
            parts = [p.data for p in target.tensors.values()]
            assert all(torch.isfinite(part).all() for part in parts)
            target.close()
    return answer


CASES = [
    (DP2, DP2, {}, ["exp_avg", "exp_avg_sq", "parameter"]),
    (DP1, DP2, {}, ["exp_avg", "exp_avg_sq", "parameter"]),
    (DP2, DP1, {}, ["exp_avg", "exp_avg_sq", "parameter"]),
    (TP2, TP2, {"dtype": "bf16"}, ["exp_avg", "exp_avg_sq", "main", "parameter"]),
    (DP2, DP1, {"dtype": "bf16"}, ["exp_avg", "exp_avg_sq", "main", "parameter"]),
    (DP2, PP2, {}, []),
    (DP2, TP2, {}, []),
]


@pytest.mark.timeout(300)
def test_what_stays_is_taken_over_and_trains_on_as_if_it_had_been_moved(tmp_path: Path) -> None:
    cases = [
        {"number": 10 * number, "source": source, "target": target, "model": model}
        for number, (source, target, model, _) in enumerate(CASES)
    ]
    found = run_workers(every_case, 2, tmp_path, cases)
    for (source, target, model, taken), answers in zip(
        CASES, zip(*found, strict=True), strict=True
    ):
        whole = answers[0]["losses"]
        assert len(whole) == 2 * STEPS
        stayed = found[0][next(i for i, c in enumerate(CASES) if c[2] == model)]["losses"]
        tolerance = 2e-2 if model else 1e-5
        for (loss, norm), (fixed_loss, fixed_norm) in zip(whole, stayed, strict=True):
            assert abs(loss - fixed_loss) <= tolerance * fixed_loss
            assert abs(norm - fixed_norm) <= tolerance * fixed_norm
        assert answers[0]["taken"] == taken, (source, target)
        if source == target:
            assert [a["local"] for a in answers] == [0, 0]
            assert [a["target"] for a in answers] == [a["digests"] for a in answers]


def every_case(process: WorkerProcess, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [cross(process, case) for case in cases]
