"""The map in docs/explanation/architecture.md, held against the code; and the README's length and
figures."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.test_floors import FLOORS

ROOT = Path(__file__).parents[2]
MAP = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
MOST_FILES = {
    "From SIGTERM on a node to `Prepare` on the wire": 10,
    "A bucket, from its tensor in the source to its tensor in the target": 6,
    "A run file's value to its use": 3,
}
README_WORDS = 700

Named = list[tuple[str, list[str]]]


def section(title: str, page: str = MAP) -> str:
    """From a heading to the next one of the same or a higher level."""
    level, _, rest = page.partition(f" {title}\n")
    marks = level.rpartition("\n")[2]
    assert marks, f"no heading {title!r}"
    return re.split(rf"^#{{1,{len(marks)}}} ", rest, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table's rows, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def walk(title: str) -> Named:
    """Each file, and the names that are said to be in it."""
    found = []
    for _, file, what in rows(section(title)):
        (path,) = re.findall(r"`([^`]+\.py)`", file)
        found.append((path, re.findall(r"`(\w+)`", what)))
    return found


def names_in(path: Path) -> set[str]:
    """Whatever is defined, called or mentioned in a module, by its name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = set(re.findall(r"\w+", path.name))
    for node in ast.walk(tree):
        for attribute in ("name", "id", "attr"):
            value = getattr(node, attribute, None)
            if isinstance(value, str):
                found.add(value)
    return found


@pytest.mark.parametrize("title", MOST_FILES)
def test_a_walk_passes_few_files_that_have_what_it_says(title: str) -> None:
    steps = walk(title)
    assert 0 < len(steps) <= MOST_FILES[title]
    assert len({path for path, _ in steps}) == len(steps)
    missing = [
        f"{path}: {name}"
        for path, names in steps
        for name in names
        if name not in names_in(ROOT / "liver_hpc" / path)
    ]
    assert missing == []


def test_answers_name_what_is_there() -> None:
    missing, answers = [], rows(section("Which file answers"))
    assert len(answers) > 30
    for _, answer in answers:
        for path, name in re.findall(r"`([\w/]+\.py)` \(`(\w+)`", answer):
            base = ROOT if path.startswith("benchmarks/") else ROOT / "liver_hpc"
            if name not in names_in(base / path):
                missing.append(f"{path}: {name}")
    assert missing == []


def test_the_floors_are_drawn_as_they_are() -> None:
    drawn = {}
    for line in re.findall(r"^ (\d  .*)$", section("The rooms"), re.MULTILINE):
        number, *names = line.split()
        drawn |= {f"liver_hpc.{name}": int(number) for name in names}
    assert drawn == {
        name: floor
        for name, floor in FLOORS.items()
        if name not in ("liver_hpc", "liver_hpc.__main__")
    }


def test_every_room_is_told_of() -> None:
    told = {name.strip("`") for name, _ in rows(section("The rooms"))}
    assert told == {path.parent.name for path in (ROOT / "liver_hpc").glob("*/__init__.py")}


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_the_readme_has_the_figures_of_the_page_that_it_names() -> None:
    """Of each column of its table the least and the largest, to two digits."""
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    table = rows(section("Handoffs against restarts", page).partition("###")[0])
    cells = [[*row[2:6], *row[8].split(" / ")] for row in table]
    cost, lost, steps, restart, live, anew = (
        f"{min(column):.2g} to {max(column):.2g}"
        for column in zip(*([float(cell) for cell in row] for row in cells), strict=True)
    )
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    for told in (
        f"was {cost} s; a restart lost {restart} s.",
        f"Lost time alone was {lost} s ({steps} of a step).",
        f"{live} s after the notice, by a restart after {anew} s.",
    ):
        assert told in readme
