"""`python -m benchmarks.summary r.json ... --page docs/explanation/performance.md`: results as a
section of it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.baseline.methods import Method
from benchmarks.baseline.phases import EXISTS
from benchmarks.harness import QUICK, figure_text
from benchmarks.summary.transitions import tables
from benchmarks.summary.words import FIGURES
from liver_hpc.errors import ConfigError

BEGIN = "<!-- made by python -m benchmarks.summary; what stands here is written anew -->"
END = "<!-- end of what benchmarks.summary made -->"

LIVE, RESTART = "live", Method.MEGATRON.value
MACHINE = ("processor", "cores", "memory_bytes", "accelerators")
VERSIONS = ("torch", "megatron-core")

WORDS = (
    *("lost time", "cost", "restart", "exists", "warm", "floor", "slowdown"),
    *("array", "nodes", "cores", "variants", "storage", "links"),
)

Result = Mapping[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.summary", description=__doc__)
    parser.add_argument("results", nargs="+", type=Path, metavar="FILE", help="what --json wrote")
    parser.add_argument("--page", type=Path, help="rewrite the section there; else print it")
    given = parser.parse_args(arguments)
    try:
        text = section([read_result(path) for path in given.results])
        if given.page is None:
            print(text)
        else:
            given.page.write_text(replaced(given.page, text), encoding="utf-8")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def read_result(path: Path) -> Result:
    """A benchmark's JSON. Raises ConfigError, also where it was made with --quick."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: wanted a benchmark's result, got {error}") from error
    missing = [key for key in ("name", "figures", "machine", "date", "rows") if key not in found]
    if missing:
        raise ConfigError(f"{path}: wanted a benchmark's result, it has no {missing[0]!r}")
    if QUICK in found.get("method", {}):
        raise ConfigError(f"{path}: wanted a measurement, it was made with --quick")
    return dict(found)


def replaced(page: Path, text: str) -> str:
    """The file with its section made anew. Raises ConfigError where it has none."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page}: wanted the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


# ---- text


def section(results: Sequence[Result]) -> str:
    """Where and when, the comparison with restarts, transitions, then one line a figure. Raises
    ConfigError for two results of one benchmark, which nobody could tell apart."""
    names = [result["name"] for result in results]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"wanted one result of each benchmark, got several: {sorted(twice)}")
    where, marks = _where(results)
    parts = [where]
    for result, mark in zip(results, marks, strict=True):
        if result["name"].startswith("reconfigure"):
            parts.append(_comparison(result) + mark)
        elif result["name"] == "transitions":
            parts.append(tables(result["rows"]) + (f"\n\n{mark.strip()}" if mark else ""))
    parts.append(_figures(results, marks))
    return "\n\n".join(parts)


def _where(results: Sequence[Result]) -> tuple[str, list[str]]:
    """Machines and days, and of each result which of these are its own, where there are several."""
    lines: list[str] = []
    indices = []
    for result in results:
        facts = dict(result["machine"])
        facts["memory_bytes"] = f"{facts['memory_bytes'] / 2**30:.0f} GiB"
        facts["cores"] = f"{facts['cores']} cores"
        named = [str(facts[name]) for name in MACHINE if name in facts]
        named += [f"{name} {facts[name]}" for name in VERSIONS if name in facts]
        line = f"{', '.join(named)}; {result['date'][:10]}"
        if line not in lines:
            lines.append(line)
        indices.append(lines.index(line))
    if len(lines) == 1:
        return f"Measured on: {lines[0]}.", [""] * len(results)
    said = ". And on: ".join(f"({number}) {line}" for number, line in enumerate(lines, start=1))
    return f"Measured on: {said}.", [f" Measured on ({index + 1})." for index in indices]


def _comparison(result: Result) -> str:
    """Live against restart, by size and transition."""
    rows = {
        (row.get("variant", ""), row["size"], row["transition"], row["method"]): row
        for row in result["rows"]
    }
    spread = result["spread"]
    lines = [] if result["name"] == "reconfigure" else [f"`{result['name']}`:", ""]
    lines += [
        "| state | transition | live: cost s | lost s | in steps | restart: lost s | over lost "
        "| over cost | checkpoint exists: lost s | warm processes: lost s "
        "| notice to first step, live / restart s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for (variant, size, transition, method), live in rows.items():
        if method != LIVE:
            continue
        what = " ".join(filter(None, (variant, size, transition)))
        cells = [
            ", ".join(filter(None, (size, variant))),
            transition,
            _spread(spread[f"cost_s {what} {LIVE}"]),
            _spread(spread[f"lost_s {what} {LIVE}"]),
            figure_text(live["lost_steps"]),
        ]
        restart, exists, warm = (
            rows.get((variant, size, transition, method))
            for method in (RESTART, RESTART + EXISTS, Method.MEGATRON_WARM.value)
        )
        ready = f"{live['notice_to_first_step_s']:.1f} / "
        if restart is None:
            cells += ["-", "-", "-", *_lost(exists, warm), f"{ready}-"]
        else:
            cells += [
                _spread(spread[f"lost_s {what} {RESTART}"]),
                figure_text(restart["over_live"]),
                figure_text(restart["lost_s"] / live["cost_s"]) if live["cost_s"] > 0 else "-",
                *_lost(exists, warm),
                f"{ready}{restart['notice_to_first_step_s']:.1f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    words = result["method"]
    turns = ", interleaved" if "order" in words else ""
    lines += ["", f"Median (lowest to highest) of {result['repeats']} repeats{turns}."]
    if failed := result["figures"].get("failed_attempts"):
        lines[-1] += f" Attempts to measure a cell that failed: {figure_text(failed)}."
    lines += [f"{name.capitalize()}: {words[name]}." for name in WORDS if name in words]
    return "\n".join(lines)


def _lost(*rows: Mapping[str, Any] | None) -> list[str]:
    return ["-" if row is None else f"{row['lost_s']:.2f}" for row in rows]


def _spread(spread: Mapping[str, float]) -> str:
    return f"{spread['median']:.3g} ({spread['low']:.3g} to {spread['high']:.3g})"


def _figures(results: Sequence[Result], marks: Sequence[str]) -> str:
    """A line for every figure that there are words for, in their order."""
    lines = ["| figure | value | low to high | what it says |", "| --- | --- | --- | --- |"]
    for benchmark, figures in FIGURES.items():
        for result, mark in zip(results, marks, strict=True):
            if result["name"] != benchmark:
                continue
            for figure, words in figures.items():
                value = result["figures"].get(figure)
                if value is None:
                    continue
                spread = result["spread"].get(figure)
                wide = "" if spread is None else _wide(spread)
                words += mark and f".{mark}"
                lines.append(f"| `{figure}` | {figure_text(value)} | {wide} | {words} |")
    return "\n".join(lines)


def _wide(spread: Mapping[str, float]) -> str:
    low, high = figure_text(spread["low"]), figure_text(spread["high"])
    return f"{low} to {high}, {spread['count']}"


if __name__ == "__main__":
    sys.exit(main())
