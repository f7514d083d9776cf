"""Evaluation in real worlds: the same loss in every layout, and nothing of the state is changed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.processes import WorkerProcess, run_workers
from tests.integration.random_tokens import RandomTokenGPT, RandomTokens
from tests.integration.test_experts import AUX, BIAS, SIZES, model
from tests.integration.worlds import Case, apart, connected, recipe_of, train

BATCHES = range(2, 4)
"""Validation batches that are evaluated."""
EXPERTS = model(number=6, **AUX, **BIAS) | {"layers": 4}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_elements": 20_000}
CASES = {
    "dp1": Case("dp1", EXPERTS),
    "uneven": Case("dp3", EXPERTS),
    "tp pp": Case("tp2 pp2 sp", EXPERTS),
    "cp": Case("cp2 dp2", EXPERTS),
    "ep, with padding": Case("dp3 ep3", EXPERTS),
    "ep pp": Case("pp2 dp2 ep2", EXPERTS),
    "vpp": Case("pp2 dp2 ep2 vpp2", EXPERTS),
    "overlap": Case("dp2 ep2", EXPERTS, OVERLAP),
    "overlap vpp": Case("pp2 dp2 vpp2", EXPERTS, OVERLAP),
    "recomputing": Case("tp2 sp", EXPERTS | {"recompute": "full"}),
}


def fingerprint(world: Any) -> list[Any]:
    """All that training goes on from."""
    import torch
    from megatron.core.tensor_parallel import random as megatron_random

    from liver_hpc.world import buffers

    cpu, device, tracked = megatron_random._get_all_rng_states()
    tensors = [place.tensor for place in buffers.all_buffers(world.chunks)]
    tensors += [cpu, device, *tracked.values()]
    tensors += [buffer.grad_data for chunk in world.chunks for buffer in chunk.buffers]
    modes = [part.training for chunk in world.chunks for part in chunk.modules()]
    digests = world.state.digests(world.recipe.spec.kinds)
    places = [id(place.tensor) for place in buffers.all_buffers(world.chunks)]
    rng = torch.get_rng_state().tolist()
    return [digests, [tensor.tolist() for tensor in tensors], places, modes, rng]


def evaluated(process: WorkerProcess, cases: Sequence[Case]) -> list[Any]:
    """Of each case, after two steps: the validation loss, what of the state it changed, and whether
    training went on as it does without. Empty where this worker has no seat."""
    found: list[Any] = []
    for number, case in enumerate(cases):
        recipe = recipe_of(case, process.worker)
        courses = []
        losses, changed = [], []
        for evaluates in (True, False):
            with connected(process, recipe, case.layout, 2 * number + evaluates) as world:
                if world is None:
                    continue
                begin = train(world, range(2))
                world.settle()
                before = fingerprint(world)
                if evaluates:
                    losses += [world.evaluate(BATCHES), world.evaluate(BATCHES)]
                after = fingerprint(world)
                changed += [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
                courses.append([*begin, *train(world, range(2, 4))])
        found.append((losses, changed, courses))
    return found


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_loss_is_the_same_in_every_layout_and_nothing_changes(tmp_path: Path) -> None:
    of_first, *of_others = run_workers(evaluated, 4, tmp_path, list(CASES.values()))
    expected = of_first[0][0][0]
    for name, (losses, changed, courses) in zip(CASES, of_first, strict=True):
        assert losses[0] == pytest.approx(expected, rel=1e-5), name
        assert losses[1] == losses[0], name
        assert changed == [], name
        assert courses[0] == courses[1], f"{name}: training went on otherwise"
    for results in of_others:
        for name, (losses, changed, courses) in zip(CASES, results, strict=True):
            assert not losses or losses[0] == pytest.approx(expected, rel=1e-5), name
            assert changed == [], name
            assert courses[:1] == courses[1:], name


def first_losses(process: WorkerProcess, cases: Sequence[Case]) -> list[float]:
    """The validation loss before the first step, on one worker."""
    found = []
    for number, case in enumerate(cases):
        with connected(process, recipe_of(case, process.worker), case.layout, number) as world:
            assert world is not None
            found.append(world.evaluate(BATCHES))
    return found


@pytest.mark.timeout(120)
def test_nothing_is_dropped(tmp_path: Path) -> None:
    cases = [Case("dp1", SIZES | {"dropout": dropout}) for dropout in (0.0, 0.5)]
    ((without, dropping),) = run_workers(first_losses, 1, tmp_path, cases)
    assert without == dropping


# ---- means over tokens


class RaggedTokens(RandomTokens):
    """Samples of which only some tokens count: few of the first ones, more of later ones."""

    def sample(self, index: int) -> tuple[Any, Any, Any]:
        tokens, labels, mask = super().sample(index)
        mask[2 + index % 8 :] = 0
        return tokens, labels, mask


class RaggedGPT(RandomTokenGPT):
    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        sizes = self.options.seq_length, self.options.vocab_size
        self._samples = RaggedTokens(*sizes)  # type: ignore[assignment]


class TokenCountingGPT(RaggedGPT):
    """Tells how many tokens count."""

    def loss(self, model: Any, samples: Any) -> Any:
        output, mean_loss = super().loss(model, samples)
        tokens = samples[2].sum()  # of the masks

        def counted(losses: Any) -> Any:
            mean, reported = mean_loss(losses)
            return mean, {**reported, "tokens": tokens}

        return output, counted


def step_and_evaluation(process: WorkerProcess, cases: Sequence[Case]) -> list[Any]:
    """The first step's loss and the validation loss before it; empty where there is no seat."""
    found = []
    for number, case in enumerate(cases):
        with connected(process, recipe_of(case, process.worker), case.layout, number) as world:
            losses = []
            if world is not None:
                losses = [world.evaluate(BATCHES), train(world, [0])[0][0]]
            found.append(losses)
    return found


@pytest.mark.timeout(200)
def test_a_recipe_that_tells_tokens_gets_the_mean_over_them(tmp_path: Path) -> None:
    """As of one micro-batch that is the whole batch; without, every micro-batch counts alike."""
    whole = {"global_batch": 8, "micro_batch": 8}
    cases = [
        Case("dp1", SIZES, whole, RaggedGPT),
        Case("dp1", SIZES, recipe=RaggedGPT),
        *(Case(layout, SIZES, recipe=TokenCountingGPT) for layout in ("dp1", "dp3", "pp2 cp2")),
    ]
    expected, unweighted, *found = run_workers(step_and_evaluation, 4, tmp_path, cases)[0]
    step = 1
    assert all(each[step] == pytest.approx(expected[step], rel=1e-5) for each in found)
    assert abs(unweighted[step] - expected[step]) > 1e-4 * expected[step]
    # Two batches here have as many tokens, for indices count in eights.
    assert all(each[0] == pytest.approx(expected[0], rel=1e-5) for each in found)
    assert apart([tuple(found[0])], [tuple(found[2])]) < 1e-5
