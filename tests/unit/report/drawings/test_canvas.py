"""A drawing on a page: in the page's colours, with what is told, of any text."""

from __future__ import annotations

import re
from xml.etree.ElementTree import Element, tostring

import numpy as np
import pytest
from matplotlib.figure import Figure

from liver_hpc.report.drawings.canvas import (
    Color,
    draw_bar,
    name_rows,
    new_figure,
    run_time,
    styled,
    svg,
)
from liver_hpc.report.drawings.training import POINTS, thinned


def figure(name: str = "n1", told: str = "n1 trained") -> Figure:
    with styled():
        drawn = new_figure(1.0, "Nodes", "one of them")
        axes = drawn.subplots()
        run_time(axes, 100.0)
        name_rows(axes, [name])
        draw_bar(axes, 0, 10.0, 20.0, told, color=Color.GREEN)
    return drawn


def texts(element: Element, tag: str) -> list[str]:
    return [each.text or "" for each in element.iter(tag)]


def test_a_page_tells_what_a_shape_is() -> None:
    element = svg(figure(), "nodes")
    assert element.attrib["aria-label"] == "Nodes. one of them"
    assert texts(element, "title") == ["n1 trained"]
    assert "n1" in texts(element, "text")
    assert "1:20" in texts(element, "text")


def test_colours_are_the_page_s() -> None:
    style = " ".join(each.get("style", "") for each in svg(figure(), "nodes").iter())
    assert {"var(--green)", "var(--soft)", "var(--hair)"} <= {*re.findall(r"var\(.*?\)", style)}
    assert not re.search("#[0-9a-f]{3}", style)


def test_a_drawing_is_the_same_each_time_and_no_id_is_of_two_drawings() -> None:
    first, again, other = (tostring(svg(figure(), name)) for name in ("a", "a", "b"))
    assert first == again
    ids = [{*re.findall(b' id="(.*?)"', text)} for text in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]


@pytest.mark.parametrize("name", ["$n_1$", "n\0\x1b\ud800", "<&>", "\\frac", "n" * 500])
def test_any_text_can_be_drawn(name: str) -> None:
    element = svg(figure(name, name), "nodes")
    assert texts(element, "title")[0].startswith(name[0])
    assert max(map(len, texts(element, "text"))) <= 28


def test_of_many_values_the_extremes_are_kept() -> None:
    values = np.zeros(10 * POINTS)
    values[[1234, 5678]] = 1.0, -1.0
    kept = thinned(values)
    assert len(kept) <= POINTS
    assert {1234, 5678} <= {*kept}
    assert (np.diff(kept) > 0).all()
