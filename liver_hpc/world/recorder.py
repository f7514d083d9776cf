"""What a model's own initialization fills its parameters with, as it is built on the meta device.

There are no values there, and drawing them costs nothing; what torch is asked to do to each memory
is noted, and can be done again later to a whole tensor (recipes/first_values.py). Each element must
come of one draw and of numbers alone, whatever its place in the tensor: of all else only the reason
is noted why it cannot be had.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from liver_hpc.layout.tensors import First, Operation
from liver_hpc.recipes.first_values import ARITHMETIC, DRAWS, FILL, TRUNCATED

_CONSTANT = {"zeros": 0.0, "ones": 1.0, "zero_": 0.0}
_AS_GIVEN = frozenset({"full", "scalar_tensor"})
_DRAWN = {"rand": "uniform_", "randn": "normal_", "normal": "normal_"}
_VALUES_ALONE = DRAWS | ARITHMETIC | {FILL, "zero_", "copy_"}
_UNFILLED = frozenset({"empty", "empty_strided"})
_ASKS_FOR_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]
_COPIES = frozenset({"clone", "_to_copy", "contiguous"})


@dataclass(frozen=True)
class _Content:
    """What lies in all of a memory. draw: the one that its values come of, None for a constant;
    why: the reason why it cannot be drawn again, or nothing."""

    operations: tuple[Operation, ...] = ()
    draw: object = None
    why: str = ""

    def then(self, name: str, *numbers: Any) -> _Content:
        if not self.operations:
            return self  # of nothing, or of what is not known
        if not all(number is None or _is_number(number) for number in numbers):
            return _computed(name)
        return replace(self, operations=(*self.operations, (name, numbers)))


def _filled(number: Any) -> _Content:
    return _Content(((FILL, (float(number),)),)) if _is_number(number) else _computed(FILL)


def _drawn(name: str, *numbers: Any) -> _Content:
    if not all(map(_is_number, numbers)):
        return _computed(name)
    return _Content(((name, numbers),), draw=object())


def _computed(name: str) -> _Content:
    return _Content(why=f"it is computed otherwise ({name.removesuffix('_')})")


def _is_number(given: Any) -> bool:
    return isinstance(given, int | float) and math.isfinite(given)


_WHOLE_NUMBERS = ((), _filled(0).operations, _filled(1).operations)
_NOTHING = _Content(why="nothing fills it as the model is built")


class Recorder(TorchDispatchMode):
    """While a model is built, notes on its thread what fills each memory. See `recorded`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._contents: dict[int, tuple[torch.UntypedStorage, _Content]] = {}

    def first_values(self, module: torch.nn.Module) -> dict[str, First]:
        """What has filled each of a module's parameters, by name, or why that cannot be had."""
        found: dict[str, First] = {}
        drawn: dict[object, str] = {}
        for name, parameter in module.named_parameters():
            content = self.read(parameter)
            twin = None if content.draw is None else drawn.setdefault(content.draw, name)
            if twin not in (None, name):
                content = _Content(why=f"it begins with values of {twin}")
            found[name] = content.why or content.operations
        return found

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function.overloadpacket.__name__
        written = _written(function, args, kwargs)
        if len(written) == 1 and written[0] is args[0]:
            (target,) = written
            self.write(target, self._after(name, target, args, kwargs))
            without_effect = name in DRAWS or (target.is_meta and name in _VALUES_ALONE)
            return target if without_effect else function(*args, **kwargs)
        for each in written:
            self.write(each, _computed(name))
        inputs = {_key(each) for each in _tensors((args, kwargs))}
        made = function(*args, **kwargs)
        for each in _tensors(made):
            if _key(each) not in inputs:
                self.note(each, self._made(name, each, args, kwargs))
        return made

    # ---- what is in a memory

    def read(self, tensor: torch.Tensor) -> _Content:
        """What lies in a tensor: as in all of its memory, of which it may be a part."""
        _, content = self._contents.get(_key(tensor), (None, _computed("a value of its own")))
        if content.draw is not None and tensor.numel() > _elements(tensor):
            return _Content(why="a draw is repeated in it")
        return content

    def note(self, tensor: torch.Tensor, content: _Content) -> None:
        """A memory has just been made, with this in it."""
        if not tensor.is_floating_point() and content.operations not in _WHOLE_NUMBERS:
            content = _computed(str(tensor.dtype))
        # The memory is kept, so that no other one gets its key.
        self._contents[_key(tensor)] = (tensor.untyped_storage(), content)

    def write(self, tensor: torch.Tensor, content: _Content) -> None:
        """A tensor, which may be a part of its memory, is filled with this."""
        if tensor.numel() != _elements(tensor):
            _, before = self._contents.get(_key(tensor), (None, _NOTHING))
            if content.draw is not None or content != before:
                content = _Content(why="a part of it is filled otherwise than the rest")
        self.note(tensor, content)

    # ---- what an operation makes of it

    def _after(
        self, name: str, target: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Content:
        """The content of what an operation has written into."""
        if name in DRAWS:
            return _drawn(name, *args[1:])
        if name in _CONSTANT:
            return _filled(_CONSTANT[name])
        if name == FILL:
            return _filled(self._number(args[1]))
        if name == "copy_":
            return self._copied(args[1], target)
        return self._arithmetic(name, target, args, kwargs)

    def _made(
        self, name: str, made: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Content:
        """The content of a memory that an operation has made."""
        plain = name.removeprefix("new_").removesuffix("_like")
        if plain in _UNFILLED:
            return _NOTHING
        if plain in _CONSTANT:
            return _filled(_CONSTANT[plain])
        if plain in _AS_GIVEN:
            return _filled(args[0 if plain == "scalar_tensor" else -1])
        if plain in _DRAWN:
            return _drawn(_DRAWN[plain], *(args[:2] if plain == "normal" else ()))
        if name in _COPIES:
            return self._copied(args[0], made)
        if name == "cat":
            return self._joined(args[0], args[1] if len(args) > 1 else 0)
        return self._arithmetic(f"{name}_", made, args, kwargs)

    def _copied(self, source: torch.Tensor, target: torch.Tensor) -> _Content:
        content = self.read(source)
        if content.draw is not None and source.numel() < target.numel():
            return _Content(why="a draw is repeated in it")
        return content

    def _joined(self, parts: Sequence[torch.Tensor], dim: int) -> _Content:
        """Of the parts that a tensor was split into, what it had itself."""
        contents = [self.read(part) for part in parts]
        if all(content == contents[0] for content in contents) and _adjacent(parts, dim):
            return contents[0]
        return _computed("cat")

    def _arithmetic(
        self, name: str, target: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> _Content:
        """What is computed of one tensor and of numbers. A constant tensor is a number."""
        if not (args and isinstance(args[0], torch.Tensor)) or kwargs.keys() - {"alpha"}:
            return _computed(name)
        before = self._copied(args[0], target)
        numbers = [None if each is None else self._number(each) for each in args[1:]]
        if "alpha" in kwargs:
            numbers = [numbers[0] * kwargs["alpha"]] if _is_number(numbers[0]) else [math.nan]
        elif name == "rsub_":
            return before.then("neg_").then("add_", *numbers)
        return before.then(name, *numbers) if name in ARITHMETIC else _computed(name)

    def _number(self, given: Any) -> Any:
        """What a constant tensor is made of; NaN for any other."""
        if not isinstance(given, torch.Tensor):
            return given
        operations = self.read(given).operations
        known = len(operations) == 1 and operations[0][0] == FILL
        return operations[0][1][0] if known else math.nan


class _Calls(TorchFunctionMode):
    """What torch does nothing for on the meta device, and says so to no dispatcher."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if getattr(function, "__name__", "") == "tensor":
            number = _one_number(args[0] if args else (kwargs or {}).get("data"))
            if number is not None:
                self._recorder.note(result, _filled(number))
        elif function == _ASKS_FOR_META and result:
            self._asked(args[0], sys._getframe(1))
        return result

    def _asked(self, tensor: torch.Tensor, frame: Any) -> None:
        """torch.nn.init asks whether a tensor has no values, and then does nothing."""
        while frame is not None and frame.f_globals.get("__name__") != torch.nn.init.__name__:
            if frame.f_code.co_name != "__torch_function__":
                return
            frame = frame.f_back
        if frame is None:
            return
        values, name = frame.f_locals, frame.f_code.co_name.removeprefix("_no_grad_")
        if name == TRUNCATED:
            numbers = (values[each] for each in ("mean", "std", "a", "b"))
            self._recorder.write(tensor, _drawn(name, *map(float, numbers)))
        else:
            self._recorder.note(tensor, _Content(why=f"torch.nn.init.{name} fills it"))


@contextmanager
def recorded() -> Iterator[Recorder]:
    """Notes what is done within, on the calling thread. The values of what is drawn are not
    drawn."""
    recorder = Recorder()
    with _Calls(recorder), recorder:
        yield recorder


def _key(tensor: torch.Tensor) -> int:
    key: int = tensor.untyped_storage()._cdata
    return key


def _elements(tensor: torch.Tensor) -> int:
    """Of all of a tensor's memory."""
    return tensor.untyped_storage().nbytes() // tensor.element_size()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        yield from _tensors(list(tree.values()))
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _tensors(each)


def _written(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes into."""
    return [
        tensor
        for number, name in _places_written(function)
        for tensor in _tensors(args[number] if number < len(args) else kwargs.get(name))
    ]


@cache
def _places_written(function: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes into."""
    return tuple(
        (number, argument.name)
        for number, argument in enumerate(function._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _adjacent(parts: Sequence[torch.Tensor], dim: int) -> bool:
    """Whether parts lie one behind the other in one memory along a dimension, as `split` gives."""
    first, offset = parts[0], parts[0].storage_offset()
    for part in parts:
        if (_key(part), part.stride(), part.storage_offset()) != (
            _key(first),
            first.stride(),
            offset,
        ):
            return False
        offset += part.shape[dim] * part.stride(dim)
    return True


def _one_number(data: Any) -> float | None:
    """The number that all of a list's elements are, however deep; None: they differ."""
    if isinstance(data, list | tuple):
        found = {_one_number(each) for each in data}
        return found.pop() if len(found) == 1 else None
    return float(data) if _is_number(data) else None
