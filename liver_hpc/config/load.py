"""A run file -> RunConfig, with `--set` overrides; and RunConfig -> YAML that reads back equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from liver_hpc.config.document import (
    Document,
    KeyPath,
    dump_document,
    parse_document,
    parse_value,
    read_document,
)
from liver_hpc.config.problems import joined, key_text, problems_of
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file describes; each override is `key.sub=VALUE` and beats the file.

    Relative paths in the file stay as they are: they are relative to the current directory.
    Raises ConfigError that names file, line, key, what was wanted and what came, all at once.
    """
    return _run_of(read_document(path), overrides)


def parse_run(text: str, name: str = "run.yaml") -> RunConfig:
    """The same from a text; `name` stands for it in errors."""
    return _run_of(parse_document(text, name), ())


def dump_run(config: RunConfig) -> str:
    """The whole run as YAML, defaults included; `load_run` reads an equal object from it."""
    return dump_document(config.model_dump())


def absolute_paths(config: RunConfig) -> RunConfig:
    """The same run with every path absolute, so that it means the same in any directory."""
    values = _absolute({**config.model_dump(), "recipe_directory": config.own_recipe_directory})
    if config.data is not None and isinstance(config.data.text, list):
        values["data"]["text"] = [str(_absolute(Path(text))) for text in config.data.text]
    return RunConfig.model_validate(values)


def _absolute(value: Any) -> Any:
    """A path, or those in a section."""
    if isinstance(value, dict):
        return {key: _absolute(held) for key, held in value.items()}
    return value.expanduser().absolute() if isinstance(value, Path) else value


def _run_of(document: Document, overrides: Sequence[str]) -> RunConfig:
    set_by = {_override(document.values, override): override for override in overrides}
    try:
        return RunConfig.model_validate(document.values)
    except ValidationError as error:
        found = problems_of(error, RunConfig, document.values)
        raise ConfigError(
            joined([f"{_where(document, set_by, path)}: {text}" for path, text in found])
        ) from None


def _where(document: Document, set_by: dict[KeyPath, str], path: KeyPath) -> str:
    """File, line and key, or the override that a key came from."""
    for length in range(len(path), 0, -1):
        if path[:length] in set_by:
            given = f"--set {set_by[path[:length]]}"
            return given if length == len(path) else f"{given}: {key_text(path)}"
    line = document.line_of(path)
    where = document.name if line is None else f"{document.name}:{line}"
    return f"{where}: {key_text(path)}" if path else where


def _override(values: dict[Any, Any], override: str) -> KeyPath:
    """Puts one `key.sub=VALUE` into the values; returns the key's path."""
    key, equals, text = override.partition("=")
    parts = [int(part) if part.isdecimal() else part for part in key.strip().split(".")]
    if not equals or "" in parts:
        raise ConfigError(f"--set {override}: wanted key.sub=VALUE")
    try:
        value = parse_value(text)
    except ConfigError as error:
        raise ConfigError(f"--set {override}: {error}") from None
    section: Any = values
    for depth, part in enumerate(parts):
        _check_entry(section, part, f"--set {override}", key_text(tuple(parts[:depth])))
        if depth == len(parts) - 1:
            section[part] = value
        elif isinstance(section, dict) and section.get(part) is None:
            section[part] = {}
        section = section[part]
    return tuple(parts)


def _check_entry(section: Any, part: str | int, override: str, name: str) -> None:
    """Raises ConfigError where a key cannot stand in a section, or an index not in a list."""
    if isinstance(section, list):
        if not isinstance(part, int) or part >= len(section):
            raise ConfigError(f"{override}: {name} is a list of {len(section)}, without {part!r}")
    elif not isinstance(section, dict):
        raise ConfigError(f"{override}: {name} is {section!r}, not a section")
