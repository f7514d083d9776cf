"""A YAML document as plain values, with the line of every key; a key given twice is an error."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml

from liver_hpc.errors import ConfigError

KeyPath = tuple[Hashable, ...]


@dataclass
class Document:
    """What a file holds. `lines` maps the path of a key or list entry to its line, from 1."""

    name: str
    values: dict[Any, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)

    def line_of(self, path: KeyPath) -> int | None:
        """The line of a key, or of the nearest section around it that the file names."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path)


class _Loader(yaml.SafeLoader):
    """Safe, and `1e-3` is a number as in YAML 1.2 (YAML 1.1 wants `1.0e-3`)."""


class _Dumper(yaml.SafeDumper):
    """Knows paths, and quotes the texts that `_Loader` would take for numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
        list("-+0123456789"),
    )
_Dumper.add_multi_representer(PurePath, lambda dumper, path: dumper.represent_str(str(path)))


def dump_document(values: dict[str, Any]) -> str:
    """YAML that `parse_document` reads back as equal values, in the same order."""
    # ASCII alone: PyYAML does not quote every Unicode line break that it reads as one.
    return str(yaml.dump(values, Dumper=_Dumper, sort_keys=False))


def read_document(path: Path) -> Document:
    """The document in a file; raises ConfigError with file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a UTF-8 text file ({error.reason})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_document(text, str(path))


def parse_document(text: str, name: str) -> Document:
    """The document in a text; `name` stands for it in errors."""
    lines: dict[KeyPath, int] = {}
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None:
            _note_lines(loader, node, (), lines, name, set())
        values = None if node is None else loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = name if mark is None else f"{name}:{mark.line + 1}"
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except (yaml.YAMLError, ValueError) as error:
        # ValueError: a scalar that looks like a date or number but is none, such as 2024-13-45.
        raise ConfigError(f"{name}: not valid YAML: {error}") from None
    finally:
        loader.dispose()
    if values is None:
        raise ConfigError(f"{name}: the file is empty")
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: wanted keys and values, got {type(values).__name__}")
    return Document(name, values, lines)


def parse_value(text: str) -> Any:
    """One YAML value, such as `4` or `[{tp: 2}]`; raises ConfigError."""
    document = parse_document(f"value: {text}", repr(text))
    if list(document.values) != ["value"]:
        raise ConfigError(f"{text!r}: wanted one YAML value")
    return document.values["value"]


def _note_lines(
    loader: _Loader,
    node: yaml.Node,
    path: KeyPath,
    lines: dict[KeyPath, int],
    name: str,
    seen: set[int],
) -> None:
    """Fills `lines` with all keys below a node; raises ConfigError for a key given twice."""
    if id(node) in seen:  # an alias: its keys stand, and are checked, at its anchor
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, entry in enumerate(node.value):
            lines[(*path, index)] = entry.start_mark.line + 1
            _note_lines(loader, entry, (*path, index), lines, name, seen)
    elif isinstance(node, yaml.MappingNode):
        for key_node, value_node in node.value:
            is_merge = key_node.tag == "tag:yaml.org,2002:merge"  # `<<: *base`
            key = "<<" if is_merge else loader.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                continue  # construct_document refuses it, with its line
            line = key_node.start_mark.line + 1
            if (*path, key) in lines:
                first = lines[(*path, key)]
                raise ConfigError(
                    f"{name}:{line}: key {key!r} is given twice, first in line {first}"
                )
            lines[(*path, key)] = line
            _note_lines(loader, value_node, (*path, key), lines, name, seen)
