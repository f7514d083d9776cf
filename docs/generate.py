"""Writes docs/reference from the code: `make docs`, or `python -m docs.generate`.

| page | made from |
| --- | --- |
| run-file.md | the schema's types and defaults, the comments of configs/reference.yaml |
| commands.md | the parser of `liver` |
| metrics.md | the records of liver_hpc/run/records.py and their docstrings |
| megatron-lm-arguments.md | the tables of liver_hpc/recipes/megatron_lm |

A test compares what lies in docs/reference with `pages()`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import yaml

from liver_hpc.cli.main import new_parser
from liver_hpc.config.problems import key_text
from liver_hpc.config.schema import RunConfig
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.megatron_lm.owned import KEYS
from liver_hpc.recipes.megatron_lm.tables import LAYOUT, NO_EFFECT, PASSED, REFUSED, Group
from liver_hpc.run import records

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"

UNITS = ("bytes", "s", "min", "steps", "hours")
"""What a name may end in, and is in."""

Schema = dict[str, Any]


def pages() -> dict[str, str]:
    """Each page's text by the name of its file."""
    made = {
        "run-file.md": run_file(),
        "commands.md": commands(),
        "metrics.md": metrics(),
        "megatron-lm-arguments.md": megatron_lm_arguments(),
    }
    note = "<!-- Made by `make docs` from the code: change that, not this page. -->\n\n"
    return {name: f"{note}{text.strip()}\n" for name, text in made.items()}


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", r"\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def unit(name: str) -> str:
    ending = name.rpartition("_")[2]
    return ending if ending in UNITS else ""


# ---- the run file


def run_file() -> str:
    """One section a mapping, in the order of configs/reference.yaml."""
    comments = Comments((ROOT / "configs" / "reference.yaml").read_text(encoding="utf-8"))
    schema = RunConfig.model_json_schema()
    model = GPTConfig.model_json_schema()
    schema["properties"]["model"] = model
    text = [
        "# The run file",
        "One YAML file is one whole run; an unknown key is an error. Relative paths are relative "
        "to the directory in which `liver` is started. Any key can be set on the command line, "
        "where it beats the file: `--set train.steps=100 --set layouts.2.0.tp=2`. "
        "[reference.yaml](../../configs/reference.yaml) is a file with every key.",
        *_section("", schema, schema["$defs"] | model["$defs"], comments, {}),
    ]
    return "\n\n".join(text)


def _section(
    path: str, section: Schema, known: Schema, comments: Comments, places: dict[str, str]
) -> Iterator[str]:
    """The table of a mapping's keys, then the sections of those that are mappings themselves.

    places: where each kind of mapping is described, by its title.
    """
    rows, inner = [], []
    for key, entry in section["properties"].items():
        name = f"{path}{key}"
        nested, place = _nested(entry, known, name)
        told = comments[name]
        if nested is not None:
            if nested["title"] not in places:
                inner.append((place, nested))
            place = places.setdefault(nested["title"], place)
            if comments.above[name]:
                told = told.partition(". ")[0].rstrip(".")  # its section has the rest
        rows.append([f"`{key}`", kind(entry, place), unit(key), default(section, key), told])
    if path:
        yield f"## {path.rstrip('.')}"
        if about := comments.above[path.removesuffix(".").removesuffix(".[]").removesuffix(".N")]:
            yield about
    yield table(["key", "type", "unit", "default", "meaning"], rows)
    for place, nested in inner:
        yield from _section(f"{place}.", nested, known, comments, places)


def _nested(entry: Schema, known: Schema, name: str) -> tuple[Schema | None, str]:
    """The mapping that an entry is or lists, and how it is written: `notices.[]`."""
    if "properties" in entry:
        return entry, name
    for one in (entry, *entry.get("anyOf", []), *entry.get("oneOf", [])):
        if "$ref" in one:
            return known[one["$ref"].rpartition("/")[2]], name
        if one.get("type") == "array" and (found := _nested(one["items"], known, name)[0]):
            return found, f"{name}.[]"
        if isinstance(more := one.get("additionalProperties"), dict):
            found, place = _nested(more, known, f"{name}.N")
            if found:
                return found, place
    return None, ""


def kind(entry: Schema, section: str = "") -> str:
    """The type of a value in words; that of a mapping is the section that describes it."""
    options = entry.get("anyOf") or entry.get("oneOf")
    if options:
        return " or ".join(kind(option, section) for option in options)
    if section and ("$ref" in entry or entry.get("type") in ("array", "object")):
        named = f"[{section}](#{section_link(section)})"
        return {"array": f"list of {named}"}.get(entry.get("type", ""), named)
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum", [entry.get("const")]))
    match entry["type"]:
        case "integer" | "number" as number:
            word = "whole number" if number == "integer" else "number"
            bounds = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<"}
            limits = [f"{sign} {entry[key]:g}" for key, sign in bounds.items() if key in entry]
            return f"{word} {' and '.join(limits)}".strip()
        case "array":
            items = kind(entry["items"])
            return f"list of {items}s" if items.isalpha() else f"list of {items}"
        case "object":
            return "mapping"
        case "string":
            return "path" if entry.get("format") == "path" else "text"
        case "boolean":
            return "`true`, `false`"
        case word:
            return str(word)


def section_link(section: str) -> str:
    """The anchor of a section's heading."""
    return re.sub(r"[^\w-]", "", section.lower())


def default(section: Schema, key: str) -> str:
    entry = section["properties"][key]
    if key in section.get("required", []):
        return "required"
    value = entry.get("default")
    if (isinstance(value, dict) and value) or "default" not in entry:
        return ""  # its section has them
    return f"`{json.dumps(value).strip(chr(34))}`"


class Comments:
    """What configs/reference.yaml says of each key.

    above: of a section, the comment over its key. An entry of a list is `[]`, and what is given
    by number of workers is `N`; of several the first one with a key explains it. What cannot be
    given beside the rest is behind `#| `.
    """

    def __init__(self, text: str) -> None:
        text = text.replace("#| ", "")
        self._lines = text.splitlines()
        self._beside: dict[str, str] = {}
        self.above: dict[str, str] = {}
        self._walk("", yaml.compose(text))

    def __getitem__(self, name: str) -> str:
        """The meaning of a key; KeyError where the file lacks it."""
        return self._beside[name]

    def _walk(self, path: str, node: yaml.Node | None) -> None:
        if isinstance(node, yaml.SequenceNode):
            for entry in node.value:
                self._walk(f"{path}[].", entry)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                word = "N" if key.value.isdecimal() else key.value
                self._note(f"{path}{word}", key.value, key.start_mark.line)
                self._walk(f"{path}{word}.", value)

    def _note(self, name: str, key: str, line: int) -> None:
        if not self._lines[line].lstrip("- ").startswith(f"{key}:"):
            return  # one of several on a line, explained where it stands alone
        first = line
        while first and self._lines[first - 1].lstrip().startswith("#"):
            first -= 1
        above = " ".join(text.strip().lstrip("# ") for text in self._lines[first:line])
        beside = self._lines[line].partition(" # ")[2].strip()
        self.above.setdefault(name, above)
        told = "; ".join(filter(None, (beside, above)))
        self._beside.setdefault(name, told.removeprefix("required: "))


# ---- commands


def parser() -> argparse.ArgumentParser:
    """That of `liver`."""
    return new_parser()


def subcommands(of: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """Each command's one line of help and its own parser, by its name."""
    (action,) = (one for one in of._actions if isinstance(one, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {name: (helps[name], one) for name, one in action.choices.items()}


def commands() -> str:
    liver = parser()
    text = [
        "# Commands",
        str(liver.description),
        "`RUN` is a run directory, its name under `runs/`, or `latest`. `python -m liver_hpc` is "
        "`liver`, `python -m liver_hpc.submit` is `liver submit`; each command takes `--help`.",
        "Exit codes: 0 done; 1 the run failed, or its coordinator does not answer; 2 bad input, "
        "and nothing was launched; 3 the coordinator refused, and the run is undisturbed; 130 "
        "interrupted. Ctrl-C while following ends the watching, never the run.",
    ]
    found = subcommands(liver)
    links = [[f"[`liver {name}`](#liver-{name})", about] for name, (about, _) in found.items()]
    text.append(table(["command", "does"], links))
    for name, (about, one) in found.items():
        text += [f"## liver {name}", f"{about[0].upper()}{about[1:]}."]
        text += [table(["argument", "value", "meaning"], [_argument(a) for a in _shown(one)])]
        text += list(_exclusive(one))
    return "\n\n".join(text)


def _shown(of: argparse.ArgumentParser) -> list[argparse.Action]:
    hidden = (argparse.SUPPRESS,)
    return [a for a in of._actions if a.help not in hidden and a.dest != "help"]


def _argument(action: argparse.Action) -> list[str]:
    name = ", ".join(f"`{word}`" for word in action.option_strings) or f"`{action.metavar}`"
    choices = ", ".join(f"`{choice}`" for choice in action.choices or [])
    value = choices or (f"`{action.metavar}`" if action.metavar and action.option_strings else "")
    required = "; required" if action.required and action.option_strings else ""
    return [name, value, f"{action.help}{required}"]


def _exclusive(of: argparse.ArgumentParser) -> Iterator[str]:
    for group in of._mutually_exclusive_groups:
        names = " and ".join(f"`{a.option_strings[0]}`" for a in group._group_actions)
        yield f"Exactly one of {names}." if group.required else f"At most one of {names}."


# ---- metrics


def metrics() -> str:
    text = [
        "# Metrics",
        "`metrics.h5` in a run directory is an HDF5 file. Each table below is a one-dimensional "
        "dataset of compound rows. Times are seconds since the epoch, a time that was never "
        "reached is NaN, texts are UTF-8. The file's attributes are the versions of what ran, the "
        "host, and the resolved run file as `config`. `liver report --json` has what is derived "
        "from all this.",
    ]
    for name, hint in get_type_hints(records.RunRecords).items():
        if get_origin(hint) is list:
            (record,) = get_args(hint)
            about, meanings = explained(record)
            head = ["column", "type", "unit", "meaning"]
            text += [f"## /{name}", about, table(head, columns(record, meanings))]
    return "\n\n".join(text)


def explained(record: type[Any]) -> tuple[str, dict[str, str]]:
    """What a record's docstring says of it, and of each column: `column, another: meaning.`"""
    names = "|".join(field.name for field in dataclasses.fields(record))
    words = " ".join(inspect.cleandoc(record.__doc__ or "").split())
    about, *told = re.split(rf"(?:^|(?<=\. ))((?:{names})(?:, (?:{names}))*): ", words)
    meanings = {
        name: meaning.strip().removesuffix(".")
        for listed, meaning in zip(told[::2], told[1::2], strict=True)
        for name in listed.split(", ")
    }
    return about.strip(), meanings


def columns(record: type[Any], meanings: dict[str, str]) -> list[list[str]]:
    words = {float: "float64", int: "int64", bool: "bool", str: "text"}
    hints = get_type_hints(record)
    names = [field.name for field in dataclasses.fields(record)]
    return [[f"`{name}`", words[hints[name]], unit(name), meanings[name]] for name in names]


# ---- arguments of Megatron-LM


def megatron_lm_arguments() -> str:
    keys = [[f"`{key_text(key)}`", ", ".join(map(_option, of))] for key, of in KEYS.items()]
    refused = [[_options(group), group.why, group.instead] for group in REFUSED]
    return "\n\n".join(
        [
            "# Arguments of Megatron-LM",
            "What becomes of the arguments in `model.args` of a run that trains by a script of "
            "Megatron-LM, 0.16 to 0.19 and main ([how to](../how-to/megatron-lm.md)). A star "
            "stands for any text. Where values stand behind an option, it may have these. An "
            "option that is not listed here, and is none of the script's own, is refused.",
            "## The run file has their values",
            "These keys follow from arguments, or from Megatron's defaults of them, and need not "
            "stand in the run file; where they do, they must be equal.",
            table(["key", "follows from"], keys),
            "## The layouts decide",
            f"Left out, with a note: {LAYOUT.why}. {_options(LAYOUT)}.",
            "## Without effect",
            "A note names those that are given.",
            table(["arguments", "because"], [[_options(g), g.why] for g in NO_EFFECT]),
            "## Refused",
            table(["arguments", "because", "instead"], refused),
            "## Handed on",
            "The script gets these as they stand. What a model cannot have in one of the layouts "
            "is told when it is built, before the run begins.",
            table(["about", "arguments"], [[g.why, _options(g)] for g in PASSED]),
        ]
    )


def _options(group: Group) -> str:
    return ", ".join(map(_option, group.names.split()))


def _option(name: str) -> str:
    name, _, allowed = name.partition("=")
    values = f" ({' or '.join(allowed.split('|'))})" if allowed else ""
    return f"`--{name.replace('_', '-')}`{values}"


def main() -> None:
    REFERENCE.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
        print(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
