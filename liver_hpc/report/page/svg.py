"""SVG drawings made by hand: elements, scales, ticks. Colours come from the page's classes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from xml.etree.ElementTree import Element, SubElement

from liver_hpc.report.wording import clock_text

WIDTH = 960.0
"""Of every drawing, in units that are about the pixels of a screen; a narrow page scrolls it."""
FONT = 12.0


def text_width(text: str) -> float:
    return 0.56 * FONT * len(text)


def fitting(text: str, width: float) -> str:
    """The text, or as much of its begin as there is room for."""
    if text_width(text) <= width:
        return text
    return text[: max(int(width / text_width("x")) - 1, 1)] + "\u2026"


def drawing(height: float, title: str, description: str) -> Element:
    """An empty drawing that tells its name and content to those who do not see it."""
    return Element(
        "svg",
        {
            "viewBox": f"0 0 {number(WIDTH)} {number(height)}",
            "role": "img",
            "aria-label": f"{title}. {description}",
            "font-size": number(FONT),
        },
    )


def add(parent: Element, tag: str, classes: str, title: str = "", **places: float) -> Element:
    """A shape with its places; what points at it is told the title."""
    attributes = {name: number(value) for name, value in places.items()}
    shape = SubElement(parent, tag, {"class": classes, **attributes})
    if title:
        SubElement(shape, "title").text = title
    return shape


def label(
    parent: Element, x: float, y: float, words: str, classes: str = "", anchor: str = "start"
) -> None:
    """A text whose baseline is at y."""
    places = {"x": number(x), "y": number(y), "class": classes, "text-anchor": anchor}
    text = SubElement(parent, "text", {name: value for name, value in places.items() if value})
    text.text = words


def path(parent: Element, points: Iterable[tuple[float, float]], classes: str) -> Element:
    """A line through all points; it is broken where one has a NaN."""
    words, pen_down = [], False
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            words.append(f"{'L' if pen_down else 'M'}{number(x)} {number(y)}")
            pen_down = True
        else:
            pen_down = False
    return SubElement(parent, "path", {"class": classes, "d": "".join(words)})


def number(value: float) -> str:
    """At most two places, and never in a form that SVG does not know."""
    if not math.isfinite(value):
        return "0"
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text in ("-0", "") else text


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto places from `start` to `end`, both ends clipped."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        if math.isnan(value):
            return math.nan
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.5
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def bar(
    parent: Element,
    classes: str,
    scale: Scale,
    ends: tuple[float, float],
    place: tuple[float, float],
    title: str = "",
) -> None:
    """A rectangle, a unit wide at least. ends: values on the scale. place: its top and height."""
    x, end = map(scale, ends)
    y, height = place
    add(parent, "rect", classes, title, x=x, y=y, width=max(end - x, 1.0), height=height)


def time_axis(parent: Element, time: Scale, top: float, bottom: float, count: int = 10) -> None:
    """Lines from top to bottom at round times since the scale's begin, and their names below."""
    values = _time_ticks(time.high - time.low, count)
    for value in values:
        x = time(time.low + value)
        add(parent, "line", "grid", x1=x, x2=x, y1=top, y2=bottom)
        text = clock_text(round(value)) if values[-1] >= 60 else f"{value:g} s"
        near_end = x + text_width(text) / 2 > WIDTH
        label(parent, x, bottom + 13, text, "axis", "end" if near_end else "middle")


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round values within the bounds."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    return _multiples(low, high, step)


_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400)


def _time_ticks(high_s: float, count: int) -> list[float]:
    """Fractions of a second where the span is that short."""
    rough = high_s / count
    if rough < _TIME_STEPS_S[0] or not math.isfinite(rough):
        return ticks(0.0, high_s, count)
    fitting_steps = (step for step in _TIME_STEPS_S if step >= rough)
    return _multiples(0.0, high_s, next(fitting_steps, 86400 * math.ceil(rough / 86400)))


def tick_text(value: float) -> str:
    """`0.25`, `40`, `12k`, `3M`."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 10 or (abs(value) >= unit and unit > 1e3):
            return f"{value / unit:g}{name}"
    return f"{value:.10g}"


def _multiples(low: float, high: float, step: float) -> list[float]:
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]
