"""What live handoffs and restarts from a checkpoint cost, side by side: from a run's own records,
or from the result of a benchmark."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.errors import ConfigError
from liver_hpc.report.derive import RunFigures
from liver_hpc.report.wording import layout_text
from liver_hpc.run.records import RunRecords

LIVE = "live"
_GROUPED_BY = ("model", "size", "state", "transition", "source", "target")
"""Columns of a benchmark's rows that say what was changed, as far as they are there."""


@dataclass(frozen=True)
class Costs:
    """Lost time of one method, one value a measurement, in seconds. `method` is LIVE for ours."""

    method: str
    lost_s: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.lost_s)

    @property
    def is_live(self) -> bool:
        return self.method.split(",")[0].strip().lower() == LIVE


@dataclass(frozen=True)
class Comparison:
    """The methods' costs of one change: the live one first, the others in their order."""

    change: str
    costs: tuple[Costs, ...]

    @property
    def speedup(self) -> float:
        """Lost time of the best restart over that of the live handoff; NaN where one is missing."""
        live = [costs.median_s for costs in self.costs if costs.is_live]
        others = [costs.median_s for costs in self.costs if not costs.is_live]
        if not live or not others or min(live) <= 0:
            return math.nan
        return min(others) / min(live)


def of_run(figures: RunFigures, records: RunRecords) -> list[Comparison]:
    """For each change that a restart was measured of: it, and the run's handoffs that did it."""
    live: dict[str, list[float]] = {}
    for attempt in figures.reconfigurations:
        if attempt.completed and math.isfinite(attempt.lost_s):
            live.setdefault(_change(attempt.source, attempt.target), []).append(attempt.lost_s)
    found: dict[str, dict[str, list[float]]] = {}
    for baseline in records.baselines:
        known = math.isfinite(baseline.lost_s)
        lost_s = baseline.lost_s if known else baseline.total_s
        if math.isfinite(lost_s):
            change = _change(baseline.source, baseline.target)
            found.setdefault(change, {LIVE: live.get(change, [])})
            found[change].setdefault(baseline.method, []).append(lost_s)
    return _comparisons(found)


def of_benchmark(path: Path) -> list[Comparison]:
    """From the JSON that a benchmark wrote: `samples`, or else `rows`, with `method` and `lost_s`,
    and with what was changed. Raises ConfigError, which names the file, for anything else."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in _rows(path):
        method, lost_s = row.get("method"), row.get("lost_s")
        if not isinstance(method, str) or not isinstance(lost_s, int | float):
            continue  # a measurement that failed has no figure
        if not math.isfinite(lost_s):
            continue
        change = ", ".join(str(row[name]) for name in _GROUPED_BY if row.get(name) is not None)
        found.setdefault(change, {LIVE: []}).setdefault(method, []).append(float(lost_s))
    comparisons = _comparisons(found)
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


def _comparisons(found: Mapping[str, Mapping[str, Sequence[float]]]) -> list[Comparison]:
    return [
        Comparison(
            change, tuple(Costs(m, tuple(values)) for m, values in methods.items() if values)
        )
        for change, methods in found.items()
    ]


def _change(source: str, target: str) -> str:
    return f"{layout_text(source)} \u2192 {layout_text(target)}"
