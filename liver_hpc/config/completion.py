"""Values of a run file that follow from its `model` section: put in where the file has none."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.config.problems import KeyPath, key_text

Where = Callable[[KeyPath], str]
"""File, line and key of a path, or the `--set` that it came from."""


@dataclass(frozen=True)
class Derived:
    """A value of the run file that follows from the recipe's options, and from which of them.

    at: the key that holds these options. may_differ: the run file may have another one.
    """

    value: Any
    source: str
    at: KeyPath = ("model",)
    may_differ: bool = False


Derive = Callable[[dict[Any, Any], Where], Mapping[KeyPath, Derived]]
"""What follows from a run file's values, before these are checked; raises ConfigError."""


def complete(values: dict[Any, Any], derived: Mapping[KeyPath, Derived], where: Where) -> list[str]:
    """Puts each derived value in where there is none. Returns what differs, with both places."""
    problems = []
    for path, one in derived.items():
        section = _section(values, path[:-1])
        if section is None:
            continue  # the schema tells that a section is wanted
        given = section.get(path[-1])
        if given is None:
            section[path[-1]] = one.value
        elif not (one.may_differ or _equal(given, one.value)):
            problems.append(_conflict(path, given, one, where))
    return problems


def derived_place(path: KeyPath, one: Derived, where: Where) -> str:
    """What stands before a problem of a derived value: there is no line of its own."""
    return f"{where(one.at)}: {one.source}: {key_text(path)}"


def _section(values: dict[Any, Any], keys: KeyPath) -> dict[Any, Any] | None:
    """The section at a path, made where there is none; None where something else is there."""
    for key in keys:
        if values.get(key) is None:
            values[key] = {}
        section: Any = values[key]
        if not isinstance(section, dict):
            return None
        values = section
    return values


def _conflict(path: KeyPath, given: Any, one: Derived, where: Where) -> str:
    meant = "there is none" if one.value is None else f"it is {one.value}"
    return f"{where(path)} is {given}, but {where(one.at)} says {one.source}: {meant}"


def _equal(given: Any, value: Any) -> bool:
    """Whether a value as YAML has it means the same."""
    if isinstance(value, list):
        return (
            isinstance(given, list)
            and len(given) == len(value)
            and all(_equal(one, other) for one, other in zip(given, value, strict=True))
        )
    if isinstance(value, dict):
        return isinstance(given, dict) and all(_equal(given.get(key), value[key]) for key in value)
    if isinstance(value, str) and isinstance(given, str):
        return given == value or Path(os.path.expanduser(given)).absolute() == Path(value)
    return bool(given == value and isinstance(given, bool) == isinstance(value, bool))
