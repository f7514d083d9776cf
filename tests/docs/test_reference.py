"""docs/reference says what the code says."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from docs import generate
from liver_hpc.cli.options import new_parser
from liver_hpc.config.schema import RunConfig

PAGES = generate.pages()
BY_HAND = {"journal.md", "megatron-lm-versions.md"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_makes(name: str) -> None:
    path = generate.REFERENCE / name
    assert path.is_file(), f"there is no docs/reference/{name}: run `make docs`"
    assert path.read_text(encoding="utf-8") == PAGES[name], "out of date: run `make docs`"


def test_no_page_is_left_over() -> None:
    """These are written by hand."""
    assert {path.name for path in generate.REFERENCE.iterdir()} - BY_HAND == PAGES.keys()


def test_every_key_of_the_schema_is_in_the_page() -> None:
    sections = RunConfig.model_json_schema()["$defs"].values()
    keys = {key for section in sections for key in section["properties"]}
    assert len(keys) > 80
    assert [key for key in keys if f"| `{key}` |" not in PAGES["run-file.md"]] == []


def test_a_key_has_type_unit_default_and_meaning() -> None:
    rows = PAGES["run-file.md"].splitlines()
    kind = "number > 0 and &lt;= 1000000"
    assert f"| `exit_s` | {kind} | s | `10.0` | from being told to exit to being killed |" in rows
    assert any(row.startswith("| `max` | whole number > 0 |  | required |") for row in rows)


def test_every_option_is_in_the_page() -> None:
    for name, (_, parser) in generate.subcommands(new_parser()).items():
        _, _, rest = PAGES["commands.md"].partition(f"## liver {name}\n")
        section = rest.partition("\n## ")[0]
        shown = [a for a in parser._actions if a.help != "==SUPPRESS==" and a.dest != "help"]
        words = [word for action in shown for word in action.option_strings]
        assert [word for word in words if f"`{word}`" not in section] == []


@dataclass
class Example:
    """One thing.

    first, second: two numbers. third: "a" or "b: c"; an end.
    """

    first: int
    second: int
    third: str
    fourth: int


def test_what_a_docstring_says_of_columns() -> None:
    about, meanings = generate.explained(Example)
    assert about == "One thing."
    assert meanings == {
        "first": "two numbers", "second": "two numbers", "third": '"a" or "b: c"; an end'
    }  # fmt: skip


def test_a_column_of_which_nothing_is_said_is_an_error() -> None:
    _, meanings = generate.explained(Example)
    with pytest.raises(KeyError, match="fourth"):
        generate.columns(Example, meanings)
