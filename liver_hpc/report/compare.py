"""What live handoffs and restarts from a checkpoint cost, side by side, from the result of a
benchmark; or restarts alone, from the records of a benchmark's job."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.report.wording import layout_text
from liver_hpc.run.records import RunRecords

LIVE = "live"
_GROUPED_BY = ("model", "size", "state", "variant", "transition", "source", "target")
"""Columns of a benchmark's rows that say what was changed, as far as they are there."""


Comparisons = Mapping[str, Mapping[str, Sequence[float]]]
"""Of each change, of each method, LIVE first: cost in seconds, one value a measurement: lost time,
and what steps took longer beside it."""


def is_live(method: str) -> bool:
    return method.split(",")[0].strip().lower() == LIVE


def speedup(methods: Mapping[str, Sequence[float]]) -> float:
    """Cost of the best restart over that of the live handoff; NaN where one is missing."""
    live = [statistics.median(cost_s) for method, cost_s in methods.items() if is_live(method)]
    others = [
        statistics.median(cost_s) for method, cost_s in methods.items() if not is_live(method)
    ]
    return min(others) / min(live) if live and others and min(live) > 0 else math.nan


def of_run(records: RunRecords) -> Comparisons:
    """The restarts of a benchmark's job; no other run has any that were measured."""
    return _comparisons(
        (
            f"{layout_text(each.source)} \u2192 {layout_text(each.target)}",
            each.method,
            each.lost_s if math.isfinite(each.lost_s) else each.total_s,
        )
        for each in records.baselines
    )


def of_benchmark(path: Path) -> Comparisons:
    """From the JSON that a benchmark wrote: `samples`, or else `rows`, with `method`, `lost_s` and
    maybe `slowdown_s`, and with what was changed. Raises ConfigError, which names the file, for
    anything else."""
    measured = [
        (", ".join(str(row[name]) for name in _GROUPED_BY if row.get(name) not in (None, "")),
         row["method"], _seconds(row.get("lost_s")) + _seconds(row.get("slowdown_s", 0.0)))
        for row in _rows(path)
        if isinstance(row.get("method"), str)
    ]  # fmt: skip
    comparisons = _comparisons(measured)
    if not comparisons:
        raise ConfigError(f"{path}: wanted rows with 'method' and 'lost_s' (seconds), got none")
    return comparisons


def _seconds(value: Any) -> float:
    """NaN where a measurement has failed, which has no figure."""
    return float(value) if isinstance(value, int | float) else math.nan


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
    """Of changes, methods and costs; one that is not finite is no measurement."""
    found: dict[str, dict[str, list[float]]] = {}
    for change, method, cost_s in measured:
        if math.isfinite(cost_s):
            found.setdefault(change, {LIVE: []}).setdefault(method, []).append(cost_s)
    return {
        change: {method: cost_s for method, cost_s in methods.items() if cost_s}
        for change, methods in found.items()
    }
