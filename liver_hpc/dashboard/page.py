"""What the page knows: parts that are told again when they have changed, each with the version at
which it did, so that whoever comes, or comes again, is told what he lacks."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from typing import Any

from liver_hpc.dashboard.curve import Curve, Point
from liver_hpc.report.wording import strict


class Page:
    """Used by the event loop's thread alone.

    began_s: the epoch time that all others are counted from. version: of the newest change.
    changed: is done at the next one.
    """

    def __init__(self) -> None:
        self.began_s = 0.0
        self.version, self._begun = 0, 1
        self.curve = Curve()
        self.changed = asyncio.get_running_loop().create_future()
        self._parts: dict[str, tuple[int, Any]] = {}
        self._start = secrets.token_hex(4)

    def since(self, at_s: float | None) -> float | None:
        """A point in time as the page counts it, to the millisecond."""
        if at_s is None or not math.isfinite(at_s):
            return None
        return round(at_s - self.began_s, 3)

    def begin(self) -> None:
        """The curve is empty again; of the parts each is to be put again."""
        self.curve, self._begun = Curve(), self.version + 1

    def put(self, parts: dict[str, Any]) -> None:
        """Parts as they are now; the page is told of those that have changed, with `publish`."""
        for name, value in parts.items():
            if name not in self._parts or self._parts[name][1] != value:
                self._parts[name] = self.version + 1, value

    def publish(self) -> None:
        """All that has changed since the last time is the next version."""
        self.version += 1
        changed, self.changed = self.changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    # ---- events

    def known_to(self, event_id: str) -> int:
        """The version that a browser has which was told this event last; 0 for none of ours."""
        start, _, version = event_id.partition("-")
        known = int(version) if start == self._start and version.isdecimal() else 0
        return known if known <= self.version else 0

    def event(self, version: int, now_s: float) -> bytes:
        """A server-sent event with all that is newer than a version."""
        told = {name: value for name, (at, value) in self._parts.items() if at > version}
        first, points = self.curve.since(version)
        if points or version < self._begun:
            told["curve"] = {"from": first, "points": [self._row(point) for point in points]}
        told["now"] = self.since(now_s)
        data = json.dumps(strict(told), separators=(",", ":"))
        return f"id: {self._start}-{self.version}\ndata: {data}\n\n".encode()

    def _row(self, point: Point) -> list[Any]:
        """As dashboard.js reads it."""
        rate = round(point.tokens / point.busy_s) if point.busy_s > 0 else None
        first, second = (round(loss, 5) for loss in point.losses)
        times = self.since(point.began_s), self.since(point.ended_s)
        return [*times, point.step, point.generation, first, second, rate, int(point.is_finite)]
