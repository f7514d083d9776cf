"""What is let go of, and what is kept, once the target world is the one that trains."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.handoff.release import release
from liver_hpc.handoff.session import Target
from liver_hpc.protocol.messages import Released

TAKEN = frozenset({64, 128})
"""Addresses of memory that the target has taken over from the source."""


@pytest.mark.parametrize("stays", [True, False], ids=["has a seat", "leaves"])
def test_all_goes_but_what_the_target_has_taken_over(stays: bool) -> None:
    said: list[Any] = []

    def note(name: str) -> Any:
        return lambda *args, **kwargs: said.append((name, *args, *kwargs.values()))

    context = SimpleNamespace(
        worker=3,
        clock=SimpleNamespace(now_s=lambda: 7.0),
        device=SimpleNamespace(enter=note("enter"), end_beside=note("end beside")),
        send=said.append,
    )
    session: Any = SimpleNamespace(context=context, generation=4)
    source: Any = SimpleNamespace(close=note("source"))
    world: Any = SimpleNamespace(taken=TAKEN) if stays else None
    transport: Any = SimpleNamespace(close=note("transport"))
    release(session, Target(world, {}, transport, context.device, 0, {}), source)  # type: ignore[arg-type]
    *done, released = said
    closed = ("source", TAKEN) if stays else ("source",)
    assert done == [("enter",), ("transport",), closed, ("end beside", 4)]
    assert isinstance(released, Released)
    assert (released.worker, released.generation, released.released_s) == (3, 4, 7.0)
    assert world is None or not world.taken, "it is the target's own now, and goes with it"
