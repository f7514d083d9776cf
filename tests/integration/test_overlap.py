"""Communication beside computation: gradients in buckets, parameters gathered with the next
forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.worlds import Case, apart, connected, recipe_of, train, train_cases

OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_elements": 20_000}


@pytest.mark.timeout(200)
def test_training_is_the_same_with_overlap(tmp_path: Path) -> None:
    layouts = ["dp2", "tp2 dp2", "pp2 dp2", "pp2 dp2 vpp2"]
    cases = [Case(layout, train=how) for layout in layouts for how in ({}, OVERLAP)]
    found = run_workers(train_cases, 4, tmp_path, cases)[0]
    for layout, plain, overlapped in zip(layouts, found[::2], found[1::2], strict=True):
        assert apart(overlapped, plain) < 1e-6, layout


BUCKETS_OF_ONE = {"overlap_grad_reduce": True, "bucket_elements": 4_000}
"""In which attention's two projections are apart: of the one that is first among the parameters the
gradient comes last."""


def train_half_rehearsed(process: WorkerProcess) -> list[Any]:
    """The first worker has rehearsed, the second one has not, as where it knows the shapes."""
    from liver_hpc.world.world import World

    if process.worker == 1:
        World.warm_up = lambda world, again=True: None  # type: ignore[method-assign]
    return train_cases(process, [Case("dp2", train=BUCKETS_OF_ONE)])


def test_who_has_rehearsed_reduces_gradients_in_the_order_of_who_has_not(tmp_path: Path) -> None:
    paths = tmp_path / "plain", tmp_path / "mixed"
    for path in paths:
        path.mkdir()
    plain = run_workers(train_cases, 2, paths[0], [Case("dp2")])
    mixed = run_workers(train_half_rehearsed, 2, paths[1])
    assert apart(mixed[0][0], plain[0][0]) < 1e-6


def altered_by_a_first_pass(process: WorkerProcess) -> list[bool]:
    """Whether this worker's parameters become others while the gradients of a step are computed
    whose parameters were not gathered; as a step of a run, and as a handoff's target does it."""
    found = []
    cases = [("dp2", gathered) for gathered in (False, True)] + [("pp2 dp2 vpp2", True)]
    for generation, (layout, gathered) in enumerate(cases):
        recipe = recipe_of(Case(layout, train=OVERLAP), process.worker)
        with connected(process, recipe, layout, generation) as world:
            if world is None:
                continue
            train(world, [0])
            before = world.state.digests(("parameter",))
            world.forward_backward(1, gathered=gathered)
            found.append(world.state.digests(("parameter",)) != before)
    return found


def test_a_targets_first_gradients_write_to_no_parameters(tmp_path: Path) -> None:
    """Which may lie in the source's memory: a wrong bit of a joiner's would go on there after the
    handoff was called off for it."""
    found = run_workers(altered_by_a_first_pass, 4, tmp_path)
    assert found[0] == [True, False, False]
    assert not any(altered for each in found for altered in each[-1:])


GATHERED_AT_ONCE = {**OVERLAP, "overlap_param_gather": False}


def digests_at_boundaries(process: WorkerProcess) -> list[dict[str, Any]]:
    """Of the parameters after each step, before and after `settle`; gathered late, and at once."""
    answers = []
    for generation, how in enumerate((OVERLAP, GATHERED_AT_ONCE)):
        recipe = recipe_of(Case("dp2", train=how), process.worker)
        with connected(process, recipe, "dp2", generation) as world:
            found: dict[str, list[Any]] = {"trained": [], "stale": [], "settled": []}
            for step in range(3):
                found["trained"] += train(world, [step])
                found["stale"].append(world.state.digests(("parameter",)))
                world.settle()
                found["settled"].append(world.state.digests(("parameter",)))
            answers.append(found)
    return answers


def test_parameters_at_a_boundary_are_current_only_after_settle(tmp_path: Path) -> None:
    """Outside a rank's slice they are those of the step before, and nothing would say so."""
    for late, at_once in run_workers(digests_at_boundaries, 2, tmp_path):
        assert late["trained"] == at_once["trained"]
        assert late["settled"] == at_once["settled"] == at_once["stale"]
        for stale, settled in zip(late["stale"], late["settled"], strict=True):
            assert stale != settled


def functions_beside_another_world(process: WorkerProcess) -> list[bool]:
    """Whether a world keeps its own, and shares them, where all models have one config."""
    from liver_hpc.world import chunks, derive

    kept: list[Any] = []
    plain = derive.build_chunks

    def with_one_config(*about: Any) -> Any:
        built = plain(*about)
        kept.extend(module.config for module in built)
        for module in built:
            module.config = kept[0]
        return built

    vars(chunks)["build_chunks"] = with_one_config
    recipe = recipe_of(Case("dp2", train=OVERLAP), process.worker)
    with connected(process, recipe, "dp2", 0) as world:
        before = world.chunks[0].config.no_sync_func
        with connected(process, recipe, "dp2", 1) as other:
            mine = world.chunks[0].config.no_sync_func
            return [mine == before, mine == other.chunks[0].config.no_sync_func]


def test_worlds_beside_each_other_share_no_functions_of_a_config(tmp_path: Path) -> None:
    """Else the source would reduce its gradients as the target's, after every micro-batch."""
    assert run_workers(functions_beside_another_world, 2, tmp_path) == [[True, False]] * 2
