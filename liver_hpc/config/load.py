"""A run file -> RunConfig, with `--set` overrides; and RunConfig -> YAML that reads back equal.

A key that is given twice is an error, and every error names its line.
"""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from liver_hpc.config.completion import Derive, Derived, complete, derived_place
from liver_hpc.config.problems import KeyPath, key_text, validated
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


def load_run(path: Path, overrides: Sequence[str] = (), derive: Derive | None = None) -> RunConfig:
    """The run that a YAML file describes; each override is `key.sub=VALUE` and beats the file.

    derive: what completes the file by its `model` section (`recipes/completion.py`).
    Relative paths in the file stay as they are: they are relative to the current directory.
    Raises ConfigError that names file, line, key, what was wanted and what came, all at once.
    """
    return parse_run(read_text(path), str(path), overrides, derive)


def read_text(path: Path) -> str:
    """A run file's. Raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def parse_values(text: str, name: str, overrides: Sequence[str] = ()) -> dict[Any, Any]:
    """What a run file says, overrides included, whether or not that makes a run.

    Raises ConfigError for one that is no YAML.
    """
    values, _ = _parse(text, name)
    for override in overrides:
        _override(values, override)
    return values


def parse_run(
    text: str,
    name: str = "run.yaml",
    overrides: Sequence[str] = (),
    derive: Derive | None = None,
) -> RunConfig:
    """The same from a text; `name` stands for it in errors."""
    values, lines = _parse(text, name)
    set_by = {_override(values, override): override for override in overrides}
    derived: Mapping[KeyPath, Derived] = {}

    def where(path: KeyPath) -> str:
        """File, line and key, or the override that a key came from."""
        around = [path[:length] for length in range(len(path), 0, -1)]
        if given := next((each for each in around if each in set_by), None):
            override = f"--set {set_by[given]}"
            return override if given == path else f"{override}: {key_text(path)}"
        made = next((each for each in set_by if each[: len(path)] == path), None)
        if made is not None and path not in lines:
            return f"--set {set_by[made]}: {key_text(path)}"
        made_at = next((each for each in around if each in derived), None)
        if made_at is not None and made_at not in lines:
            return derived_place(path, derived[made_at], where)
        line = next((lines[each] for each in around if each in lines), None)
        file = name if line is None else f"{name}:{line}"
        return f"{file}: {key_text(path)}" if path else file

    problems = list[str]()
    if derive is not None:
        derived = derive(values, where)
        problems = complete(values, derived, where)
    try:
        config = validated(RunConfig, values, where)
    except ConfigError as error:
        raise ConfigError(*problems, *error.args) from None
    if problems:
        raise ConfigError(*problems)
    return config


def dump_run(config: RunConfig) -> str:
    """The whole run as YAML, defaults included; `load_run` reads an equal object from it."""
    # ASCII alone: PyYAML does not quote every Unicode line break that it reads as one.
    return str(yaml.dump(config.model_dump(), Dumper=_Dumper, sort_keys=False))


def dump_value(value: Any) -> str:
    """A value as it stands in one line of a run file, texts quoted where they must be."""
    dumped: str = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return dumped.removesuffix("...\n").strip()


def schema_text() -> str:
    """The JSON schema of run files, for editors; `make docs` writes it."""
    return Path(__file__).with_name("run-file.schema.json").read_text(encoding="utf-8")


def absolute_paths(config: RunConfig) -> RunConfig:
    """The same run with every path absolute, so that it means the same in any directory.

    Raises ConfigError where the current directory is one that a run file cannot name.
    """
    values = _absolute({**config.model_dump(), "recipe_directory": config.own_recipe_directory})
    if config.data is not None and isinstance(config.data.text, list):
        texts = map(os.path.expanduser, config.data.text)
        values["data"]["text"] = [str(Path(text).absolute()) for text in texts]
    return validated(RunConfig, values, key_text)


def _absolute(value: Any) -> Any:
    """A path, or those in a section."""
    if isinstance(value, dict):
        return {key: _absolute(held) for key, held in value.items()}
    if isinstance(value, list):
        return [*map(_absolute, value)]
    return value.expanduser().absolute() if isinstance(value, Path) else value


# ---- overrides


def _override(values: dict[Any, Any], override: str) -> KeyPath:
    """Puts one `key.sub=VALUE` into the values; returns the key's path."""
    key, equals, text = override.partition("=")
    parts = [int(part) if part.isdecimal() else part for part in key.strip().split(".")]
    if not equals or "" in parts:
        raise ConfigError(f"--set {override}: wanted key.sub=VALUE")
    try:
        value = _parse_value(text)
    except ConfigError as error:
        raise ConfigError(f"--set {override}: {error}") from None
    section: Any = values
    for depth, part in enumerate(parts):
        name = key_text(tuple(parts[:depth]))
        if isinstance(section, list):
            if not isinstance(part, int) or part >= len(section):
                said = f"{name} is a list of {len(section)}, without {part!r}"
                raise ConfigError(f"--set {override}: {said}")
        elif not isinstance(section, dict):
            raise ConfigError(f"--set {override}: {name} is {section!r}, not a section")
        if depth == len(parts) - 1:
            section[part] = value
        elif isinstance(section, dict) and section.get(part) is None:
            section[part] = {}
        section = section[part]
    return tuple(parts)


def _parse_value(text: str) -> Any:
    """One YAML value, such as `4` or `[{tp: 2}]`; raises ConfigError."""
    values, _ = _parse(f"value: {text}", repr(text))
    if list(values) != ["value"]:
        raise ConfigError(f"{text!r}: wanted one YAML value")
    return values["value"]


# ---- YAML


_NUMBERS = {
    "tag:yaml.org,2002:int": r"[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)",
    "tag:yaml.org,2002:float": r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)([eE][-+]?[0-9]+)?"
    r"|[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
}
"""What is one, as in YAML 1.2: `1e-3` is, to which YAML 1.1 wants a point; `4:00:00` and `0123` are
texts, which YAML 1.1 takes for numbers of other bases."""


class _Loader(yaml.SafeLoader):
    """Safe. lines: of every key and list entry by its path, from 1."""

    def __init__(self, text: str, name: str) -> None:
        super().__init__(text)
        self.name = name
        self.lines: dict[KeyPath, int] = {}
        self._noted: set[int] = set()

    def note_lines(self, node: yaml.Node, path: KeyPath = ()) -> None:
        """Of all keys below a node; raises ConfigError for a key given twice."""
        if id(node) in self._noted:  # an alias: its keys stand, and are checked, at its anchor
            return
        self._noted.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            for index, entry in enumerate(node.value):
                self.lines[(*path, index)] = entry.start_mark.line + 1
                self.note_lines(entry, (*path, index))
        elif isinstance(node, yaml.MappingNode):
            for key_node, value_node in node.value:
                is_merge = key_node.tag == "tag:yaml.org,2002:merge"  # `<<: *base`
                key = "<<" if is_merge else self.construct_object(key_node, deep=True)
                if not isinstance(key, Hashable):
                    continue  # construct_document refuses it, with its line
                line, first = key_node.start_mark.line + 1, self.lines.get((*path, key))
                if first is not None:
                    raise ConfigError(
                        f"{self.name}:{line}: key {key!r} is given twice, first in line {first}"
                    )
                self.lines[(*path, key)] = line
                self.note_lines(value_node, (*path, key))


class _Dumper(yaml.SafeDumper):
    """Knows paths, and quotes the texts that `_Loader` would take for numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in _NUMBERS]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _side in (_Loader, _Dumper):
    for _tag, _pattern in _NUMBERS.items():
        _side.add_implicit_resolver(_tag, re.compile(f"^({_pattern})$"), list("-+.0123456789"))
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def _unshared(value: Any) -> Any:
    """The same values, of which an alias has a copy of its own: `--set` changes one place."""
    if isinstance(value, dict):
        return {key: _unshared(held) for key, held in value.items()}
    return [*map(_unshared, value)] if isinstance(value, list) else value


def _parse(text: str, name: str) -> tuple[dict[Any, Any], dict[KeyPath, int]]:
    """What a text holds, and the lines of its keys; `name` stands for it in errors."""
    try:
        loader = _Loader(text, name)
        values, node = None, loader.get_single_node()
        if node is not None:
            loader.note_lines(node)
            values = _unshared(loader.construct_document(node))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError) as error:
        # A scalar that looks like a date or number but is none, as 2024-13-45, or is told to be.
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{name}: sections within sections, too many or without an end") from None
    if values is None:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: wanted keys and values, got {type(values).__name__}")
    return values, loader.lines
