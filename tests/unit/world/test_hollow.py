"""Memory that goes and comes, of a world made of plain tensors."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import EXP_AVG, EXP_AVG_SQ, MAIN, PARAMETER, ModelSpec, TensorSpec
from liver_hpc.world import hollow
from liver_hpc.world.untouched import Untouched

TENSORS = (
    TensorSpec("trained", (4, 4), None),
    TensorSpec("expert", (4, 4), None),
    TensorSpec("frozen", (2, 4), None, role="frozen"),
    TensorSpec("buffer", (2, 4), None, role="buffer"),
)
FP32 = ModelSpec(TENSORS, {"pp1": (((0, 1, 2, 3),),)}, parameter_bytes=4)
BF16 = replace(FP32, parameter_bytes=2)


class FakeWorld:
    """What `hollow` looks at: a buffer of each sort with one tensor in it, and padding; a frozen
    parameter and a buffer of the model beside them; optimizer state in bf16 with a main copy."""

    def __init__(self, spec: ModelSpec) -> None:
        self.recipe = SimpleNamespace(spec=spec)
        self.taken: frozenset[int] = frozenset()
        dtype = torch.float32 if spec.main_is_parameter else torch.bfloat16
        self.buffers = [
            SimpleNamespace(param_data=torch.ones(20, dtype=dtype), grad_data=torch.ones(20))
            for _ in range(2)
        ]
        dense, experts = self.buffers
        self.chunks = [SimpleNamespace(buffers=[dense], expert_parallel_buffers=[experts])]
        self.tensors = {
            index: torch.ones(2, 4, dtype=dtype) if index > 1 else self.in_buffer(index)
            for index in range(4)
        }
        self.optimizer = [self._optimizer(index) for index in range(2)]
        self.state = SimpleNamespace(memory=self.state_of)

    def state_of(self, kind: str) -> list[torch.Tensor]:
        return [each[kind] for each in self.optimizer]

    def in_buffer(self, index: int) -> torch.Tensor:
        return self.buffers[index].param_data[:16].view(4, 4)

    def _optimizer(self, index: int) -> dict[str, torch.Tensor]:
        main = self.tensors[index].view(-1)
        if not self.recipe.spec.main_is_parameter:
            main = torch.ones(16)
        return {MAIN: main, EXP_AVG: torch.ones(16), EXP_AVG_SQ: torch.ones(16)}

    def held_bytes(self) -> dict[str, int]:
        """What there is of each kind."""
        found = {
            GRADIENT: _bytes(*(buffer.grad_data for buffer in self.buffers)),
            PARAMETER: _bytes(*(buffer.param_data for buffer in self.buffers), self.tensors[2]),
            "buffer": _bytes(self.tensors[3]),
        }
        for kind in self.recipe.spec.optimizer_kinds:
            found[kind] = _bytes(*(state[kind] for state in self.optimizer))
        return found


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@pytest.fixture(params=[FP32, BF16], ids=["fp32", "bf16"])
def world(request: pytest.FixtureRequest) -> Any:
    return FakeWorld(request.param)


def test_each_kind_goes_alone_and_comes_again_gradients_as_zeros(world: Any) -> None:
    whole = world.held_bytes()
    for kind in (GRADIENT, *world.recipe.spec.kinds):
        hollow.free(world, (kind,))
        assert world.held_bytes() == whole | {kind: 0}
        hollow.free(world, (kind,))
        hollow.allocate(world, (kind,))
        assert world.held_bytes() == whole
    assert not any(buffer.grad_data.any() for buffer in world.buffers)
    assert world.tensors[3].all()


@pytest.mark.parametrize("known", [True, False])
def test_where_the_kernel_cannot_make_pages_all_is_written(
    world: Any, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """It is known by the memory itself, which has just been written to."""
    monkeypatch.setattr(torch.UntypedStorage, "resize_", lambda _storage, _bytes: None)
    monkeypatch.setattr(torch.UntypedStorage, "nbytes", lambda _storage: 0)
    monkeypatch.setattr(hollow, "populate", lambda _address, _bytes: known)
    hollow.allocate(world, (GRADIENT, *world.recipe.spec.kinds))
    assert not any(buffer.grad_data.any() for buffer in world.buffers)
    assert bool(world.tensors[0].any()) == known
    assert bool(world.optimizer[1][EXP_AVG].any()) == known


def test_who_refers_to_the_memory_sees_it_again(world: Any) -> None:
    hollow.hollow(world)
    hollow.allocate(world, world.recipe.spec.kinds)
    world.buffers[0].param_data.fill_(7.0)
    assert (world.tensors[0] == 7.0).all()
    if world.recipe.spec.main_is_parameter:
        assert (world.optimizer[0][MAIN] == 7.0).all()


def test_a_hollow_world_holds_the_models_buffers_and_what_it_has_taken_over(world: Any) -> None:
    taken = [world.buffers[0].param_data, world.optimizer[1][EXP_AVG]]
    world.taken = frozenset(tensor.untyped_storage().data_ptr() for tensor in taken)
    hollow.hollow(world)
    assert sum(world.held_bytes().values()) == _bytes(*taken, world.tensors[3])
    hollow.allocate(world, world.recipe.spec.kinds)
    assert taken[0].all()
    assert taken[1].all()


def test_memory_that_another_world_has_too_is_spared(world: Any) -> None:
    kept = world.optimizer[0][EXP_AVG]
    hollow.free(world, world.recipe.spec.kinds, {kept.untyped_storage().data_ptr()})
    assert world.held_bytes()[EXP_AVG] == _bytes(kept)
    assert kept.all()


def test_memory_that_is_there_keeps_its_values(world: Any) -> None:
    hollow.allocate(world, (GRADIENT, *world.recipe.spec.kinds))
    assert world.buffers[0].grad_data.all()
    assert world.optimizer[0][EXP_AVG_SQ].all()


def test_gradients_are_clear_only_where_none_has_kept_its_values(world: Any) -> None:
    """As where memory that was kept from another world had the size of one buffer alone."""
    dense, experts = world.buffers
    for lacking, clear in (([dense], False), ([experts], False), ([dense, experts], True)):
        for buffer in lacking:
            buffer.grad_data.untyped_storage().resize_(0)
        hollow.allocate(world, (GRADIENT,))
        assert world.gradients_are_clear is clear
        dense.grad_data.fill_(1.0)
        experts.grad_data.fill_(1.0)


def test_worlds_that_are_let_go_leave_their_memory_to_the_next_one(world: Any) -> None:
    """But what lies in none of a kind's tensors, as the model's buffers."""
    held = [buffer.param_data for buffer in world.buffers]
    spec, closed = world.recipe.spec, []
    world.close = closed.append
    with Untouched(hollow.let_go([world])):
        made = [torch.zeros(20, dtype=held[0].dtype) for _ in range(4)]
        moments = [torch.empty(16).zero_() for _ in range(6)]
    found = {tensor.data_ptr() for tensor in (*made, *moments)}
    assert {tensor.data_ptr() for tensor in held} < found
    for kind in spec.optimizer_kinds:
        assert {state[kind].untyped_storage().data_ptr() for state in world.optimizer} < found
    (spared,) = closed
    assert {tensor.data_ptr() for tensor in held} < spared
    assert world.tensors[3].data_ptr() not in spared
