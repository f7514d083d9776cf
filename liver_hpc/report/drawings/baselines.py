"""Live handoffs against restarts: a bar for the median of each method, with its spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from liver_hpc.report.compare import Comparisons, is_live, speedup
from liver_hpc.report.drawings.canvas import (
    Color,
    draw_bar,
    drawable,
    name_rows,
    new_figure,
)
from liver_hpc.report.wording import number_text


def draw(comparisons: Comparisons) -> Figure:
    """All on one scale from 0, so that lengths can be compared across changes too. Each change has
    a row for its name, then one for each method."""
    rows = [
        (change, method, cost_s)
        for change, methods in comparisons.items()
        for method, cost_s in (("", ()), *methods.items())
    ]
    high_s = max(max(cost_s, default=0.0) for _, _, cost_s in rows)
    number = len(rows) - len(comparisons)
    words = f"{number} methods in {len(comparisons)} changes, up to {number_text(high_s)} s"
    figure = new_figure(0.7 + 0.24 * len(rows), "Cost, live and by restart", words)
    axes = figure.subplots()
    axes.set_xlim(0, 1.32 * max(high_s, 1e-6))
    axes.set_xlabel("lost time and slower steps in seconds: median, least and greatest (number)")
    axes.grid(visible=False, axis="y")
    name_rows(axes, [method for _, method, _ in rows])
    for row, (change, method, cost_s) in enumerate(rows):
        if cost_s:
            _method(axes, row, method, cost_s)
            continue
        axes.text(0, row, drawable(change), weight="bold", va="center")
        if (times := speedup(comparisons[change])) >= 1:
            words = f"{times:.3g}\u00d7 less than by the best restart"
            across = axes.get_yaxis_transform()
            axes.text(1, row, words, color=Color.SOFT, ha="right", va="center", transform=across)
    return figure


def _method(axes: Axes, row: int, method: str, cost_s: Sequence[float]) -> None:
    low_s, high_s, median_s = min(cost_s), max(cost_s), statistics.median(cost_s)
    words = f"{number_text(median_s)} s"
    color = Color.BLUE if is_live(method) else Color.ORANGE
    draw_bar(axes, row, 0, median_s, f"{method}: median {words}", color=color)
    if len(cost_s) > 1:
        spread = [[median_s - low_s], [high_s - median_s]]
        axes.errorbar(median_s, row, xerr=spread, ecolor=Color.INK, elinewidth=0.9, capsize=2)
        words += f" ({number_text(low_s)} to {number_text(high_s)}, {len(cost_s)})"
    axes.annotate(
        words, (high_s, row), (6, 0), textcoords="offset points", va="center", weight="bold"
    )
