"""The page: well-formed, complete, nothing from outside, every text escaped."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from liver_hpc.report.compare import Comparisons
from liver_hpc.report.derive import run_figures
from liver_hpc.report.drawings.run import drawings
from liver_hpc.report.page import document
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import reconfiguration, step
from tests.unit.report.run_of_everything import HOSTILE, everything

VOID = {"meta", "link"}
LOADING = {"src", "srcset", "href", "xlink:href", "data", "action", "poster", "background"}


def page(records: RunRecords, comparisons: Comparisons | None = None) -> str:
    figures = run_figures(records)
    return document.page(records, figures, drawings(records, figures, comparisons))


class Checker(HTMLParser):
    """Collects elements and texts; fails where a tag closes that is not the innermost one."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def with_tag(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]

    def said(self) -> str:
        return " ".join(self.texts)


def checked(text: str) -> Checker:
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert checker.open == []
    return checker


@pytest.fixture(scope="module")
def whole() -> str:
    return page(everything())


def test_it_is_well_formed_and_in_one_file(whole: str) -> None:
    found = checked(whole)
    assert whole.startswith("<!doctype html>")
    for tag, attributes in found.elements:
        for name in LOADING & attributes.keys():
            if not str(attributes[name]).startswith("#"):  # of a shape that is drawn again
                assert (tag, attributes[name]) == ("link", "data:,")
    assert not re.search(r"https?:|url\((?!#)|@import|//[a-z]", re.sub(r"//.*\n", "", whole))
    policies = [each.get("content") for each in found.with_tag("meta") if "http-equiv" in each]
    assert "default-src 'none'" in str(policies)


def test_hostile_texts_stay_texts(whole: str) -> None:
    found = checked(whole)
    assert len(found.with_tag("script")) == 2
    assert HOSTILE in found.said()
    assert '<script>alert("x")' not in whole


def test_the_verdict_comes_first(whole: str) -> None:
    words = " ".join(checked(whole).said().split())
    verdict = words.index(
        "2 of 3 handoffs completed. They cost 0.500 s of training in all, 0.500 s of it lost"
    )
    assert 0 < verdict < words.index("Loss and tokens per second")
    assert "at most 0.250 steps at once" in words


def test_all_parts_are_there(whole: str) -> None:
    found = checked(whole)
    names = [each.get("aria-label") or "" for each in found.with_tag("svg")]
    for name in (
        "Loss and tokens per second over time",
        "Nodes over time",
        "Cost, live and by restart",
        "Handoff 1: dp2 to tp2 dp2, completed",
        "Handoff 2: tp2 dp2 to pp2 dp2, aborted",
        "Handoff 3: tp2 dp2 to tp2, completed",
    ):
        assert len([each for each in names if each.startswith(name)]) == 1
    assert all(each.get("role") == "img" for each in found.with_tag("svg"))
    said = found.said()
    for title in ("Worlds", "Reconfigurations", "Seconds in each phase", "Nodes"):
        assert title in said
    assert said.count("bytes from worker (row) to worker (column)") == 2  # one was aborted
    assert "from 2 to 3: 3.0 MiB" in said
    assert all("scope" in each for each in found.with_tag("th"))


def test_who_was_waited_for_is_told(whole: str) -> None:
    said = checked(whole).said()
    assert "worker 3 was the last" in said
    assert "worker 2 waits" in said
    assert "worker 3, prepare: never ended" in said
    assert "worker 3 joins \u00b7 n2" in said


def test_ids_are_unique(whole: str) -> None:
    ids = [each["id"] for _, each in checked(whole).elements if "id" in each]
    assert len(ids) == len(set(ids))
    for used in re.findall(r"url\(#([^)]+)\)", whole):
        assert used in ids


def test_the_cursor_gets_the_steps(whole: str) -> None:
    (text,) = re.findall(r'<script type="application/json" id="steps">(.*?)</script>', whole)
    rows = json.loads(text)
    assert len(rows) == len(everything().steps)
    assert rows[1] == [2.0, 1, 0, 3.99, 512]


def test_the_validation_loss_is_a_line_beside_that_of_training(whole: str) -> None:
    (path,) = re.findall(
        r'<path d="([^"]*)"[^>]*></path>(?:(?!</g>\s*<g><title>).)*?'
        r"<title>validation loss, 4.2000 at last</title>",
        whole,
        re.DOTALL,
    )[-1:]
    assert len(re.findall("[ML]", path)) >= 3
    assert ">validation loss<" in whole, "in the legend"


def test_live_against_restart() -> None:
    methods = {"live": [0.1, 0.2, 0.3], "torch dcp": [8.0, 9.0]}
    said = checked(page(everything(), {"dp2 to tp2": methods})).said()
    assert "42.5\u00d7 less than by the best restart" in said
    assert "0.200 s (0.100 to 0.300, 3)" in said


def test_a_page_is_the_same_each_time(whole: str) -> None:
    assert page(everything()) == whole


@pytest.mark.parametrize(
    "records",
    [
        RunRecords([], [], [], {}),
        RunRecords([step(0)], [], [], {"name": "one step"}),
        RunRecords([step(0, loss=math.nan)], [reconfiguration()], [], {}),
        RunRecords([step(0), step(1, started_s=math.inf)], [], [], {}),
        dataclasses.replace(everything(), steps=[]),
        dataclasses.replace(everything(), reconfigurations=[]),
        dataclasses.replace(everything(), worker_phases=[], traffic=[]),
    ],
    ids=["nothing", "a step", "no loss", "no end", "no steps", "no handoffs", "an older file"],
)
def test_what_is_missing_is_left_out(records: RunRecords) -> None:
    checked(page(records))


def test_a_long_run_stays_a_small_page() -> None:
    steps = [step(n, started_s=100.0 + n / 10, took_s=0.1) for n in range(50_000)]
    assert len(page(RunRecords(steps, [], [], {}))) < 400_000


def test_of_many_handoffs_only_the_costliest_is_unfolded() -> None:
    records = everything()
    more = [dataclasses.replace(records.reconfigurations[0], generation=n) for n in range(10, 20)]
    records.reconfigurations.extend(more)
    details = checked(page(records)).with_tag("details")
    assert len([each for each in details if "open" in each]) == 1
    assert len(details) == 15


def diverged(number: int) -> RunRecords:
    """A run whose loss is not finite for a stretch of steps, and its gradient norm at another."""
    steps = [step(n) for n in range(number)]
    for n in range(number // 2, number // 2 + 4 * max(1, number // 100)):
        steps[n] = step(n, loss=math.nan if n % 2 else math.inf)
    steps[3] = step(3, grad_norm=math.inf)
    return RunRecords(steps, [], [], {"name": "diverged"})


@pytest.mark.parametrize("number", [20, 5_000])
def test_a_loss_that_is_not_finite_is_a_gap_with_a_mark(number: int) -> None:
    """No drawing has a place that is no number, and no line crosses the gap."""
    text = page(diverged(number))
    found = checked(text)
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        places = re.sub(r"<title>.*?</title>", "", svg)
        assert not re.search(r"\b(nan|inf|infinity)\b", places, re.IGNORECASE)
    (curve,) = re.findall(r'<path d="([^"]*)"[^>]*></path>\s*<title>loss</title>', text)
    assert curve.count("M") == 2
    assert text.count(": the loss or the gradient norm is not finite</title>") == 2
    said = found.said()
    assert "step 3: the loss or the gradient norm is not finite" in said
    last = number // 2 + 4 * max(1, number // 100) - 1
    assert f"steps {number // 2} to {last}: the loss or the gradient norm is not finite" in said
    (rows,) = re.findall(r'<script type="application/json" id="steps">(.*?)</script>', text)
    shown = json.loads(rows, parse_constant=pytest.fail)
    assert None in [row[3] for row in shown]


def test_the_axis_of_a_loss_is_of_its_finite_values() -> None:
    def axis(records: RunRecords) -> list[str]:
        drawing = re.findall(r"<svg.*?</svg>", page(records), re.DOTALL)[0]
        return re.findall(r"text-anchor: end;[^>]*>([^<]*)<", drawing)

    finite = [step(n) for n in range(12)]
    others = [step(n, loss=value) for n, value in ((12, math.inf), (13, math.nan))]
    until = step(13, loss=4.0)
    assert axis(RunRecords([*finite, *others], [], [], {})) == axis(
        RunRecords([*finite, step(12, loss=4.0), until], [], [], {})
    )
