"""What all benchmarks share: interleaved repeats, their result as a table and as JSON.

A benchmark is `python -m benchmarks.NAME`. It takes at least `--json FILE` and `--quick`, builds a
`BenchmarkResult` and hands it to `reported`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import psutil
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import liver_hpc
from benchmarks.reaper import nothing_outlives
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import write_whole
from liver_hpc.report.wording import strict
from liver_hpc.run.records import RunRecords

Value = TypeVar("Value")
Row = Mapping[str, Any]

QUICK = "quick"
"""In a result's method: it is no measurement, but shows that the benchmark works."""

_PACKAGES = ("liver_hpc", "torch", "megatron-core", "numpy", "h5py")
_OURS = (Path(liver_hpc.__file__).parent, Path(__file__).parent)


@dataclass(frozen=True)
class Spread:
    """Repeats of one figure in a few numbers: in the figure's own unit."""

    count: int
    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Raises ValueError without values."""
        if not values:
            raise ValueError("a spread of no values")
        return cls(len(values), statistics.median(values), min(values), max(values))

    def text(self) -> str:
        """`0.312 (0.305 to 0.340)`: median, smallest and largest."""
        return f"{figure_text(self.median)} ({figure_text(self.low)} to {figure_text(self.high)})"


@dataclass(frozen=True)
class BenchmarkResult:
    """What a benchmark found.

    figures: the claimed numbers. rows: one flat mapping a measurement, or a line of the table,
    all with the same keys. method: how it was measured, name -> words. spread: of figures or of
    whatever they were made of. repeats: the least number of repeats behind any figure. samples:
    single measurements, which only the JSON shows. machine: the `machine_facts` of what was
    measured on; empty: of the one that reports.
    """

    name: str
    figures: Mapping[str, float]
    rows: Sequence[Row] = ()
    method: Mapping[str, str] = field(default_factory=dict)
    spread: Mapping[str, Spread] = field(default_factory=dict)
    repeats: int = 1
    samples: Sequence[Row] = ()
    machine: Mapping[str, str | int | float] = field(default_factory=dict)


# ---- measuring


def interleaved(makers: Mapping[str, Callable[[], Value]], repeats: int) -> dict[str, list[Value]]:
    """Calls every maker once, then every one again, `repeats` times: A B A B.

    A machine that slows down meanwhile then slows all of them. Every second round goes backwards,
    so that none of them always comes after the same one.
    """
    values: dict[str, list[Value]] = {name: [] for name in makers}
    for name in order_of(list(makers), repeats):
        values[name].append(makers[name]())
    return values


def order_of(names: Sequence[str], repeats: int) -> Iterator[str]:
    """The order in which `interleaved` calls: there and back again."""
    for repeat in range(repeats):
        yield from (names if repeat % 2 == 0 else reversed(names))


def machine_facts() -> dict[str, str | int | float]:
    """What the figures depend on: processor, memory, versions, and how busy the machine was."""
    facts: dict[str, str | int | float] = {
        "system": f"{platform.system()} {platform.release()}",
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "load_1_minute": round(os.getloadavg()[0], 2),
    }
    facts |= _versions()
    accelerators = _accelerators()
    if accelerators:
        facts["accelerators"] = accelerators
    return facts


def machine_kind(facts: Mapping[str, str | int | float]) -> str:
    """Of facts, what figures of one result may not mix: processor, its cores, accelerators."""
    kind = f"{facts['processor']}, {facts['cores']} cores"
    return f"{kind}, {facts['accelerators']}" if "accelerators" in facts else kind


def software_digest(trees: Sequence[Path] = _OURS) -> str:
    """Of all Python files in `trees`, our own unless said, and of the versions of what they stand
    on: what was measured with another digest was measured of something else."""
    digest = hashlib.sha256(json.dumps(_versions()).encode())
    for tree in trees:
        for path in sorted(tree.rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(tree.parent)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _accelerators() -> str:
    """The NVIDIA driver's own list; torch, whose import takes seconds, is not asked."""
    names = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("Model:"):
                names.append(line.partition(":")[2].strip())
    return ", ".join(names)


# ---- saying


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks have."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options.add_argument(
        "--quick", action="store_true", help="the smallest sizes: to see that it works"
    )
    return options


def reported(measure: Callable[[], BenchmarkResult], given: argparse.Namespace) -> int:
    """Measures and reports; the exit code. What went wrong is one line on stderr, and code 1.

    What `measure` starts does not outlive this process. given: what `parser` has read; a quick
    result says so.
    """
    # As where it is installed: of two sides the one that starts more processes would pay more.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        if given.json is not None:
            _check_writable(given.json)
        with nothing_outlives():
            result = measure()
        if given.quick:
            result = replace(result, method={**result.method, QUICK: "the smallest sizes"})
        report(result, given.json)
    except LiverError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"error: {error}", style="red", markup=False, highlight=False
        )
        return 1
    return 0


def _check_writable(path: Path) -> None:
    """Raises ConfigError where a result could not be written: what it is made of takes hours."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"--json {path} cannot be written: {error.strerror}") from error
    if path.is_dir():
        raise ConfigError(f"--json {path} is a directory; name the file that is to be written")


def report(result: BenchmarkResult, json_path: Path | None, console: Console | None = None) -> None:
    """The table on the terminal, and the JSON where it is wanted."""
    print_table(result, console or Console())
    if json_path is not None:
        write_json(result, json_path)


def write_json(result: BenchmarkResult, path: Path) -> None:
    """The file is there as a whole or not at all. What is not known in it, or infinite, is null."""
    machine = dict(result.machine) or machine_facts()
    about = {"machine": machine, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    path.parent.mkdir(parents=True, exist_ok=True)
    found = strict(asdict(result) | about)
    write_whole(path, json.dumps(found, indent=2, allow_nan=False) + "\n")


def print_table(result: BenchmarkResult, console: Console) -> None:
    """The rows, then the figures with their spread, then how they were measured."""
    if result.rows:
        console.print(_rows_table(result))
    figures = Table(box=SIMPLE_HEAD, show_edge=False, title_justify="left", title="\nFigures")
    figures.add_column("figure", no_wrap=True)
    figures.add_column("value", justify="right", no_wrap=True)
    figures.add_column("median (low to high), repeats")
    for name, value in result.figures.items():
        spread = result.spread.get(name)
        wide = f"{spread.text()}, {spread.count}" if spread is not None else ""
        figures.add_row(name, figure_text(value), wide)
    console.print(figures)
    for name, words in result.method.items():
        console.print(f"{name}: {words}", style="dim", highlight=False, markup=False)


def _rows_table(result: BenchmarkResult) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, title_justify="left", title=f"\n{result.name}")
    table.padding = (0, 1, 0, 0)
    names = list(result.rows[0])
    for name in names:
        number = all(isinstance(row[name], int | float) for row in result.rows)
        # Where there is no room lines are broken between words, and heads within them.
        width = max(len(word) for row in result.rows for word in _cell(row[name]).split() or [""])
        table.add_column(
            name.replace("_", " "),
            justify="right" if number else "left",
            min_width=width,
            overflow="fold",
        )
    for row in result.rows:
        table.add_row(*(_cell(row[name]) for name in names))
    return table


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return figure_text(value) if isinstance(value, float) else str(value)


def figure_text(value: float) -> str:
    """At most four digits that say something: `0.0123`, `1.234`, `123.4`, `12345`, `-`."""
    if not math.isfinite(value):
        return "-"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def losses(records: RunRecords) -> dict[int, float]:
    """Of each step as it was done last."""
    return {step.step: step.loss for step in records.steps}


def loss_differences(some: Mapping[int, float], others: Mapping[int, float]) -> dict[int, float]:
    """Relative difference at each step that both have done, in their order. Raises LiverError at
    a loss that is no number."""
    found = {}
    for step in sorted(some.keys() & others.keys()):
        found[step] = abs(some[step] - others[step]) / abs(others[step])
        if not math.isfinite(found[step]):
            raise LiverError(f"step {step}: wanted two numbers, got {some[step]}, {others[step]}")
    return found


def loss_difference(
    some: Mapping[int, float], others: Mapping[int, float], beyond: int = 0
) -> float:
    """Largest of `loss_differences`. Raises LiverError where no step is `beyond` or later."""
    found = loss_differences(some, others)
    last = max(found, default=-1)
    if last < beyond:
        raise LiverError(f"wanted losses from step {beyond} on, got those to {last}")
    return max(found.values())
