"""How a recipe's model is built without drawing random numbers, or without memory."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from liver_hpc.errors import PlanError

# fmt: off
_DRAWS = frozenset({
    "normal_", "uniform_", "trunc_normal_", "kaiming_normal_", "kaiming_uniform_",
    "xavier_normal_", "xavier_uniform_", "orthogonal_", "sparse_", "random_", "bernoulli_",
    "exponential_", "log_normal_", "cauchy_", "geometric_",
})
# fmt: on
_FACTORIES = {factory.__name__ for factory in _device_constructors()} | {
    f"{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
}
_SERIES = frozenset({"arange", "linspace", "logspace"})
_READS = frozenset({"unbind", "tolist", "numpy", "__array__"})
_SHORT = 4096
"""A series of at most so many numbers keeps them."""
_REPLACES = _DRAWS | {"copy_", "fill_", "zero_"}
"""All values of the first argument become others."""
_RANDOM = frozenset({"rand", "randn", "rand_like", "randn_like"})
_RANDOM_CHOICES = frozenset(
    {"randint", "randint_like", "randperm", "multinomial", "bernoulli", "poisson"}
)


class NoDraws(TorchFunctionMode):
    """While a recipe builds its model, whose parameters are filled in later: on its thread, filling
    one with random numbers leaves it as it is, and another tensor gets NaN in their place.

    What is drawn from a generator of the model's own is drawn: it is the same on every worker, and
    leaves the streams of this process alone. Raises PlanError for choices that are drawn otherwise.
    undrawn: whether anything was not drawn; `is_undrawn` tells it of a tensor, also of what was
    computed of such, in which there may be no NaN.
    """

    undrawn = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if kwargs.get("generator") is None:
            kwargs.pop("generator", None)
            if name in _DRAWS:
                return self._instead(args[0] if args else kwargs["tensor"])
            if name in _RANDOM:
                made = torch.zeros_like if name.endswith("_like") else torch.zeros
                return self._instead(made(*args, **kwargs))
            if name == "normal":
                return self._instead(_shaped_as_normal(*args, **kwargs))
            if name in _RANDOM_CHOICES:
                raise PlanError(
                    f"the model draws by torch.{name} as it is built, which would differ between "
                    "workers: give it a generator with a seed of its own"
                )
        made = function(*args, **kwargs)
        if self.undrawn:
            _follow(name, args, kwargs, made)
        return made

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        self.undrawn = True
        if isinstance(tensor, torch.nn.Parameter):
            tensor.undrawn = True  # type: ignore[attr-defined]
            return tensor
        _mark(tensor, tensor._base)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor


@contextmanager
def only_of_torch(when: str = "as it is built") -> Iterator[None]:
    """Encloses the building of a model, or a rehearsal, in a process that does nothing beside.
    Raises PlanError where it draws from the process's streams of numpy or Python, which no worker
    has alike."""
    before = _other_streams()
    yield
    drawn = [name for name, stream in _other_streams().items() if stream != before[name]]
    if drawn:
        raise PlanError(
            f"the model draws by {' and '.join(drawn)} {when}, which would differ between "
            "workers: draw from a generator with a seed of its own, numpy.random.default_rng(5) or "
            "random.Random(5), say"
        )


def _other_streams() -> dict[str, Any]:
    """Where they stand."""
    state: Any = np.random.get_state()
    return {"numpy.random": (state[1].tobytes(), *state[2:]), "random": random.getstate()}


def is_undrawn(value: Any) -> bool:
    """Whether values of a tensor were to be drawn as a model was built, or come of such."""
    return getattr(value, "undrawn", False)


def _mark(*tensors: Any) -> None:
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
            tensor.undrawn = True  # type: ignore[attr-defined]


def _follow(name: str, args: Any, kwargs: dict[str, Any], made: Any) -> None:
    """Marks what a function has made, or changed, of what was not drawn."""
    values = args  # of those that others only give their shape, only the others count
    if name.endswith("_as"):
        values = args[:1]
    elif name in _REPLACES or name.startswith("new_") or name.endswith("_like"):
        values = args[1:]
    if any(map(is_undrawn, _each((*values, *kwargs.values())))):
        changed = [*_each(args[:1])] if made is None or (args and made is args[0]) else []
        _mark(*_each((made,)), *changed, *(getattr(each, "_base", None) for each in changed))
    elif name in _REPLACES and is_undrawn(made):
        made.undrawn = False


def _each(values: Iterable[Any]) -> Iterator[Any]:
    """Of values among which there may be lists and tuples."""
    lists = (value if isinstance(value, list | tuple) else (value,) for value in values)
    return itertools.chain.from_iterable(lists)


DRAWING = _DRAWS | _RANDOM | _RANDOM_CHOICES | {"normal", "binomial"}
DRAWING |= {"_standard_gamma", "_sample_dirichlet"}  # by torch.distributions
"""Functions that draw, from the generator of their device where they are given none."""


class OwnGenerators(dict[torch.device, torch.Generator]):
    """Those that are drawn from in place of the process's, one a device."""

    def __missing__(self, device: torch.device) -> torch.Generator:
        self[device] = torch.Generator(device)
        return self[device]

    def draw(self, function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What one of `DRAWING` gives, without a generator of the caller's."""
        name = function.__name__
        if name.endswith("_like"):
            like, *args = args or (kwargs.pop("input"),)
            kwargs.pop("memory_format", None)
            kwargs = {"size": like.shape, "dtype": like.dtype, "device": like.device, **kwargs}
            function = getattr(torch, name.removesuffix("_like"))
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor))
        first = next(given, None)
        device = kwargs.get("device") if first is None else first.device
        own = self[torch.get_default_device() if device is None else torch.device(device)]
        return function(*args, **{**kwargs, "generator": own})


class OnMeta(TorchFunctionMode):
    """While a model is built that only its shapes are asked of: on its thread, tensors are made on
    the meta device, and stay there, whatever device is named.

    What `linspace` and its like have just made has numbers that can be read, as models do that give
    each layer a rate of its own: `[rate.item() for rate in torch.linspace(0, 0.1, depth)]`.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("generator", None)  # no values, no draws
        name = getattr(function, "__name__", "")
        of_tensors = any(isinstance(each, torch.Tensor) for each in (*args, *kwargs.values()))
        if name in _SERIES and not of_tensors:
            made = function(*args, **{**kwargs, "device": "meta"})
            if made.numel() <= _SHORT:
                made.numbers = function(*args, **{**kwargs, "device": "cpu"})
            return made
        if name in _FACTORIES or (name == "normal" and not of_tensors):
            kwargs["device"] = "meta"
        elif name in _READS and args and hasattr(args[0], "numbers") and not args[0]._version:
            args = (args[0].numbers, *args[1:])
        elif name in ("cuda", "cpu") and args[0].is_meta:
            return args[0]
        elif name == "to" and args[0].is_meta:
            args = tuple("meta" if isinstance(a, str | torch.device) else a for a in args)
            kwargs |= {"device": "meta"} if "device" in kwargs else {}
        return function(*args, **kwargs)


def _shaped_as_normal(
    mean: Any = 0.0, std: Any = 1.0, size: Any = (), **options: Any
) -> torch.Tensor:
    """Zeros of the shape of what torch.normal would give."""
    tensors = [each for each in (mean, std) if isinstance(each, torch.Tensor)]
    if not tensors:
        return torch.zeros(size, **{key: v for key, v in options.items() if key != "out"})
    shaped: list[torch.Tensor] = torch.broadcast_tensors(*tensors)  # type: ignore[no-untyped-call]
    return torch.zeros_like(shaped[0])
