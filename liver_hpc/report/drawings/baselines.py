"""Live handoffs against restarts: a bar for the median of each method, with its spread."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from liver_hpc.report.compare import Comparison
from liver_hpc.report.drawings.canvas import Color, draw_bar, name_rows, new_figure
from liver_hpc.report.wording import number_text


def draw(comparisons: Sequence[Comparison]) -> Figure:
    """All on one scale from 0, so that lengths can be compared across changes too. Each change has
    a row for its name, then one for each method."""
    every = [costs for each in comparisons for costs in each.costs]
    high_s = max(max(costs.lost_s) for costs in every)
    names = [name for each in comparisons for name in ("", *(c.method for c in each.costs))]
    words = f"{len(every)} methods in {len(comparisons)} changes, up to {number_text(high_s)} s"
    figure = new_figure(0.7 + 0.24 * len(names), "Lost time, live and by restart", words)
    axes = figure.subplots()
    axes.set_xlim(0, 1.32 * max(high_s, 1e-6))
    axes.set_xlabel("lost time in seconds: median, least and greatest (number of measurements)")
    axes.grid(visible=False, axis="y")
    name_rows(axes, names)
    row = 0
    for each in comparisons:
        axes.text(0, row, each.change, weight="bold", va="center")
        if math.isfinite(each.speedup) and each.speedup >= 1:
            words = f"{each.speedup:.3g}\u00d7 less lost than by the best restart"
            across = axes.get_yaxis_transform()
            axes.text(1, row, words, color=Color.SOFT, ha="right", va="center", transform=across)
        for costs in each.costs:
            row += 1
            low_s, high_s, median_s = min(costs.lost_s), max(costs.lost_s), costs.median_s
            words = f"{number_text(median_s)} s"
            color = Color.BLUE if costs.is_live else Color.ORANGE
            draw_bar(axes, row, 0, median_s, f"{costs.method}: median {words}", color=color)
            if len(costs.lost_s) > 1:
                spread = [[median_s - low_s], [high_s - median_s]]
                axes.errorbar(
                    median_s, row, xerr=spread, ecolor=Color.INK, elinewidth=0.9, capsize=2
                )
                words += f" ({number_text(low_s)} to {number_text(high_s)}, {len(costs.lost_s)})"
            place = (high_s, row)
            axes.annotate(
                words, place, (6, 0), textcoords="offset points", va="center", weight="bold"
            )
        row += 1
    return figure
