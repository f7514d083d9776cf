"""The CPU stand-in for torch.cuda: lets megatron-core train where no CUDA device exists.

Megatron-core asks for `torch.cuda.current_device()`, builds tensors on "cuda", tests tensor type
names and opens streams. `install()` answers all of these with the CPU. `open_device` calls it where
`torch.cuda.is_available()` is false, before megatron is imported; nothing else knows of it.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from liver_hpc.recipes.cpu_modules import import_only_triton, put_identity_dynamo

CPU = torch.device("cpu")
_GATHER_TAG = 7

# fmt: off
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "eye",
    "zeros_like", "ones_like", "empty_like", "full_like", "as_tensor", "linspace", "empty_strided",
)
# fmt: on


def _names_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return type(device) is int


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor factory that takes a CUDA device to mean the CPU, and pins nothing."""

    def build(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    build.__name__ = getattr(factory, "__name__", "build")
    build.__wrapped__ = factory  # type: ignore[attr-defined]
    return build


class _Stream:
    """torch.cuda.Stream and Event in one: everything has already happened."""

    device = CPU
    cuda_stream = 0

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_args, **_kwargs: None

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_exc: object) -> None:
        return None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def query(self) -> bool:
        return True

    def elapsed_time(self, *_args: Any) -> float:
        return 0.0


def _redirect_tensors() -> None:
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    tensor_class: Any = torch.Tensor
    plain_to, plain_type = tensor_class.to, tensor_class.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        where = tuple(CPU if type(a) is not int and _names_cuda(a) else a for a in args)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return plain_to(self, *where, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer sorts parameters by names such as 'torch.cuda.FloatTensor'. Under a
        # TorchFunctionMode torch calls this once more from within.
        result = plain_type(self, *args, **kwargs)
        if not args and not kwargs and isinstance(result, str):
            return f"torch.cuda.{result.removeprefix('torch.').removeprefix('cuda.')}"
        return result

    def same(self: Any, *_args: Any, **_kwargs: Any) -> Any:
        return self

    tensor_class.to, tensor_class.type = to, type_
    tensor_class.cuda = tensor_class.pin_memory = same
    tensor_class.record_stream = lambda *_args, **_kwargs: None
    module_class: Any = torch.nn.Module
    module_class.cuda = same


def _redirect_cuda_module() -> None:
    cuda: Any = torch.cuda
    cuda.current_device = lambda: CPU
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *_a, **_k: None
    cuda._lazy_init = lambda: None
    cuda._lazy_call = lambda function, **_k: function()
    cuda.device_count = lambda: 0
    cuda.Stream = cuda.Event = _Stream
    cuda.current_stream = cuda.default_stream = lambda *_a, **_k: _Stream()
    cuda.stream = lambda _stream=None: contextlib.nullcontext()
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *_a, **_k: 0

    def manual_seed(seed: int) -> None:
        torch.manual_seed(seed)

    # The CPU's generator stands for the device's.
    cuda.manual_seed = manual_seed
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_a, **_k: torch.get_rng_state()
    cuda.set_rng_state = cuda.random.set_rng_state = lambda state, *_a, **_k: torch.set_rng_state(
        state
    )


def _gather_in_place(plain: Callable[..., Any]) -> Callable[..., Any]:
    """all_gather_into_tensor whose input is this rank's part of the output, as megatron's is.

    gloo's own gathers into a buffer and copies; here every part crosses once and lies where it
    belongs.
    """

    def gather(output: Any, part: Any, group: Any = None, async_op: bool = False) -> Any:
        if async_op or group is None or not _is_own_part(part, output, group):
            return plain(output, part, group=group, async_op=async_op)
        rank, parts = group.rank(), output.view(group.size(), -1)
        others = [peer for peer in range(group.size()) if peer != rank]
        works = [group.recv([parts[peer]], peer, _GATHER_TAG) for peer in others]
        works += [group.send([parts[rank]], peer, _GATHER_TAG) for peer in others]
        for work in works:
            work.wait()
        return None

    return gather


def _reduce_in_place(plain: Callable[..., Any]) -> Callable[..., Any]:
    """reduce_scatter_tensor whose output is this rank's part of the input, as megatron's is.

    gloo's own reduces a copy of the input; of this input nobody reads the other parts afterwards.
    """

    def reduce(
        part: Any,
        whole: Any,
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if async_op or group is None or not _is_own_part(part, whole, group):
            return plain(part, whole, op=op, group=group, async_op=async_op)
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce([whole], options).wait()
        return None

    return reduce


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


def _import_megatron() -> None:
    with import_only_triton():
        importlib.import_module("megatron.core.models.gpt.gpt_model")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    import megatron.core.tensor_parallel.random as random

    # These two reach for torch.cuda.default_generators.
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )


_installed = False


def install() -> None:
    """Redirects torch.cuda and megatron's uses of it to the CPU; idempotent."""
    global _installed
    if _installed:
        return
    _installed = True
    put_identity_dynamo()
    _redirect_cuda_module()
    _redirect_tensors()
    torch_distributed: Any = dist
    torch_distributed.all_gather_into_tensor = _gather_in_place(dist.all_gather_into_tensor)
    torch_distributed.reduce_scatter_tensor = _reduce_in_place(dist.reduce_scatter_tensor)
    torch.optim.AdamW = _FusedAdamW  # type: ignore[misc]
    _import_megatron()  # which keeps the functions that it finds
