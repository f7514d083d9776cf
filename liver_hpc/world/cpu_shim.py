"""The CPU stand-in for torch.cuda: lets megatron-core train where no CUDA device exists.

Megatron-core asks for `torch.cuda.current_device()`, builds tensors on "cuda", tests tensor type
names, opens streams, and imports triton. `install()` answers all of these with the CPU.
`open_device` calls it where `torch.cuda.is_available()` is false, before megatron is imported;
nothing else knows of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
DYNAMO = "torch._dynamo"
_SUM = dist.ReduceOp.SUM
_GATHER_TAG = 7

# fmt: off
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye",
    "zeros_like", "ones_like", "empty_like", "full_like", "as_tensor", "linspace", "empty_strided",
)
# fmt: on


def _on_cpu(device: Any) -> Any:
    """The CPU for what names a CUDA device: "cuda:0", torch.device("cuda"), 0; else as it is."""
    named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return CPU if named or type(device) is int else device


def _building_on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that takes a CUDA device to mean the CPU, and pins nothing."""

    def build(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return factory(*args, **kwargs)

    build.__name__ = factory.__name__
    return build


def _same(self: Any, *_args: Any, **_kwargs: Any) -> Any:
    return self


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    pass


class _Stream:
    """torch.cuda.Stream and Event in one: everything has already happened."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., bool]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: True

    record_event = _same


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _building_on_cpu(getattr(torch, name)))

    tensor_class: Any = torch.Tensor
    plain_to, plain_type = tensor_class.to, tensor_class.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return plain_to(self, *map(_on_cpu, args), **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer sorts parameters by names such as 'torch.cuda.FloatTensor'. Under a
        # TorchFunctionMode torch calls this once more from within.
        result = plain_type(self, *args, **kwargs)
        if not args and not kwargs and isinstance(result, str):
            return f"torch.cuda.{result.removeprefix('torch.').removeprefix('cuda.')}"
        return result

    tensor_class.to, tensor_class.type = to, type_
    tensor_class.cuda = tensor_class.pin_memory = _same
    tensor_class.record_stream = _nothing
    module_class: Any = torch.nn.Module
    module_class.cuda = _same


def _rng_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    """The CPU's generator stands for the device's."""
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(state)


def _redirect_cuda_module() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = _nothing
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = _Stream
    cuda.stream = lambda _stream=None: contextlib.nullcontext()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *_a, **_k: 0
    # torch.manual_seed calls manual_seed_all, which would keep a traceback for when CUDA begins.
    cuda.manual_seed, cuda.manual_seed_all = torch.manual_seed, _nothing
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = _rng_state, _set_rng_state


def _gather_in_place(
    plain: Any, output: Any, part: Any, group: Any = None, async_op: bool = False
) -> Any:
    """all_gather_into_tensor whose input is this rank's part of the output, as megatron's is.

    gloo's own gathers into a buffer and copies; here every part crosses once and lies where it
    belongs.
    """
    if async_op or group is None or not _is_own_part(part, output, group):
        return plain(output, part, group=group, async_op=async_op)
    return _send_around(output.view(group.size(), -1), group)


def _reduce_in_place(
    plain: Any, part: Any, whole: Any, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """reduce_scatter_tensor whose output is this rank's part of the input, as megatron's is.

    gloo's own reduces a copy of the input; of this input nobody reads the other parts afterwards.
    """
    if async_op or group is None or not _is_own_part(part, whole, group):
        return plain(part, whole, op=op, group=group, async_op=async_op)
    options = dist.AllreduceOptions()
    options.reduceOp = op
    group.allreduce([whole], options).wait()  # dist.all_reduce would copy it where torch coalesces
    return None


def _gather_unevenly(
    plain: Any, outputs: Any, part: Any, group: Any = None, async_op: bool = False
) -> Any:
    """all_gather of parts that differ in size, which gloo refuses: each crosses once."""
    if group is None or len({output.shape for output in outputs}) == 1:
        return plain(outputs, part, group=group, async_op=async_op)
    outputs[group.rank()].copy_(part)
    return _send_around(outputs, group)


def _send_around(parts: Sequence[torch.Tensor], group: Any) -> None:
    """Gives all members the parts of all, of which each has its own."""
    own = group.rank()
    others = [peer for peer in range(group.size()) if peer != own]
    works = [group.recv([parts[peer]], peer, _GATHER_TAG) for peer in others if parts[peer].numel()]
    works += [group.send([parts[own]], peer, _GATHER_TAG) for peer in others if parts[own].numel()]
    for work in works:
        work.wait()


def _reduce_unevenly(
    plain: Any, part: Any, parts: Any, op: Any = _SUM, group: Any = None, async_op: bool = False
) -> Any:
    """reduce_scatter of parts that differ in size, which gloo refuses."""
    if group is None or len({each.shape for each in parts}) == 1:
        return plain(part, parts, op=op, group=group, async_op=async_op)
    whole = torch.cat(list(parts))
    dist.all_reduce(whole, op=op, group=group)
    part.copy_(torch.split(whole, [len(each) for each in parts])[group.rank()])
    return None


def _is_own_part(part: torch.Tensor, whole: torch.Tensor, group: Any) -> bool:
    offset_bytes = group.rank() * part.numel() * part.element_size()
    return (
        part.data_ptr() == whole.data_ptr() + offset_bytes
        and part.numel() * group.size() == whole.numel()
        and part.is_contiguous()
        and whole.is_contiguous()
    )


class _FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, fused unless told otherwise: one pass over memory in place of a dozen.

    It is what megatron takes where Transformer Engine's fused Adam is missing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        if not options.keys() & {"foreach", "differentiable"}:
            options.setdefault("fused", True)
        super().__init__(*args, **options)


def _put_identity_dynamo() -> None:
    """torch.compile as the identity: no dynamo, no C++ compilation for `jit_fuser` functions.

    Importing dynamo takes a seventh of a worker's boot and lists torch.cuda's functions. The first
    optimizer imports it only to ask whether anything is being compiled; some of torch's utilities
    do so for its settings, which are the real ones here.
    """
    torch_module: Any = torch
    torch_module.compile = _unchanged
    if DYNAMO in sys.modules:
        return
    dynamo: Any = types.ModuleType(DYNAMO, "Stands for dynamo: compiles nothing.")
    dynamo.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]  # where its submodules are
    dynamo.disable = dynamo.allow_in_graph = dynamo.assume_constant_result = _unchanged
    dynamo.graph_break = dynamo.reset = _nothing
    dynamo.trace_rules = types.ModuleType(f"{DYNAMO}.trace_rules")
    dynamo.trace_rules.clear_lru_cache = _nothing

    def submodule(name: str) -> types.ModuleType:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return importlib.import_module(f"{DYNAMO}.{name}")
        except ImportError as error:
            raise AttributeError(
                f"{DYNAMO}, for which nothing stands on a CPU, has no {name}: {error}"
            ) from error

    dynamo.__getattr__ = submodule
    sys.modules[DYNAMO] = torch_module._dynamo = dynamo
    sys.modules[dynamo.trace_rules.__name__] = dynamo.trace_rules


def _unchanged(function: Any = None, *_args: Any, **_kwargs: Any) -> Any:
    """A decorator, with or without arguments, that decorates nothing."""
    return (lambda decorated: decorated) if function is None else function


@contextlib.contextmanager
def import_only_triton() -> Iterator[None]:
    """Stands for triton, which megatron-core >= 0.17 imports always and never calls on a CPU.

    It is taken away afterwards: torch, and dynamo above all, must not believe that triton is here.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    _put_identity_dynamo()
    triton = MagicMock(__spec__=ModuleSpec("triton", None), __path__=[], __version__="0.0")
    sys.modules["triton"] = triton
    sys.modules["triton.language"] = triton.language
    try:
        yield
    finally:
        for name in [n for n in [*sys.modules] if n.split(".")[0] == "triton"]:
            del sys.modules[name]


def _import_megatron() -> None:
    with import_only_triton():
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    import megatron.core.tensor_parallel.random as random
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_cpu(tensor: Any, as_numpy: bool = False, **_options: Any) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    # This one converts what lies on CUDA only.
    token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    # These two reach for torch.cuda.default_generators.
    random._get_cuda_rng_state, random._set_cuda_rng_state = _rng_state, _set_rng_state


@cache
def install() -> None:
    """Redirects torch.cuda and megatron's uses of it to the CPU; once a process, and in those that
    it forks."""
    _put_identity_dynamo()
    _redirect_cuda_module()
    _redirect_tensors()
    torch_distributed: Any = dist
    torch_distributed.all_gather_into_tensor = partial(
        _gather_in_place, dist.all_gather_into_tensor
    )
    torch_distributed.reduce_scatter_tensor = partial(_reduce_in_place, dist.reduce_scatter_tensor)
    torch_distributed.all_gather = partial(_gather_unevenly, dist.all_gather)
    torch_distributed.reduce_scatter = partial(_reduce_unevenly, dist.reduce_scatter)
    torch.optim.AdamW = _FusedAdamW  # type: ignore[misc]
    _import_megatron()  # which keeps the functions that it finds
