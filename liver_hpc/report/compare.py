"""What live handoffs and restarts from a checkpoint cost, side by side: from a run's own records,
or from the result of a benchmark."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.report.derive import RunFigures
from liver_hpc.report.wording import layout_text
from liver_hpc.run.records import BaselineRecord, ReconfigurationRecord, RunRecords

LIVE = "live"
_GROUPED_BY = ("model", "size", "state", "transition", "source", "target")
"""Columns of a benchmark's rows that say what was changed, as far as they are there."""


Comparisons = Mapping[str, Mapping[str, Sequence[float]]]
"""Of each change, of each method, LIVE first: lost time in seconds, one value a measurement."""


def is_live(method: str) -> bool:
    return method.split(",")[0].strip().lower() == LIVE


def speedup(methods: Mapping[str, Sequence[float]]) -> float:
    """Lost time of the best restart over that of the live handoff; NaN where one is missing."""
    live = [statistics.median(lost_s) for method, lost_s in methods.items() if is_live(method)]
    others = [
        statistics.median(lost_s) for method, lost_s in methods.items() if not is_live(method)
    ]
    return min(others) / min(live) if live and others and min(live) > 0 else math.nan


def of_run(figures: RunFigures, records: RunRecords) -> Comparisons:
    """For each change that a restart was measured of: it, and the run's handoffs that did it."""
    restarts = [
        (_change(each), each.method, each.lost_s if math.isfinite(each.lost_s) else each.total_s)
        for each in records.baselines
    ]
    changes = {change for change, _, lost_s in restarts if math.isfinite(lost_s)}
    done = [attempt for attempt in figures.reconfigurations if attempt.completed]
    live = [(_change(each), LIVE, each.lost_s) for each in done if _change(each) in changes]
    return _comparisons(restarts + live)


def of_benchmark(path: Path) -> Comparisons:
    """From the JSON that a benchmark wrote: `samples`, or else `rows`, with `method` and `lost_s`,
    and with what was changed. Raises ConfigError, which names the file, for anything else."""
    measured = [
        (", ".join(str(row[name]) for name in _GROUPED_BY if row.get(name) is not None),
         row["method"], float(row["lost_s"]))
        for row in _rows(path)
        # A measurement that failed has no figure.
        if isinstance(row.get("method"), str) and isinstance(row.get("lost_s"), int | float)
    ]  # fmt: skip
    comparisons = _comparisons(measured)
    if not comparisons:
        raise ConfigError(f"{path}: wanted rows with 'method' and 'lost_s' (seconds), got none")
    return comparisons


def _rows(path: Path) -> Sequence[Mapping[str, Any]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no result of a benchmark: {error}") from None
    rows = document.get("samples") or document.get("rows") if isinstance(document, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} is no result of a benchmark: it has no list of `rows`")
    return rows


def _comparisons(measured: Iterable[tuple[str, str, float]]) -> Comparisons:
    """Of changes, methods and lost times; one that is not finite is no measurement."""
    found: dict[str, dict[str, list[float]]] = {}
    for change, method, lost_s in measured:
        if math.isfinite(lost_s):
            found.setdefault(change, {LIVE: []}).setdefault(method, []).append(lost_s)
    return {
        change: {method: lost_s for method, lost_s in methods.items() if lost_s}
        for change, methods in found.items()
    }


def _change(record: BaselineRecord | ReconfigurationRecord) -> str:
    return f"{layout_text(record.source)} \u2192 {layout_text(record.target)}"
