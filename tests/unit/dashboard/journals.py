"""Lines of journals as coordinators write them."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache

from liver_hpc.protocol.messages import ResizeRequest
from liver_hpc.run.codec import encode as plain
from liver_hpc.run.entries import encode
from liver_hpc.run.events import OperatorAsked
from tests.unit.report.rows import step
from tests.unit.run.choices import Choices
from tests.unit.run.play import Play
from tests.unit.run.scenes import SCENES


def started(number: int = 0, train: str = "steps: 40") -> bytes:
    attributes = {"name": "demo", "host": "n1", "config": f"train: {{{train}}}\n"}
    return encode(number, 1000.0, {"type": "coordinator_started", "attributes": attributes})


def step_lines(number: int, count: int, first: int = 0, began_s: float | None = None) -> bytes:
    """So many steps from the first on, in entries from `number` on, each of a second."""
    began_s = 1000.0 + first if began_s is None else began_s
    lines = []
    for n in range(count):
        values = asdict(step(first + n, started_s=began_s + n))
        values.pop("phase")
        event = {"type": "step_done", "worker": 0, **values}
        lines.append(encode(number + n, values["ended_s"], event))
    return b"".join(lines)


@cache
def handoff_lines() -> list[bytes]:
    """A run in which a handoff to more workers completes: all its lines but the first."""
    play = Play(SCENES[1], Choices(b""))
    play.begin()
    play.settle()
    play.train()
    play.settle()
    play.feed(OperatorAsked(0, ResizeRequest(workers=4)))
    for _ in range(8):
        play.settle()
        play.train()
    lines = [
        encode(number, at_s, plain(event), [plain(action) for action in actions])
        for number, (at_s, event, actions) in enumerate(play.entries)
    ]
    return lines[1:]
