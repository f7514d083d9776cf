"""The transitions as two tables of a page: by what changes, and by model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.harness import figure_text
from benchmarks.transitions.cases import AXES
from liver_hpc.layout.coordinates import SEQUENCE_PARALLEL

Row = Mapping[str, Any]

_COLUMNS = ("transitions", "bit-equal", "apart, fp32", "apart, bf16")


def tables(rows: Sequence[Row]) -> str:
    """How many transitions there are of each kind, how many are bit-equal, and how far apart the
    steps after them are at most."""
    changes: dict[str, Callable[[Row], bool]] = {
        axis: lambda row, axis=axis: axis in row["axes"].split()  # type: ignore[misc]
        for axis in (*AXES, SEQUENCE_PARALLEL)
    }
    changes |= {
        "two axes or more": lambda row: len(row["axes"].split()) > 1,
        "an uneven batch": lambda row: bool(row["uneven"]),
    }
    models = dict.fromkeys(row["model"] for row in rows)
    by_change = [
        _line(f"`{name}`" if " " not in name else name, filter(is_so, rows))
        for name, is_so in changes.items()
    ]
    by_model = [_line(name, (row for row in rows if row["model"] == name)) for name in models]
    return "\n\n".join(_table(*one) for one in (("changes", by_change), ("model", by_model)))


def _table(first: str, lines: Iterable[str]) -> str:
    head = f"| {' | '.join((first, *_COLUMNS))} |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *lines])


def _line(name: str, rows: Iterable[Row]) -> str:
    chosen = [*rows]
    equal = sum(row["there"] and row["back"] and row["same_layout"] for row in chosen)
    apart: dict[bool, list[float]] = {False: [], True: []}
    for row in chosen:
        apart["bf16" in row["model"]].append(row["apart"])
    cells = [name, str(len(chosen)), str(equal)]
    cells += [figure_text(max(values)) if values else "" for values in apart.values()]
    return f"| {' | '.join(cells)} |"
