"""Models that only their shapes are asked of."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch

from liver_hpc.errors import PlanError
from liver_hpc.world.draws import NoDraws, OnMeta, OwnGenerators, is_undrawn


@pytest.mark.parametrize(
    "move",
    [
        lambda tensor: tensor.to("cuda:0"),
        lambda tensor: tensor.to(torch.device("cpu"), torch.bfloat16),
        lambda tensor: tensor.to(device="cuda", dtype=torch.bfloat16),
        lambda tensor: tensor.to(torch.bfloat16),
        lambda tensor: tensor.cuda(),
        lambda tensor: tensor.cpu(),
    ],
)
def test_what_is_on_the_meta_device_stays_there_whatever_device_is_named(move: object) -> None:
    assert callable(move)
    with OnMeta():
        moved = move(torch.zeros(2, 3))
    assert moved.is_meta
    assert moved.shape == (2, 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.hann_window(8),
        lambda: torch.logspace(0, 1, 8),
        lambda: torch.fft.fftfreq(8, device="cpu"),
        lambda: torch.as_tensor([1.0] * 8),
        lambda: torch.tril_indices(2, 2).flatten().repeat(2)[:8],
        lambda: torch.arange(8, out=torch.empty(8)),
    ],
)
def test_whatever_makes_a_tensor_makes_it_on_the_meta_device(make: object) -> None:
    assert callable(make)
    with OnMeta():
        assert (make() * torch.ones(8)).is_meta


def test_numbers_of_a_series_can_be_read_until_they_are_changed() -> None:
    with OnMeta():
        series = torch.linspace(0, 1, 3)
        assert series.tolist() == [each.item() for each in series] == [0.0, 0.5, 1.0]
        series[1] = 2.0
        with pytest.raises(NotImplementedError):
            series.tolist()
        with pytest.raises(NotImplementedError):
            torch.arange(10**9).tolist()


@pytest.mark.parametrize(
    "normal",
    [
        lambda: torch.normal(0.0, 1.0, (2, 3)),
        lambda: torch.normal(0.0, 1.0, size=(2, 3), dtype=torch.float32),
        lambda: torch.normal(torch.zeros(2, 3), torch.ones(3)),
        lambda: torch.empty(2, 3).log_normal_(),
    ],
)
def test_no_numbers_are_drawn_as_a_model_is_built(normal: object) -> None:
    assert callable(normal)
    before = torch.get_rng_state()
    with NoDraws() as draws:
        made = normal()
    assert made.shape == (2, 3)
    assert made.isnan().all()
    assert draws.undrawn
    with OnMeta():
        assert normal().is_meta
    assert torch.equal(torch.get_rng_state(), before)
    with NoDraws(), pytest.raises(PlanError, match=r"torch\.poisson"):
        torch.poisson(torch.ones(3))


def _set(tensor: torch.Tensor, index: object, value: object) -> torch.Tensor:
    tensor[index] = value  # type: ignore[index]
    return tensor


def _row(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    tensor[0].copy_(values)
    return tensor


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(4) < 0.5,
        lambda: torch.rand(4).argsort(),
        lambda: torch.rand(4).topk(2).indices,
        lambda: torch.arange(4)[torch.rand(4).argsort()],
        lambda: torch.cat([torch.ones(4), torch.randn(4).sign()]),
        lambda: (torch.randn(4) > 0).float() * 2 - 1,
        lambda: torch.where(torch.rand(4) < 0.5, torch.ones(4), torch.zeros(4)),
        lambda: torch.zeros(4, dtype=torch.long).random_(8),
        lambda: _set(torch.zeros(4, 4), (slice(None), 0), torch.rand(4) < 0.5),
        lambda: _row(torch.zeros(4, 4), torch.rand(4) < 0.5),
        lambda: copy.deepcopy(torch.rand(4) < 0.5),
    ],
)
def test_what_is_computed_of_what_was_not_drawn_is_known(make: object, on_meta: bool) -> None:
    assert callable(make)
    with OnMeta() if on_meta else nullcontext(), NoDraws() as draws:
        assert is_undrawn(make())
    assert draws.undrawn


def test_what_is_not_of_a_draw_is_not_taken_for_it() -> None:
    own = torch.Generator().manual_seed(5)
    with NoDraws():
        drawn, weight = torch.randn(4), torch.nn.Parameter(torch.empty(4).normal_())
        for each in (
            weight * 2.0,
            torch.zeros_like(drawn),
            drawn.new_zeros(4),
            torch.ones(1).expand_as(drawn),
            torch.randn(4).normal_(generator=own),
            torch.randn(4).copy_(torch.ones(4)),
            torch.rand(4, generator=own) < 0.5,
        ):
            assert not is_undrawn(each)


@pytest.mark.parametrize(
    "draw",
    [
        lambda own: own.draw(torch.rand, (2, 3), {}),
        lambda own: own.draw(torch.randn_like, (torch.ones(2, 3),), {"dtype": torch.float64}),
        lambda own: own.draw(torch.randint_like, (torch.ones(2, 3), 1, 5), {}),
        lambda own: own.draw(torch.bernoulli, (torch.full((2, 3), 0.5),), {}),
        lambda own: own.draw(torch.normal, (0.0, 1.0), {"size": (2, 3), "device": "cpu"}),
        lambda own: own.draw(torch.Tensor.bernoulli_, (torch.ones(2, 3), 0.5), {}),
    ],
)
def test_what_is_drawn_from_own_generators_leaves_the_process_s_alone(draw: object) -> None:
    assert callable(draw)
    before = torch.get_rng_state()
    assert draw(OwnGenerators()).shape == (2, 3)
    assert torch.equal(torch.get_rng_state(), before)
