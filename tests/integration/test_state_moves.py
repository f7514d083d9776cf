"""State on the move between real worlds over gloo: bit for bit, and by digest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.votes import Side, disagreements
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import tiny_recipe
from tests.integration.worlds import begin_at, move, train

A = RankMap(Layout(1, 1, 2), (0, 1))
B = RankMap(Layout(2, 1, 2), (2, 0, 1, 3))
C = RankMap(Layout(1, 2, 1), (3, 1))
D = RankMap(Layout(2, 2, 1), (1, 3, 0, 2))
MOVED = RankMap(Layout(1, 1, 2), (2, 3))


def _make_world(process: WorkerProcess, recipe: Any, rank_map: RankMap, generation: int) -> Any:
    from liver_hpc.world.world import World

    if process.worker not in rank_map.workers:
        return None
    world = World(recipe, rank_map, process.worker, generation, process.device)
    world.book.connect(process.network, process.store, 30.0)
    return world


def _kinds(recipe: Any) -> tuple[str, ...]:
    return ("parameter", *recipe.spec.optimizer_kinds)


def _fill_with_nan(world: Any) -> None:
    for kind in _kinds(world.recipe):
        for index, box in world.state.boxes(kind):
            world.state.view(kind, index, box).fill_(float("nan"))


def _move(process: WorkerProcess, recipe: Any, worlds: tuple[Any, Any], tag: str) -> None:
    """Everything of worlds[0] to worlds[1]; either may be None here."""
    source, target = tag.split(">")
    rank_maps = {"A": A, "B": B, "C": C, "D": D, "M": MOVED}
    move(process, recipe, worlds, (rank_maps[source], rank_maps[target]), f"transfer-{tag}")
    if worlds[1] is not None:
        begin_at(worlds[1], 4)


def _bits(world: Any) -> dict[Any, Any]:
    return {
        (kind, index, box): world.state.view(kind, index, box).clone()
        for kind in _kinds(world.recipe)
        for index, box in world.state.boxes(kind)
    }


def _same_bits(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(
        torch.equal(one[key].view(torch.uint8), other[key].view(torch.uint8)) for key in one
    )


def there_and_back(process: WorkerProcess, dtype: str) -> dict[str, Any]:
    recipe = tiny_recipe(dtype=dtype)
    worlds = {"A": _make_world(process, recipe, A, 0)}
    answer: dict[str, Any] = {}
    if worlds["A"] is not None:
        worlds["A"].state.initialize(recipe.initial, seed=3)
        for step in range(4):
            worlds["A"].forward_backward(step)
            worlds["A"].update(step)
        before = _bits(worlds["A"])
        answer["A"] = worlds["A"].state.digests(_kinds(recipe))
    for generation, name in enumerate("BCD", start=1):
        rank_map = {"B": B, "C": C, "D": D}[name]
        worlds[name] = _make_world(process, recipe, rank_map, generation)
    for old, new in ("AB", "BC", "CD"):
        if worlds[new] is not None:
            _fill_with_nan(worlds[new])
        _move(process, recipe, (worlds[old], worlds[new]), f"{old}>{new}")
        if worlds[new] is not None:
            answer[new] = worlds[new].state.digests(_kinds(recipe))
    if worlds["A"] is not None:
        _fill_with_nan(worlds["A"])
    _move(process, recipe, (worlds["D"], worlds["A"]), "D>A")
    if worlds["A"] is not None:
        answer["equal"] = _same_bits(before, _bits(worlds["A"]))
    return answer


@pytest.mark.timeout(200)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_there_and_back_again_is_bit_equal_and_every_layout_has_the_same_digest(
    dtype: str, tmp_path: Path
) -> None:
    """dp2 -> tp2 dp2 -> pp2 -> tp2 pp2 -> dp2, the receiving memory filled with NaN before."""
    check_there_and_back(run_workers(there_and_back, 4, tmp_path, dtype))


def check_there_and_back(answers: list[dict[str, Any]]) -> None:
    """Bits equal after the way back, digests equal in every layout on the way."""
    assert [answer["equal"] for answer in answers[:2]] == [True, True]
    rank_maps = {"A": A, "B": B, "C": C, "D": D}
    for name in "BCD":
        source, target = (
            {worker: answers[worker].get(side, ()) for worker in range(4)} for side in ("A", name)
        )
        assert not disagreements(Side("A", A, source), Side(name, rank_maps[name], target))


def _train_on(process: WorkerProcess, move: bool) -> list[tuple[float, ...]]:
    """8 steps of dp2; with `move` the last 4 on two other processes."""
    recipe = tiny_recipe(dropout=0.1)
    old = _make_world(process, recipe, A, 0)
    new = _make_world(process, recipe, MOVED, 1) if move else None
    results = []
    if old is not None:
        old.state.initialize(recipe.initial, seed=3)
        results = train(old, range(4))
    if move:
        _move(process, recipe, (old, new), "A>M")
    survivor = new if move else old
    if survivor is not None:
        results = train(survivor, range(4, 8))
    return results


@pytest.mark.timeout(200)
def test_same_layout_on_other_workers_goes_on_bit_equal_to_the_run_that_did_not_move(
    tmp_path: Path,
) -> None:
    """With dropout; without it: test_elastic_runs."""
    (tmp_path / "stay").mkdir()
    (tmp_path / "move").mkdir()
    stayed = run_workers(_train_on, 2, tmp_path / "stay", False)
    moved = run_workers(_train_on, 4, tmp_path / "move", True)
    assert moved[2] == stayed[0]
    assert moved[3] == stayed[1]
    assert len(set(stayed[0])) == 4
