"""How figures read in tables and lines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NOTHING = "-"
"""In the place of a figure that cannot be known."""


def bytes_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1."""
    amount, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while amount >= 1024 and len(units) > 1:
        amount /= 1024
        units.pop(0)
    return f"{count} B" if units[0] == "B" else f"{amount:.1f} {units[0]}"


def number_text(value: float) -> str:
    """Four characters or a little more: `0.081`, `12.34`, `345.6`, `12345`."""
    if not math.isfinite(value):
        return NOTHING
    places = 3 if abs(value) < 10 else 2 if abs(value) < 100 else 1 if abs(value) < 1000 else 0
    return f"{value:.{places}f}"


def duration_text(seconds: float) -> str:
    """`2.3 s`, `45 s`, `4:05` (minutes) or `1:02:03` (hours)."""
    if not math.isfinite(seconds):
        return NOTHING
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole_s = round(seconds)
    return f"{whole_s} s" if whole_s < 60 else clock_text(whole_s)


def clock_text(seconds: int) -> str:
    """`0:15`, `4:05` (minutes) or `1:02:03` (hours)."""
    minutes, rest_s = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest_s:02}" if hours else f"{minutes}:{rest_s:02}"


def layout_text(layout: str) -> str:
    """`tp2 pp1 dp2` without the axes of size 1: `tp2 dp2`; a single worker is `dp1`."""
    axes = [axis for axis in layout.split() if axis[2:] != "1"]
    return " ".join(axes) or ("dp1" if layout else NOTHING)


def strict(value: Any) -> Any:
    """JSON knows neither NaN nor infinity."""
    if isinstance(value, Mapping):
        return {name: strict(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [strict(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
