"""A model's state that moves from layout to layout, compared with a run that stays. Real processes
over gloo."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.votes import Side, disagreements
from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import Case, begin_at, connected, move, recipe_of, train

STEPS_EACH = 2


def moved_along(
    process: WorkerProcess, case: Case, chain: Sequence[str], steps: Sequence[range]
) -> dict[str, Any]:
    """Trains in one layout after the other, its steps in each; digests on both sides of every move,
    and the persistent buffers at the end."""
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.world import World
    from tests.integration.toys import derived

    recipe = recipe_of(case, process.worker)
    recipe.spec = derived(recipe, *chain)
    install_sentinel(process.worker)
    rank_maps = [whole_rank_map(layout) for layout in chain]
    answer: dict[str, Any] = {"course": [], "digests": [], "buffers": []}
    old = None
    for number, rank_map in enumerate(rank_maps):
        new = None
        if process.worker in rank_map.workers:
            new = World(recipe, rank_map, process.worker, number, process.device)
            new.warm_up()
            new.book.connect(process.network, process.store, 30.0)
            if not number:
                new.state.initialize(recipe.initial, seed=3)
        if number:
            sides = (rank_maps[number - 1], rank_map)
            move(process, recipe, (old, new), sides, f"move-{number}")
            answer["digests"].append(
                [() if w is None else w.state.digests(recipe.spec.kinds) for w in (old, new)]
            )
        if old is not None:
            old.close()
        if new is not None:
            begin_at(new, steps[number].start)
            answer["course"] += train(new, steps[number])
            new.settle()
            answer["buffers"] = [place.tensor.tolist() for place in new._buffers.values()]
        old = new
    return answer


def whole_rank_map(layout: str) -> RankMap:
    sizes = Layout.parse(layout)
    return RankMap(sizes, tuple(range(sizes.workers)))


def stayed(process: WorkerProcess, case: Case, steps: int) -> dict[str, Any]:
    recipe = recipe_of(case, process.worker)
    with connected(process, recipe, case.layout, 0) as world:
        course = train(world, range(steps))
        return {"course": course, "buffers": [p.tensor.tolist() for p in world._buffers.values()]}


def moved_and_stayed(
    case: Case, chain: Sequence[str], tmp_path: Path, steps: Sequence[range] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a run through a chain of layouts, and of one that stays in the case's: the courses and
    buffers. The state of both sides of each move is equal by digest. steps: of each layout, from 0
    on; by default as many in each."""
    (tmp_path / "stay").mkdir()
    steps = steps or [range(STEPS_EACH * n, STEPS_EACH * (n + 1)) for n in range(len(chain))]
    workers = max(Layout.parse(layout).workers for layout in chain)
    (stay,) = run_workers(stayed, 1, tmp_path / "stay", case, steps[-1].stop)
    answers = run_workers(moved_along, workers, tmp_path, case, chain, steps)
    for number, (before, after) in enumerate(itertools.pairwise(chain)):
        sides = [
            Side(
                layout,
                whole_rank_map(layout),
                {worker: told["digests"][number][side] for worker, told in enumerate(answers)},
            )
            for side, layout in enumerate((before, after))
        ]
        assert disagreements(*sides) == []
    return answers[0], stay
