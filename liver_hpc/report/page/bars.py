"""Live handoffs against restarts: a bar for the median of each method, with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from liver_hpc.report.compare import Comparison, Costs
from liver_hpc.report.page.svg import (
    WIDTH,
    Scale,
    add,
    bar,
    drawing,
    fitting,
    label,
    text_width,
    time_axis,
)
from liver_hpc.report.wording import number_text

ROW, BAR = 26.0, 14.0
HEAD, AXIS = 30.0, 26.0


def draw(comparisons: Sequence[Comparison]) -> Element:
    """All on one scale from 0, so that lengths can be compared across changes too."""
    all_costs = [costs for each in comparisons for costs in each.costs]
    high_s = max(max(costs.lost_s) for costs in all_costs)
    height = len(comparisons) * HEAD + len(all_costs) * ROW + AXIS
    words = f"{len(all_costs)} methods in {len(comparisons)} changes, up to {number_text(high_s)} s"
    svg = drawing(height, "Lost time, live and by restart", words)
    left = min(max(text_width(costs.method) for costs in all_costs) + 16, 300.0)
    right = WIDTH - text_width("12.34 s (12.34 to 12.34, 10)") - 16
    scale = Scale(0.0, max(high_s, 1e-6), left, right)
    time_axis(svg, scale, HEAD - 8, height - AXIS + 4, 6)
    y = 0.0
    for each in comparisons:
        label(svg, 0, y + HEAD - 10, each.change, "name")
        if each.speedup >= 1:
            words = f"{each.speedup:.3g}\u00d7 less lost than by the best restart"
            label(svg, WIDTH, y + HEAD - 10, words, "axis", "end")
        y += HEAD
        for costs in each.costs:
            _method(svg, scale, y, costs)
            y += ROW
    return svg


def _method(svg: Element, scale: Scale, top: float, costs: Costs) -> None:
    low_s, high_s = min(costs.lost_s), max(costs.lost_s)
    method = fitting(costs.method, scale.start - 12)
    label(svg, scale.start - 8, top + ROW / 2 + 4, method, "axis", "end")
    y, middle = top + (ROW - BAR) / 2, top + ROW / 2
    words = f"{number_text(costs.median_s)} s"
    kind, title = "live" if costs.is_live else "restart", f"{costs.method}: median {words}"
    bar(svg, f"bar {kind}", scale, (0.0, costs.median_s), (y, BAR), title)
    if len(costs.lost_s) > 1:
        low, high = scale(low_s), scale(high_s)
        add(svg, "line", "spread", x1=low, x2=high, y1=middle, y2=middle)
        for x in (low, high):
            add(svg, "line", "spread", x1=x, x2=x, y1=y + 3, y2=y + BAR - 3)
        words += f" ({number_text(low_s)} to {number_text(high_s)}, {len(costs.lost_s)})"
    label(svg, scale(high_s) + 8, middle + 4, words, "value")
