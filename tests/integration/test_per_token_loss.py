"""`calculate_per_token_loss`: gradients are those of the mean over all tokens of the global batch,
of which every sample counts another number. Real processes over gloo, fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import PlanError
from liver_hpc.world import megatron
from tests.integration.per_token import HalfGPT, MaskedGPT, PerTokenGPT, SilentGPT
from tests.integration.processes import run_workers
from tests.integration.test_experts import AUX, BIAS, SEQ_AUX, SIZES, model
from tests.integration.toys import build_world, derived
from tests.integration.worlds import Case, apart, recipe_of, train_cases

pytestmark = pytest.mark.timeout(300)

DENSE = SIZES | {"layers": 4}
FIVE = {"global_batch": 5}
"""Micro-batches, which no number of ranks shares evenly."""
EQUAL = 1e-5


def per_token(layout: str, options: dict[str, Any], **train: Any) -> Case:
    return Case(layout, options, FIVE | train, PerTokenGPT)


def test_micro_batches_count_by_their_tokens_in_every_layout(tmp_path: Path) -> None:
    """As in one micro-batch of the whole batch, over whose tokens the mean is anyway."""
    whole = Case("dp1", DENSE, {"global_batch": 5, "micro_batch": 5}, MaskedGPT)
    each_alike = Case("dp1", DENSE, FIVE, MaskedGPT)
    layouts = ["dp1", "dp3", "tp2 sp", "pp2", "pp2 dp2", "cp2", "tp2 cp2 sp"]
    cases = [whole, each_alike, *(per_token(layout, DENSE) for layout in layouts)]
    cases.append(per_token("dp2", DENSE, overlap_grad_reduce=True, overlap_param_gather=True))
    wanted, alike, *others = run_workers(train_cases, 4, tmp_path, cases)[0]
    assert apart(alike, wanted) > 1e-3, "the masks do not tell one mean from the other"
    found = {case.layout: apart(one, wanted) for case, one in zip(cases[2:], others, strict=True)}
    assert max(found.values()) < EQUAL, found


@pytest.mark.parametrize("balancing", [AUX, SEQ_AUX | BIAS], ids=["aux", "seq-bias"])
def test_auxiliary_losses_weigh_the_same_in_every_layout(
    balancing: dict[str, Any], tmp_path: Path
) -> None:
    """Three ranks that share experts compute six micro-batches, of which one counts nowhere."""
    options = model(number=6, **balancing)
    layouts = ["dp1", "dp2 ep2", "dp3 ep3", "pp2 dp2 ep2"]
    if megatron.weighs_auxiliary_losses_by_sequences():
        layouts += ["tp2 sp", "cp2 ep2", "tp2 dp2 ep2 sp"]
    cases = [per_token(layout, options) for layout in layouts]
    without = per_token("dp1", model(number=6))
    wanted, *others, other = run_workers(train_cases, 4, tmp_path, [*cases, without])[0]
    bare = [course[:2] for course in wanted]
    assert apart(other, bare) > 1e-4, "the auxiliary losses count nothing"
    found = dict(zip(layouts[1:], (apart(course, wanted) for course in others), strict=True))
    assert max(found.values()) < EQUAL, found


@pytest.mark.skipif(
    megatron.weighs_auxiliary_losses_by_sequences(), reason="this release weighs them rightly"
)
@pytest.mark.parametrize("balancing", [AUX, SEQ_AUX, {"z_loss_coeff": 0.01}])
def test_auxiliary_losses_are_refused_where_megatron_weighs_them_by_the_layout(
    balancing: dict[str, Any], device: Any
) -> None:
    recipe = recipe_of(Case("dp1", model(**balancing), recipe=PerTokenGPT), 0)
    spec = derived(recipe, "dp2 ep2", "tp2 sp", "cp2")
    assert [*spec.refused] == ["tp2 pp1 dp1 sp", "tp1 pp1 dp1 cp2"]
    assert "before 0.19 weighs them by the tokens of one rank" in spec.refused["tp1 pp1 dp1 cp2"]
    plain = recipe_of(Case("dp1", model(), recipe=PerTokenGPT), 0)
    assert not derived(plain, "tp2 sp", "cp2").refused


@pytest.mark.parametrize(
    ("recipe_class", "why"),
    [(SilentGPT, 'loss function tells no "tokens"'), (HalfGPT, r"no numbers of tokens: \[0\.5\]")],
)
def test_a_loss_function_that_does_not_tell_its_tokens_is_refused(
    recipe_class: type[PerTokenGPT], why: str, device: Any
) -> None:
    recipe = recipe_of(Case("dp1", SIZES, recipe=recipe_class), 0)
    world = build_world(recipe, device)
    with pytest.raises(PlanError, match=why):
        world.warm_up()
    world.close()
