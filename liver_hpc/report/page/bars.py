"""Live handoffs against restarts: a bar for the median of each method, with its spread."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from liver_hpc.report.compare import Comparison, Costs
from liver_hpc.report.page.svg import Form, Scale, add, drawing, label, rect, ticks
from liver_hpc.report.wording import number_text

ROW, BAR = 26.0, 14.0
HEAD, AXIS = 30.0, 26.0


def draw(comparisons: Sequence[Comparison], form: Form) -> Element:
    """All on one scale from 0, so that lengths can be compared across changes too."""
    high_s = max(max(costs.lost_s) for each in comparisons for costs in each.costs)
    rows = sum(len(each.costs) for each in comparisons)
    row = ROW + (15 if form.is_narrow else 0)
    head = HEAD + (16 if form.is_narrow else 0)
    height = len(comparisons) * head + rows * row + AXIS
    svg = drawing(
        form,
        height,
        "Lost time, live and by restart",
        f"{rows} methods in {len(comparisons)} changes, up to {number_text(high_s)} s",
    )
    names = [costs.method for each in comparisons for costs in each.costs]
    left = 8.0 if form.is_narrow else min(max(map(form.text_width, names)) + 16, 300.0)
    room = form.text_width("12.34 s (12.34 to 12.34, 10)")
    scale = Scale(0.0, max(high_s, 1e-6), left, form.width - (80 if form.is_narrow else room))
    for value in ticks(0.0, high_s, 3 if form.is_narrow else 6):
        x = scale(value)
        add(svg, "line", "grid", x1=x, x2=x, y1=head - 8, y2=height - AXIS + 4)
        label(svg, x, height - AXIS + 18, f"{value:g} s", "axis", "middle")
    y = 0.0
    for each in comparisons:
        _title(svg, form, each, y + HEAD - 10)
        y += head
        for costs in each.costs:
            _bar(svg, form, scale, y, costs)
            y += row
    return svg


def _title(svg: Element, form: Form, comparison: Comparison, y: float) -> None:
    """What was changed, and how much less the live way lost; below each other where narrow."""
    label(svg, 0, y, comparison.change, "name")
    if comparison.speedup >= 1:
        x, y = (0.0, y + 16) if form.is_narrow else (form.width, y)
        words = f"{comparison.speedup:.3g}\u00d7 less lost than by the best restart"
        label(svg, x, y, words, "axis", "start" if form.is_narrow else "end")


def _bar(svg: Element, form: Form, scale: Scale, top: float, costs: Costs) -> None:
    low_s, high_s = min(costs.lost_s), max(costs.lost_s)
    kind = "live" if costs.is_live else "restart"
    if form.is_narrow:
        label(svg, scale.start, top + 11, costs.method, "axis")
        top += 15
    else:
        method = form.fitting(costs.method, scale.start - 12)
        label(svg, scale.start - 8, top + ROW / 2 + 4, method, "axis", "end")
    y = top + (ROW - BAR) / 2
    end = scale(costs.median_s)
    words = f"{number_text(costs.median_s)} s"
    place = (scale.start, y, max(end - scale.start, 1.0), BAR)
    rect(svg, f"bar {kind}", place, f"{costs.method}: median {words}")
    if len(costs.lost_s) > 1:
        add(
            svg, "line", "spread", x1=scale(low_s), x2=scale(high_s), y1=y + BAR / 2, y2=y + BAR / 2
        )
        for at_s in (low_s, high_s):
            x = scale(at_s)
            add(svg, "line", "spread", x1=x, x2=x, y1=y + 3, y2=y + BAR - 3)
        if not form.is_narrow:
            spread = f"{number_text(low_s)} to {number_text(high_s)}"
            words += f" ({spread}, {len(costs.lost_s)})"
    label(svg, scale(high_s) + 8, y + BAR / 2 + 4, words, "value")
