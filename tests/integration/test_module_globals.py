"""Megatron's module globals, per world: what the redirection leans on, and what it gives."""

from __future__ import annotations

import importlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap

pytestmark = pytest.mark.usefixtures("device")  # before megatron is imported

LEFT_NONE = {
    "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
    "_HYBRID_DP_CP_GROUPS",
    "_DATA_PARALLEL_GROUP_WITH_CP_AG",
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
}
"""Groups that no world of ours has: of options that are refused."""


@pytest.fixture
def worlds() -> Iterator[Callable[[Layout, int], Any]]:
    """Groups of a seat of a layout, behind stand-ins."""
    from liver_hpc.world.device import Device
    from liver_hpc.world.groups import GroupBook, install_sentinel
    from liver_hpc.world.megatron import group_collection

    books: list[GroupBook] = []

    def groups(layout: Layout, rank: int) -> Any:
        install_sentinel(rank)
        book = GroupBook(-1000 - len(books), rank, Device(torch.device("cpu")))
        books.append(book)
        rank_map = RankMap(layout, tuple(range(layout.workers)))
        return group_collection(rank_map, layout.coordinate(rank), book)

    yield groups
    for book in books:
        book.close()


@pytest.mark.parametrize(
    "name", ["parallel_state", "num_microbatches_calculator", "rerun_state_machine"]
)
def test_all_functions_of_the_installed_release_can_be_redirected(name: str) -> None:
    from liver_hpc.world import module_globals

    module = importlib.import_module(f"megatron.core.{name}")
    module_globals.answer_per_world(module)

    mine = [
        value
        for value in vars(module).values()
        if isinstance(value, types.FunctionType) and value.__module__ == module.__name__
    ]
    assert len(mine) >= 5
    assert all(function.__code__.co_names[0].startswith("__function") for function in mine)


def test_a_function_that_a_decorator_holds_is_named() -> None:
    from liver_hpc.world import module_globals

    def decorated(function: Any) -> Any:
        def within() -> Any:
            return function()

        return within

    module = types.ModuleType("a_module_of_a_later_release")
    held = decorated(lambda: 1)
    held.__module__ = module.__name__
    vars(module)["get_state"] = held
    with pytest.raises(LiverError, match="get_state is decorated"):
        module_globals.answer_per_world(module)


def test_the_tables_have_every_group_of_the_installed_release(
    worlds: Callable[[Layout, int], Any],
) -> None:
    from megatron.core import parallel_state

    from liver_hpc.world import module_globals
    from liver_hpc.world import parallel_state as ours

    groups = {
        name
        for name in vars(parallel_state)
        if name.startswith("_") and "_GROUP" in name and not name.endswith("_GLOO")
    }
    assert groups - ours._GROUPS.keys() <= LEFT_NONE
    ranks = {name for name in vars(parallel_state) if name.endswith(("_RANKS", "_RANKS_WITH_CP"))}
    assert ranks <= ours._RANKS.keys()

    given = module_globals.namespace_of(worlds(Layout(2, 2, 2, ep=2), 0), parallel_state)
    assert {name for name in groups | ranks if given[name] is None} <= LEFT_NONE


def test_each_world_is_answered_for_itself(worlds: Callable[[Layout, int], Any]) -> None:
    from megatron.core import parallel_state
    from megatron.core.parallel_state import (  # by name, as Megatron's modules have it
        get_tensor_model_parallel_rank,
        get_virtual_pipeline_model_parallel_rank,
        set_virtual_pipeline_model_parallel_rank,
    )

    from liver_hpc.world import thread

    one, other = worlds(Layout(4, 1, 1), 3), worlds(Layout(1, 2, 2, vpp=2), 3)

    with thread.groups_in_use(one):
        assert get_tensor_model_parallel_rank() == 3
        assert parallel_state.get_tensor_model_parallel_src_rank() == 0
        assert parallel_state.is_pipeline_last_stage()
        assert get_virtual_pipeline_model_parallel_rank() is None
    with thread.groups_in_use(other):
        assert get_tensor_model_parallel_rank() == 0
        assert parallel_state.get_data_parallel_group() is other.dp
        assert not parallel_state.is_pipeline_first_stage(ignore_virtual=True)
        set_virtual_pipeline_model_parallel_rank(1)
        assert get_virtual_pipeline_model_parallel_rank() == 1
    with thread.groups_in_use(one):
        assert get_virtual_pipeline_model_parallel_rank() is None
    assert not parallel_state.model_parallel_is_initialized()  # on a thread without a world


def test_two_threads_at_once_and_the_thread_that_computes_gradients(
    worlds: Callable[[Layout, int], Any],
) -> None:
    from megatron.core.parallel_state import get_tensor_model_parallel_rank

    from liver_hpc.world import thread

    seats = {"one": worlds(Layout(4, 1, 1), 3), "other": worlds(Layout(1, 1, 4), 3)}
    together, wrong = threading.Barrier(2), list[str]()

    class Asked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * get_tensor_model_parallel_rank()

    def compute(name: str, wanted: int) -> None:
        for _ in range(200):
            with thread.groups_in_use(seats[name]):
                together.wait(30)
                value = torch.ones(1, requires_grad=True)
                output = Asked.apply(value)
                thread.recall_in_backward(output)
                if get_tensor_model_parallel_rank() != wanted:
                    wrong.append(f"{name}: forward")
            # Without a world of its own, as the thread of a GPU's gradients.
            alone = threading.Thread(target=lambda done=output: done.backward())
            alone.start()
            alone.join(30)
            if value.grad is None or value.grad.item() != wanted:
                wrong.append(f"{name}: {value.grad}")

    threads = [threading.Thread(target=compute, args=pair) for pair in (("one", 3), ("other", 0))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert not wrong
    assert not any(each.is_alive() for each in threads)


def test_nothing_is_kept_of_a_world_that_is_forgotten(
    worlds: Callable[[Layout, int], Any],
) -> None:
    from liver_hpc.world import module_globals

    groups = worlds(Layout(2, 1, 1), 1)
    module_globals.forget(groups)
    assert not any(isinstance(value, dict) for value in vars(groups).values())
