"""Of a run file: its page, and its JSON schema for editors. Made from the schema's types and
defaults, and from the comments of configs/reference.yaml."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from docs.markdown import table, unit
from liver_hpc.config.schema import RunConfig
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.megatron_lm.options import ScriptOptions

REFERENCE_FILE = Path(__file__).parents[1] / "configs" / "reference.yaml"
GPT_RECIPE, SCRIPT_RECIPE = "liver_hpc.recipes.gpt:GPT", "liver_hpc.recipes.megatron_lm:Pretrain"

Schema = dict[str, Any]


# ---- the page


def run_file() -> str:
    """One section a mapping, in the order of configs/reference.yaml."""
    comments = Comments(REFERENCE_FILE.read_text(encoding="utf-8"))
    schema = RunConfig.model_json_schema()
    model = GPTConfig.model_json_schema()
    schema["properties"]["model"] = model
    text = [
        "# The run file",
        "One YAML file is one whole run; an unknown key is an error. Relative paths are relative "
        "to the directory in which `liver` is started. Any key can be set on the command line, "
        "where it beats the file: `--set train.steps=100 --set 'layouts.2=[{tp: 2}]'`. "
        "[reference.yaml](../../configs/reference.yaml) is a file with every key. Those of `model` "
        "are the recipe's: here they are the default recipe's, GPT. With "
        f"`recipe: {SCRIPT_RECIPE}` they are `script` (required, the script's path), `megatron_lm` "
        "(the checkout; null: the script's directory) and `args` (a text, a list, or `{file: "
        "FILE}`). Keys that [follow from `args`](megatron-lm-arguments.md), as `train`, may be "
        "left out then.",
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
            bounds = {"exclusiveMinimum": ">", "minimum": ">="}
            bounds |= {"exclusiveMaximum": "<", "maximum": "<="}
            limits = [f"{sign} {entry[key]:.12g}" for key, sign in bounds.items() if key in entry]
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


# ---- the schema for editors


def editor_schema() -> str:
    """What an editor completes and checks run files by, with what each key means.

    It is milder than `liver submit`, which knows more. What a key of `model` may be depends on the
    recipe, and a Megatron-LM job says of its training what other run files must have.
    """
    schema, gpt, script = (
        kind.model_json_schema() for kind in (RunConfig, GPTConfig, ScriptOptions)
    )
    known = schema.pop("$defs")
    for name, of_recipe in (("GPTConfig", gpt), ("ScriptOptions", script)):
        known |= of_recipe.pop("$defs", {}) | {name: of_recipe}
    comments = Comments(REFERENCE_FILE.read_text(encoding="utf-8"))
    _describe("", schema, known, comments)
    _describe("model.", gpt, known, comments)
    layout = {"$ref": "#/$defs/LayoutSection"}
    either = {"anyOf": [layout, {"type": "array", "items": layout, "minItems": 1}]}
    counts = {"type": "object", "patternProperties": {"^[1-9][0-9]*$": either}}
    schema["properties"]["layouts"] = {
        "description": comments["layouts"],
        "oneOf": [{"const": "auto"}, counts | {"additionalProperties": False}],
    }
    schema["required"].remove("train")
    of_train = {"required": known["TrainSection"].pop("required")}
    wanted = {"required": ["train"], "properties": {"train": of_train}}
    model = {"properties": {"model": {"$ref": "#/$defs/GPTConfig"}}}
    of_script = {"properties": {"model": {"$ref": "#/$defs/ScriptOptions"}}, "required": ["model"]}
    schema["allOf"] = [
        {
            "if": _recipe_is(SCRIPT_RECIPE) | {"required": ["recipe"]},
            "then": of_script,
            "else": wanted,
        },
        {"if": _recipe_is(GPT_RECIPE), "then": model},
    ]
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    whole = dialect | {"title": "a run file of liver_hpc"} | _trimmed(schema | {"$defs": known})
    return json.dumps(whole, indent=1)


def _recipe_is(name: str) -> Schema:
    return {"properties": {"recipe": {"const": name}}}


def _describe(path: str, section: Schema, known: Schema, comments: Comments) -> None:
    """What the reference file says of each key, beside it; of a kind of section once."""
    if "description" in section:
        section["description"] = " ".join(section["description"].split())
    for key, entry in section["properties"].items():
        if "description" in entry:
            continue
        entry["description"] = comments[f"{path}{key}"]
        nested, place = _nested(entry, known, f"{path}{key}")
        if nested is not None and not all(
            "description" in inner for inner in nested["properties"].values()
        ):
            _describe(f"{place}.", nested, known, comments)


def _trimmed(value: Any) -> Any:
    """Without the names that pydantic makes up for each key, and a section's default: each of its
    keys has its own."""
    if isinstance(value, list):
        return [*map(_trimmed, value)]
    if not isinstance(value, dict):
        return value
    kept = {k: v for k, v in value.items() if k != "title" or not isinstance(v, str)}
    if "$ref" in kept:
        kept.pop("default", None)
    return {key: _trimmed(inner) for key, inner in kept.items()}
