"""What differs between megatron-core releases, and what megatron keeps in module globals.

It supports 0.16 (the newest for Python 3.11) and 0.19. `parallel_state` is never initialised:
groups go in as a `ProcessGroupCollection`, and what megatron still reads from globals is redirected
here. Only `world.py` and recipes import megatron beside this.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.utils import GlobalMemoryBuffer
from torch.overrides import TorchFunctionMode

from liver_hpc.layout.coordinates import Coordinate, RankMap
from liver_hpc.layout.tensors import TensorSpec
from liver_hpc.world.groups import GroupBook

_thread = threading.local()


class _ThreadMemoryBuffer(threading.local):
    """megatron's scratch buffers, one set a thread, since a world is rehearsed beside training."""

    def __init__(self) -> None:
        self._buffer = GlobalMemoryBuffer()

    def get_tensor(self, *args: Any, **kwargs: Any) -> Any:
        return self._buffer.get_tensor(*args, **kwargs)


class _RehearsalSafeTracker:
    """megatron's RNG tracker, except that a rehearsing thread leaves the generators alone.

    Two threads inside `fork` would swap the device's generator under each other's feet.
    """

    def __init__(self, tracker: Any) -> None:
        self._tracker = tracker

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tracker, name)

    def fork(self, *args: Any, **kwargs: Any) -> Any:
        if _is_rehearsing():
            return contextlib.nullcontext()
        return self._tracker.fork(*args, **kwargs)


# fmt: off
_DRAWS = frozenset({
    "normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_",
    "xavier_normal_", "xavier_uniform_", "orthogonal_", "sparse_", "random_", "bernoulli_",
    "exponential_",
})
_FACTORIES = frozenset({
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye",
    "empty_strided", "linspace",
})
# fmt: on
_ZEROS: dict[str, Callable[..., Any]] = {
    "rand": torch.zeros,
    "randn": torch.zeros,
    "rand_like": torch.zeros_like,
    "randn_like": torch.zeros_like,
}


class NoDraws(TorchFunctionMode):
    """While a recipe builds its model, whose values are filled in later: on its thread, filling a
    tensor with random numbers leaves it as it is, and one made of them is made of zeros."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        if name in _ZEROS:
            kwargs.pop("generator", None)
            return _ZEROS[name](*args, **kwargs)
        return function(*args, **kwargs)


class OnMeta(TorchFunctionMode):
    """While a model is built that only its shapes are asked of: on its thread, tensors are made on
    the meta device, whatever device is named."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(function, "__name__", "") in _FACTORIES:
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Marks this thread as one that works beside a training thread: of the random streams of this
    process, which training draws from, it touches none."""
    _thread.rehearsing = True
    try:
        yield
    finally:
        _thread.rehearsing = False


def _is_rehearsing() -> bool:
    return getattr(_thread, "rehearsing", False)


@contextlib.contextmanager
def groups_in_use(groups: ProcessGroupCollection) -> Iterator[None]:
    """Names the collection that code without a group argument means, on this thread."""
    _thread.groups = groups
    try:
        yield
    finally:
        _thread.groups = None


@contextlib.contextmanager
def lent(groups: ProcessGroupCollection) -> Iterator[None]:
    """Lends `parallel_state` the groups that `sharded_state_dict` still asks it for. Not for a
    process in which another world works at the same time."""
    mine = {"_TENSOR_MODEL_PARALLEL_GROUP": groups.tp, "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp_cp}
    before = {name: getattr(parallel_state, name) for name in mine}
    vars(parallel_state).update(mine)
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def sharding_metadata(groups: ProcessGroupCollection) -> dict[str, Any]:
    """What `sharded_state_dict` wants to be told. Each layer is a tensor of its own."""
    names = ("dp_cp_group", "dp_cp_group_gtp_remat")
    return {**dict.fromkeys(names, groups.dp_cp), "non_homogeneous_layers": True}


class _LocalDistributed:
    """torch.distributed as the optimizer's constructor sees it: a world of one.

    It gathers the keys of parameter groups over the default group, which does not exist here; all
    ranks build theirs by the same rules anyway.
    """

    @staticmethod
    def get_world_size(*_args: Any) -> int:
        return 1

    @staticmethod
    def all_gather_object(out: list[Any], value: Any, *_args: Any) -> None:
        out[0] = value

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


class _LocalTorch:
    distributed = _LocalDistributed()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_prepared = False


def prepare_process(seed: int) -> None:
    """Redirects megatron's globals; once a process, before the first model. No communication."""
    global _prepared
    if _prepared:
        return
    _prepared = True
    parallel_state._GLOBAL_MEMORY_BUFFER = _ThreadMemoryBuffer()
    importlib.import_module("megatron.core.optimizer").torch = _LocalTorch()  # type: ignore[attr-defined]
    _redirect_cross_entropy()
    seed_dropout(seed, tp_rank=0)
    megatron_random._CUDA_RNG_STATE_TRACKER = _RehearsalSafeTracker(
        megatron_random._CUDA_RNG_STATE_TRACKER
    )
    _import_optimizer_dependencies()


def _redirect_cross_entropy() -> None:
    """0.16 reads the tensor-parallel group from parallel_state; 0.17 on takes it as an argument."""
    module: Any = importlib.import_module("megatron.core.tensor_parallel.cross_entropy")
    if not hasattr(module, "get_tensor_model_parallel_group"):
        return
    module.get_tensor_model_parallel_group = lambda: _thread.groups.tp
    module.get_tensor_model_parallel_rank = lambda: _thread.groups.tp.rank()
    module.get_tensor_model_parallel_world_size = lambda: _thread.groups.tp.size()


def _import_optimizer_dependencies() -> None:
    """The first AdamW of a process imports torch._dynamo, for which nobody is to wait later."""
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])


def seed_dropout(seed: int, tp_rank: int) -> None:
    """Seeds the device's generator and megatron's tensor-parallel stream, except in a rehearsal."""
    if _is_rehearsing():
        return
    ranks = dict.fromkeys(
        ("tp_rank", "ep_rank", "etp_rank", "gtp_remat_rank", "egtp_remat_rank"), 0
    )
    accepted = inspect.signature(megatron_random.model_parallel_cuda_manual_seed).parameters
    arguments = {name: rank for name, rank in ranks.items() if name in accepted}
    arguments["tp_rank"] = tp_rank
    megatron_random.model_parallel_cuda_manual_seed(seed, **arguments)


def mark_tensor_parallel(parameter: torch.nn.Parameter, tensor: TensorSpec) -> None:
    """Sets the tensor-parallel attributes of a parameter that is split, whatever its layer.

    0.16 leaves them unset with `perform_initialization=False`, and the gradient norm is then
    silently wrong: tensor-parallel shards count as replicas.
    """
    if tensor.tp_dim is not None and not getattr(parameter, "tensor_model_parallel", False):
        marked: Any = parameter
        marked.tensor_model_parallel = True
        marked.partition_dim, marked.partition_stride = tensor.tp_dim, 1


def complete_for_schedules(module: Any) -> None:
    """Gives a plain module what Megatron's schedules look for, and use with pipelines only."""
    if not hasattr(module, "set_input_tensor"):
        module.set_input_tensor = lambda _tensor: None
    if not hasattr(module, "model_type"):
        module.model_type = ModelType.encoder_or_decoder


def group_collection(rank_map: RankMap, worker: int, book: GroupBook) -> ProcessGroupCollection:
    """Megatron's groups for one worker of a rank map, taken from `book`. No communication."""
    layout = rank_map.layout
    at = rank_map.coordinate_of(worker)
    assert at is not None, f"worker {worker} is not in {rank_map}"
    tps, pps, dps = range(layout.tp), range(layout.pp), range(layout.dp)

    def group(*coordinates: Coordinate) -> Any:
        return book.group(rank_map.worker_at(c) for c in coordinates).process_group

    here = group(at)
    tp = group(*(Coordinate(t, at.pp, at.dp) for t in tps))
    dp = group(*(Coordinate(at.tp, at.pp, d) for d in dps))
    model_parallel = group(*(Coordinate(t, p, at.dp) for p in pps for t in tps))
    ends = sorted({0, layout.pp - 1})
    on_end, on_first = at.pp in ends, at.pp == 0
    members: dict[str, Any] = {
        "tp": tp,
        "pp": group(*(Coordinate(at.tp, p, at.dp) for p in pps)),
        "dp": dp,
        "mp": model_parallel,
        "embd": group(*(Coordinate(at.tp, p, at.dp) for p in ends)) if on_end else None,
        "pos_embd": here if on_first else None,
        "tp_dp_cp": group(*(Coordinate(t, at.pp, d) for d in dps for t in tps)),
        "intra_dist_opt": group(*layout.coordinates()),
        "hcp": None,
        "inter_dist_opt": None,
    }
    members |= dict.fromkeys(("cp", "ep", "gtp_remat", "expt_gtp_remat"), here)
    members |= dict.fromkeys(("tp_cp", "expt_tp", "tp_ep"), tp)
    members |= dict.fromkeys(
        ("dp_cp", "expt_dp", "intra_dp_cp", "intra_expt_dp", "dp_cp_gtp_remat",
         "expt_dp_gtp_remat"), dp,
    )  # fmt: skip
    members |= dict.fromkeys(("tp_ep_pp", "tp_ep_pp_with_egtp_remat"), model_parallel)
    known = {field.name for field in dataclasses.fields(ProcessGroupCollection)}
    collection = ProcessGroupCollection()
    for name, value in members.items():
        if name in known:
            setattr(collection, name, value)
    return collection
