"""How figures read."""

from __future__ import annotations

import math

import pytest

from liver_hpc.report.wording import bytes_text, duration_text, layout_text, number_text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3 * 2**29, "1.5 GiB"),
        (2**62, "4194304.0 TiB"),
    ],
)
def test_bytes_take_the_largest_unit(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.000"),
        (0.0812, "0.081"),
        (-0.5, "-0.500"),
        (12.346, "12.35"),
        (345.67, "345.7"),
        (9999.5, "10000"),
        (math.nan, "-"),
    ],
)
def test_numbers_keep_what_matters(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.97, "10 s"),
        (59.4, "59 s"),
        (59.94, "1:00"),
        (60, "1:00"),
        (245.4, "4:05"),
        (3723, "1:02:03"),
        (math.nan, "-"),
    ],
)
def test_durations_read_like_a_clock(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("layout", "text"),
    [("tp2 pp1 dp2", "tp2 dp2"), ("tp1 pp1 dp1", "dp1"), ("tp1 pp16 dp1", "pp16"), ("", "-")],
)
def test_layouts_leave_out_axes_of_one(layout: str, text: str) -> None:
    assert layout_text(layout) == text
