"""What a recipe tells beside its loss, and what it comes to."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch

from liver_hpc.errors import PlanError
from liver_hpc.world.metrics import in_order, kept, means, of_forward, of_micro_batch, summed
from tests.fakes import TinyRecipe


def test_means_weigh_as_the_loss_does_and_sums_by_what_they_are_over() -> None:
    told = [
        {"loss": torch.tensor(9.0), "a": torch.tensor(1.0), "b": torch.tensor([6.0, 4.0])},
        {"loss": torch.tensor(9.0), "a": torch.tensor(4.0), "b": torch.tensor([9.0, 1.0])},
    ]
    sums = summed(told, [1.0, 2.0], counted=True)
    assert sums == {"a": (9.0, 3.0), "b": (15.0, 5.0)}
    assert means(["a", "b", "c"], in_order(sums, ["a", "b", "c"])) == {"a": 3.0, "b": 3.0}


def test_a_share_of_a_sequence_counts_what_a_mean_is_over_once() -> None:
    told = [{"a": torch.tensor(1.0), "b": torch.tensor([6.0, 4.0])}]
    assert summed(told, [8.0], counted=False) == {"a": (8.0, 0.0), "b": (6.0, 4.0)}


def test_what_is_not_finite_is_told_as_it_is() -> None:
    sums = summed([{"a": torch.tensor(math.nan)}], [1.0], counted=True)
    assert math.isnan(means(["a"], in_order(sums, ["a"]))["a"])


def test_neither_a_mean_nor_a_sum_is_refused_by_name() -> None:
    with pytest.raises(PlanError, match=r"metric .a. of the recipe: wanted a mean, .* got 3"):
        summed([{"a": torch.ones(3)}], [1.0], counted=True)


def test_a_view_of_the_loss_stays_what_it_was() -> None:
    loss = torch.tensor([2.0])
    told = kept({"loss": loss, "view": loss.view(1), "number": 3.0})  # type: ignore[dict-item]
    loss.mul_(5)
    assert {name: float(value) for name, value in told.items()} == {
        "loss": 2.0,
        "view": 2.0,
        "number": 3.0,
    }


ONE, TWO = torch.tensor(1.0), torch.ones(2)


def test_what_loss_gives_wrongly_is_refused_with_what_is_wanted() -> None:
    """As in a plain loop of torch's, or in Megatron's scripts."""
    recipe = object.__new__(TinyRecipe)
    wanted = r", wanted of loss \(output tensor, .*, and of that function \(mean loss, \{.loss.: "
    forwards: list[tuple[Any, str]] = [
        (ONE, "a tensor of shape []"),
        (None, "NoneType"),
        ((ONE,), "(a tensor"),
        (((ONE, TWO), abs), "((a tensor of shape [], a tensor of shape [2]), builtin"),
    ]
    for given, said in forwards:
        with pytest.raises(PlanError, match=rf"TinyRecipe: loss gave {re.escape(said)}.*{wanted}"):
            of_forward(recipe, given)
    wrong = [
        (ONE, "a tensor of shape []"),
        (TWO, "a tensor of shape [2]"),
        ((ONE, ONE), "(a tensor of shape [], a tensor of shape [])"),
        ((1.0, {"loss": ONE}), "(float, {'loss': a tensor of shape []})"),
        ((ONE, {"lm loss": ONE}), "(a tensor of shape [], {'lm loss': a tensor of shape []})"),
        ((TWO, {"loss": ONE}), "(a tensor of shape [2], {'loss': a tensor of shape []})"),
        ((ONE, {"loss": TWO}), "(a tensor of shape [], {'loss': a tensor of shape [2]})"),
    ]
    for given, said in wrong:
        told = rf"TinyRecipe: the function that loss gives gave {re.escape(said)}{wanted}"
        with pytest.raises(PlanError, match=told):
            of_micro_batch(recipe, given)


def test_what_loss_gives_rightly_is_taken_as_it_is() -> None:
    recipe = object.__new__(TinyRecipe)
    assert of_forward(recipe, (ONE, None)) == (ONE, None)  # of a stage that is not the last
    for given in ((ONE, {"loss": 1.0}), (ONE.view(1), {"loss": ONE, "tokens": TWO})):
        assert of_micro_batch(recipe, given) == given
