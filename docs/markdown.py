"""Markdown that several pages of the reference are made of."""

from __future__ import annotations

UNITS = ("bytes", "s", "min", "steps", "hours")
"""What a name may end in, and is in."""


def table(head: list[str], rows: list[list[str]]) -> str:
    cells = [[cell.replace("|", r"\|").replace("<", "&lt;") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *cells))


def unit(name: str) -> str:
    ending = name.rpartition("_")[2]
    return ending if ending in UNITS else ""
