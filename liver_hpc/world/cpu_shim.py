"""The CPU stand-in for torch.cuda: lets megatron-core train where no CUDA device exists.

Megatron-core asks for `torch.cuda.current_device()`, builds tensors on "cuda", tests tensor type
names and opens streams. `install()` answers all of these with the CPU. It is called only where
`torch.cuda.is_available()` is false, before megatron is imported; nothing else in the package
knows that it exists.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

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
        # Megatron's optimizer sorts parameters by names such as 'torch.cuda.FloatTensor'.
        result = plain_type(self, *args, **kwargs)
        if not args and not kwargs and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
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


def _identity_compile() -> None:
    """torch.compile as the identity: no dynamo, no C++ compilation for `jit_fuser` functions."""

    def compile_(model: Any = None, **_kwargs: Any) -> Any:
        return model if model is not None else (lambda function: function)

    torch_module: Any = torch
    torch_module.compile = compile_


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


def _redirect_collectives() -> None:
    """Before megatron is imported, which keeps the functions that it finds."""
    module: Any = dist
    module.all_gather_into_tensor = _gather_in_place(module.all_gather_into_tensor)
    module.reduce_scatter_tensor = _reduce_in_place(module.reduce_scatter_tensor)


def _redirect_optimizer() -> None:
    module: Any = torch.optim
    module.AdamW = _FusedAdamW


class _FusedAdamW(torch.optim.AdamW):
    """torch's AdamW, fused unless told otherwise: one pass over memory in place of a dozen.

    It is what megatron takes where Transformer Engine's fused Adam is missing.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        if not options.keys() & {"foreach", "differentiable"}:
            options.setdefault("fused", True)
        super().__init__(*args, **options)


class _Anything:
    """Stands for any object of an import-only module."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Anything()

    def __getitem__(self, _key: object) -> _Anything:
        return _Anything()

    def __or__(self, _other: object) -> _Anything:
        return _Anything()

    __ror__ = __or__


def _import_only_module(name: str) -> types.ModuleType:
    module: Any = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__path__ = []

    def missing(attribute: str) -> _Anything:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return _Anything()

    module.__getattr__ = missing
    return module  # type: ignore[no-any-return]


@contextlib.contextmanager
def _import_only_triton() -> Iterator[None]:
    """megatron-core >= 0.17 imports triton unconditionally; its kernels never run on a CPU.

    Taken away again afterwards: torch itself must not believe that triton is there.
    """
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    triton: Any = _import_only_module("triton")
    triton.language = _import_only_module("triton.language")
    triton.__version__ = "0.0"
    triton.jit = lambda function=None, **_k: function if function is not None else (lambda f: f)
    triton.cdiv = lambda a, b: -(-a // b)
    triton.heuristics = triton.autotune = lambda *_a, **_k: lambda function: function
    sys.modules["triton"] = triton
    sys.modules["triton.language"] = triton.language
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.split(".")[0] == "triton"]:
            del sys.modules[name]


def _redirect_megatron() -> None:
    with _import_only_triton():
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
    # dynamo (imported by the first optimizer anyway) lists torch.cuda's functions at import and
    # would not know the redirected ones.
    importlib.import_module("torch._dynamo")
    _redirect_cuda_module()
    _redirect_tensors()
    _redirect_collectives()
    _redirect_optimizer()
    _identity_compile()
    _redirect_megatron()
