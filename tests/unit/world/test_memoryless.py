"""Tensors that have no memory yet."""

from __future__ import annotations

import threading

import pytest
import torch

from liver_hpc.errors import PlanError
from liver_hpc.world.memoryless import Memoryless, has_none, parameters


def fill(tensor: torch.Tensor) -> None:
    """Gives a tensor's storage memory, as `hollow.allocate` does."""
    elements = tensor.storage_offset() + tensor.numel()
    tensor.untyped_storage().resize_(elements * tensor.element_size())


def test_views_lie_where_they_would_once_there_is_memory() -> None:
    with Memoryless():
        buffer = torch.zeros(64)
        view = buffer[16:48].view(4, 8)
        column = view.t()[2]
        first, second = view.split(2)
        assert all(map(has_none, (buffer, view, column, first, second)))
    assert buffer.untyped_storage().nbytes() == 0
    fill(buffer)
    buffer.copy_(torch.arange(64.0))
    assert view.tolist() == torch.arange(16.0, 48.0).view(4, 8).tolist()
    assert column.tolist() == [18.0, 26.0, 34.0, 42.0]
    assert second[1, 7] == 47.0
    assert first.untyped_storage().data_ptr() == buffer.data_ptr()


def test_what_is_computed_of_them_has_none_and_lies_apart() -> None:
    with Memoryless():
        low = torch.zeros(6, dtype=torch.bfloat16)
        main = low.clone().detach().float()
        moment = torch.empty_like(main).zero_()
        joined = torch.cat([main, torch.ones(2)])
        main.copy_(torch.ones(6))
        moment.fill_(3.0)
    assert [each.dtype for each in (main, moment)] == [torch.float32] * 2
    assert joined.shape == (8,)
    assert all(map(has_none, (low, main, moment, joined)))
    fill(main)
    assert has_none(low)
    assert has_none(moment)
    main.fill_(2.0)
    assert main.tolist() == [2.0] * 6


def test_what_has_memory_is_what_it_is() -> None:
    before = torch.ones(4)
    with Memoryless():
        copied = before.clone().mul_(2.0)
    assert copied.tolist() == [2.0] * 4


def test_nothing_is_written_from_one_to_memory_that_there_is() -> None:
    there = torch.ones(4)
    with Memoryless():
        none = torch.zeros(4)
        with pytest.raises(PlanError, match=r"copy_\.default writes what has no memory yet"):
            there.copy_(none)
    assert there.tolist() == [1.0] * 4


def test_parameters_give_their_memory_up_and_all_else_stays() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 3)
            self.tied = self.inner.weight
            self.norm = torch.nn.BatchNorm1d(3)
            self.register_buffer("scale", torch.arange(1.0, 4.0))
            self.frozen = torch.nn.Parameter(torch.ones(3, 2).t(), requires_grad=False)

    with parameters():
        model = Model()
        low = model.bfloat16()
    assert low is model
    assert model.tied is model.inner.weight
    for parameter in model.parameters():
        assert has_none(parameter)
        assert parameter.dtype is torch.bfloat16
    assert (model.frozen.shape, model.frozen.requires_grad) == ((2, 3), False)
    assert model.scale.tolist() == [1.0, 2.0, 3.0]
    assert model.norm.running_var.tolist() == [1.0] * 3
    assert not has_none(torch.nn.Linear(2, 2).weight)


def test_another_thread_trains_meanwhile() -> None:
    found: list[float] = []

    def train() -> None:
        layer = torch.nn.Linear(8, 1, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        found.append(layer(torch.zeros(8).add_(torch.ones(8))).item())

    with parameters(), Memoryless():
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert found == [8.0]


def test_they_end_with_an_error_too() -> None:
    with pytest.raises(ValueError, match="of the caller"), parameters(), Memoryless():
        raise ValueError("of the caller")
    assert not has_none(torch.zeros(8))
    assert not has_none(torch.nn.Linear(2, 2).weight)
