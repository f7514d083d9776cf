"""Writes docs/reference from the code: `make docs`, or `python -m docs.generate`. A test compares
what lies there with `pages()`."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from docs.markdown import table, unit
from docs.run_file import editor_schema, run_file
from liver_hpc.cli.options import EXAMPLES, new_parser
from liver_hpc.config.problems import key_text
from liver_hpc.recipes.megatron_lm.owned import KEYS
from liver_hpc.recipes.megatron_lm.tables import LAYOUT, NO_EFFECT, PASSED, REFUSED, Group
from liver_hpc.run import records

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """Each page's text by the name of its file."""
    made = {
        "run-file.md": run_file(),
        "commands.md": commands(),
        "metrics.md": metrics(),
        "megatron-lm-arguments.md": megatron_lm_arguments(),
    }
    note = "<!-- Made by `make docs` from the code: change that, not this page. -->\n\n"
    texts = {name: f"{note}{text.strip()}\n" for name, text in made.items()}
    return texts | {"run-file.schema.json": f"{editor_schema()}\n"}


# ---- commands


def subcommands(of: argparse.ArgumentParser) -> dict[str, tuple[str, argparse.ArgumentParser]]:
    """Each command's one line of help and its own parser, by its name."""
    (action,) = (one for one in of._actions if isinstance(one, argparse._SubParsersAction))
    helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
    return {name: (helps[name], one) for name, one in action.choices.items()}


def commands() -> str:
    liver = new_parser()
    text = [
        "# Commands",
        str(liver.description),
        "`RUN` is a run directory, its name under `runs/`, or `latest`. `python -m liver_hpc` is "
        "`liver`, `python -m liver_hpc.submit` is `liver submit`; each command takes `--help`.",
        "Exit codes: 0 done; 1 the run failed or is over, what was asked for did not come about "
        "(the launch, the checkpoint of `stop`), nobody answers, or `doctor` or `check-model` "
        "found something; 2 bad input, and nothing was launched; 3 the coordinator refused, and "
        "the run is undisturbed; 130 interrupted. Ctrl-C while following ends the watching, never "
        "the run.",
    ]
    found = subcommands(liver)
    links = [[f"[`liver {name}`](#liver-{name})", about] for name, (about, _) in found.items()]
    text.append(table(["command", "does"], links))
    for name, (about, one) in found.items():
        text += [f"## liver {name}", f"{about[0].upper()}{about[1:]}."]
        text += [f"```sh cluster\n{EXAMPLES[name]}```"]
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
        "host, the start of the Slurm job (`job`) and, of a local run, of the machine (`boot`), "
        "and the resolved run file as `config`. `liver report --json` has what is derived from all "
        "this.",
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
            "stand in the run file; where they do, they must be equal. Only `checkpoint.keep` may "
            "be another: Megatron removes no checkpoint, so without it all stay.",
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
