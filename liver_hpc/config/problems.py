"""What is wrong with a configuration, in words: the key, what was wanted, what came."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from liver_hpc.config.document import KeyPath

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
RENAMED = {"away_s": "unreachable_s"}
"""Keys of earlier releases, and what they are called now."""
REMOVED = {
    "metrics.flush_interval_s": "every event goes to the journal at once",
    "cluster.slurm.mpi": "nodes meet over MPI without a plugin of Slurm's",
}
"""Keys of earlier releases, and what holds now."""
_QUANTITY = re.compile(r"^\s*([0-9]+)\s*([kmgt]?)(i?)b?\s*$", re.IGNORECASE)


def joined(problems: Sequence[str]) -> str:
    """One problem as it is, several one a line."""
    if len(problems) == 1:
        return problems[0]
    return f"{len(problems)} problems\n" + "\n".join(f"  {problem}" for problem in problems)


def parts(error: Exception) -> list[str]:
    """The problems that `joined` has put together."""
    first, *lines = str(error).splitlines()
    return (
        [line.strip() for line in lines] if re.fullmatch(r"\d+ problems", first) else [str(error)]
    )


def key_text(path: KeyPath) -> str:
    """`("layouts", 4, 1, "tp")` as `layouts.4.1.tp`, as `--set` takes it."""
    return ".".join(map(str, path))


def suggestion(wrong: str, valid: Iterable[str]) -> str:
    """A did-you-mean for an unknown key, or nothing."""
    close = difflib.get_close_matches(wrong, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def problems_of(
    error: ValidationError, model: type[BaseModel], values: Any
) -> Iterator[tuple[KeyPath, str]]:
    """Path and text of every problem that pydantic found in `values`, each key once."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in error.errors():
        by_path.setdefault(_real_path(detail, values), []).append(detail)
    for path, details in by_path.items():
        yield path, _text(details, path, model)


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
    if kind == "extra_forbidden":
        valid = sorted(_fields_at(model, path[:-1]))
        if RENAMED.get(key) in valid:
            return f"this key is called {RENAMED[key]!r} now"
        if key_text(path) in REMOVED:
            return f"there is no such key any more, leave it out: {REMOVED[key_text(path)]}"
        return f"unknown key{suggestion(key, valid)} (valid keys here: {', '.join(valid)})"
    if kind == "missing":
        return "this key is required"
    if kind == "value_error":
        return str(details[0].get("ctx", {}).get("error", details[0]["msg"]))
    wanted = " or ".join(dict.fromkeys(_wanted(detail, key) for detail in details))
    came = "nothing" if got is None else _short(got)
    return f"wanted {wanted}, got {came}{_hint(key, got)}"


def _wanted(detail: ErrorDetails, key: str) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    bounds = {
        "greater_than": ("gt", "more than"),
        "greater_than_equal": ("ge", "at least"),
        "less_than": ("lt", "less than"),
        "less_than_equal": ("le", "at most"),
    }
    if kind in bounds:
        name, word = bounds[kind]
        return f"a number {word} {context[name]:g}"
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"text that matches {context['pattern']}"
    if kind.startswith("int_"):
        return "a whole number of bytes" if key.endswith("_bytes") else "a whole number"
    if kind.startswith("float_"):
        return "a number of seconds" if key.endswith("_s") else "a number"
    plain = {
        "bool_": "true or false",
        "string_": "text",
        "path_": "a path",
        "list_": "a list",
        "dict_": "keys and values",
        "model_": "a section of keys and values",
    }
    for prefix, words in plain.items():
        if kind.startswith(prefix):
            return words
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _short(got: Any) -> str:
    text = repr(got)
    return text if len(text) <= 80 else text[:77] + "..."


def _hint(key: str, got: Any) -> str:
    """`64MB` for a number of bytes: the number to write."""
    match = _QUANTITY.match(got) if key.endswith("_bytes") and isinstance(got, str) else None
    if match is None:
        return ""
    count, power, binary = int(match[1]), _UNITS[match[2].lower()], bool(match[3])
    return f"; write {count * (1024 if binary else 1000) ** power}"


def _fields_at(model: type[BaseModel], path: KeyPath) -> list[str]:
    """Keys that the section at a path may have."""
    annotation: Any = model
    for part in path:
        found = _model_in(annotation)
        if found is not None and part in found.model_fields:
            annotation = found.model_fields[str(part)].annotation
        else:
            arguments = get_args(_container_in(annotation))
            annotation = arguments[-1] if arguments else None
    found = _model_in(annotation)
    return list(found.model_fields) if found is not None else []


def _members(annotation: Any) -> Iterator[Any]:
    """The annotation itself, and what Annotated and unions hold."""
    if get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    elif get_origin(annotation) in (list, dict) or not get_args(annotation):
        yield annotation
    else:
        for member in get_args(annotation):
            yield from _members(member)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    for member in _members(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            return member
    return None


def _container_in(annotation: Any) -> Any:
    return next((m for m in _members(annotation) if get_origin(m) in (list, dict)), None)
