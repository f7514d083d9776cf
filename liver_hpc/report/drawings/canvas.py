"""What all drawings share: colours, bars that tell what they are, and the way onto a page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any
from xml.etree.ElementTree import Element, SubElement, fromstring

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from liver_hpc.report.wording import clock_text

_WIDTH = 10.0  # inches, of every drawing
_LEAST = 1 / 800  # of the axis, so that a bar can be seen
_MOST_CHARACTERS = 28
_TOLD = "told: "
"""Before what is told of a shape, where matplotlib keeps a shape's id."""
_TIME_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200)
_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


class Color(StrEnum):
    """Okabe and Ito's palette, which the colour-blind tell apart. On a page each is the style
    sheet's variable of this name, so that a dark page lightens it."""

    INK = "#16191d"
    SOFT = "#59626c"
    HAIR = "#dfe3e8"
    PAGE = "#ffffff"
    STRIP = "#eef1f4"
    STRIP_2 = "#e0e5ea"
    BLUE = "#0072b2"
    ORANGE = "#e69f00"
    LIGHT_ORANGE = "#f8e2b3"
    GREEN = "#009e73"
    RED = "#d55e00"
    SKY = "#56b4e9"
    PURPLE = "#b0568a"
    LIGHT_PURPLE = "#e7ccdc"
    GRAY = "#8a939c"
    BAD = "#b24700"


_VARIABLES = {c.value: f"var(--{c.name.lower().replace('_', '-')})" for c in Color}


def styled() -> AbstractContextManager[None]:
    """In it a drawing is made, and saved."""
    return matplotlib.style.context(("default", "liver_hpc.report.drawings.drawings"))


def new_figure(height: float, title: str, description: str) -> Figure:
    """Empty, of a height in inches. Title and description are for those who do not see it."""
    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    figure.set_label(f"{title}. {description}")
    return figure


def drawable(text: str, most: int = 1000) -> str:
    """Without what neither a font nor SVG knows, and so many characters long at the most."""
    known = _NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)
    return known if len(known) <= most else f"{known[: most - 1]}\u2026"


def tell(shape: Any, words: str) -> None:
    shape.set_gid(_TOLD + drawable(words))


def draw_bar(axes: Axes, row: float, begin: float, end: float, told: str, **style: Any) -> None:
    """Along the x axis, which has its bounds already; nothing where begin or end is not known.
    told: to whoever points at it."""
    if math.isfinite(begin) and math.isfinite(end):
        low, high = axes.get_xlim()
        width = max(end - begin, (high - low) * _LEAST)
        (drawn,) = axes.barh(row, width, left=begin, **{"height": 0.62, **style})
        tell(drawn, told)


def draw_point(axes: Axes, x: float, y: float, told: str, **style: Any) -> None:
    (drawn,) = axes.plot(x, y, linestyle="", markersize=9, **style)
    tell(drawn, told)


def name_rows(axes: Axes, names: Iterable[str]) -> None:
    """From the top down, one under the other."""
    shown = [drawable(name, _MOST_CHARACTERS) for name in names]
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)


def run_time(axes: Axes, end_s: float) -> None:
    """The axis of a run's time, from 0, with marks at round times."""
    axes.set_xlim(0, end_s)
    if end_s > 10:
        days_s = 86400 * math.ceil(end_s / 864000)
        step_s = next((each for each in _TIME_STEPS_S if end_s <= 10 * each), days_s)
        axes.xaxis.set_major_locator(MultipleLocator(step_s))
    axes.xaxis.set_major_formatter(
        lambda at_s, _: clock_text(round(at_s)) if end_s >= 60 else f"{at_s:g} s"
    )


def legend(figure: Figure) -> None:
    """Below the drawing, which grows by it: each name once."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        shapes, names = axes.get_legend_handles_labels()
        named.update(zip(names, shapes, strict=True))
    if named:
        figure.set_figheight(figure.get_figheight() + 0.2 * math.ceil(len(named) / 3))
        figure.legend(named.values(), named.keys(), loc="outside lower left", ncols=3)


def svg(figure: Figure, name: str) -> Element:
    """As an element of a page: in its colours, without a background, with what is told. name: of
    no other drawing there."""
    text = io.StringIO()
    with styled(), matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = fromstring(text.getvalue())
    for element in list(root.iter()):
        _adapt(element)
    del root.attrib["width"], root.attrib["height"]
    root.attrib.update({"role": "img", "aria-label": str(figure.get_label())})
    return root


def _adapt(element: Element) -> None:
    """To a page: no name spaces, no style for all, no ids but those that are referred to, and
    variables as colours."""
    for child in list(element):
        if child.tag.endswith(("}metadata", "}style")):
            element.remove(child)
    element.tag = element.tag.partition("}")[2]
    attributes = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
    if "style" in attributes:
        style = attributes["style"]
        attributes["style"] = re.sub("#[0-9a-f]{6}", lambda c: _VARIABLES.get(c[0], c[0]), style)
    told = attributes.pop("id", "") if element.tag == "g" else ""
    element.attrib = attributes
    if told.startswith(_TOLD):
        SubElement(element, "title").text = told.removeprefix(_TOLD)
