"""What is wrong with a configuration, in words: the key, what was wanted, what came."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from liver_hpc.errors import ConfigError

KeyPath = tuple[Hashable, ...]
Model = TypeVar("Model", bound=BaseModel)

_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}
_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "dict": "keys and values",
    "model": "a section of keys and values",
}


def key_text(path: KeyPath) -> str:
    """`("layouts", 4, 1, "tp")` as `layouts.4.1.tp`, as `--set` takes it."""
    return ".".join(map(str, path))


def validated(model: type[Model], values: Any, where: Callable[[KeyPath], str]) -> Model:
    """The model of `values`; raises ConfigError with every problem that pydantic finds, each key
    once, after what `where` says of its path."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for detail in error.errors():
            by_path.setdefault(_real_path(detail, values), []).append(detail)
    raise ConfigError(
        *(f"{where(path)}: {_text(details, path, model)}" for path, details in by_path.items())
    )


def _real_path(detail: ErrorDetails, values: Any) -> KeyPath:
    """The error's location without pydantic's own entries (names of union members)."""
    path: list[str | int] = []
    for part in detail["loc"]:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            continue
        path.append(part)
    if detail["type"] == "missing":
        path.append(detail["loc"][-1])
    return tuple(path)


def _text(details: list[ErrorDetails], path: KeyPath, model: type[BaseModel]) -> str:
    """One key's problem; it has several details where the schema allows several types."""
    kind, got, key = details[0]["type"], details[0]["input"], str(path[-1]) if path else ""
    if kind in ("extra_forbidden", "invalid_key", "unexpected_keyword_argument"):
        valid = sorted(_fields_at(model, path[:-1]))
        close = difflib.get_close_matches(key, valid, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown key{meant} (valid keys here: {', '.join(valid)})"
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return str(details[0].get("ctx", {}).get("error", details[0]["msg"]))
    wanted = " or ".join(dict.fromkeys(_wanted(detail, key) for detail in details))
    came = "nothing" if got is None else repr(got)
    came = came if len(came) <= 80 else f"{came[:77]}..."
    return f"wanted {wanted}, got {came}"


def _wanted(detail: ErrorDetails, key: str) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _BOUNDS:
        name, word = _BOUNDS[kind]
        return f"a number {word} {context[name]:.12g}"
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    basic = kind.partition("_")[0]
    if basic == "int" and key.endswith("_bytes"):
        return "a whole number of bytes"
    if basic == "float" and key.endswith("_s"):
        return "a number of seconds"
    return _KINDS.get(basic) or detail["msg"][:1].lower() + detail["msg"][1:]


def _fields_at(annotation: Any, path: KeyPath) -> list[str]:
    """Keys that the section at a path below a type may have."""
    arguments = get_args(annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        if path:
            return _fields_at(get_type_hints(annotation).get(str(path[0])), path[1:])
        return [field.name for field in fields(annotation)]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if not path:
            return list(annotation.model_fields)
        field = annotation.model_fields.get(str(path[0]))
        return _fields_at(field.annotation, path[1:]) if field is not None else []
    if get_origin(annotation) in (list, dict):
        return _fields_at(arguments[-1], path[1:])
    # What Annotated and unions hold.
    return next(filter(None, (_fields_at(argument, path) for argument in arguments)), [])
