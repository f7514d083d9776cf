"""A run out of its journal: what the next start is to know, and whether a core decides the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from liver_hpc.run.codec import decode_event, encode
from liver_hpc.run.entries import STEPS_DROPPED, Entry, plain
from liver_hpc.run.events import CoordinatorStarted, Memory
from liver_hpc.run.machine import Run


def memory_of(entries: Iterable[Entry]) -> Memory:
    """What the starts that a journal tells of leave for the next one; of any release's journal."""
    last_generation, ceiling, drained = -1, None, ()
    for entry in entries:
        last_generation = max(last_generation, entry.event.get("generation", -1))
        for action in entry.actions:
            if action["type"] == "remember":
                ceiling, drained = action["ceiling"], tuple(action["drained"])
            elif action["type"] == "record" and action["table"] == "reconfigurations":
                last_generation = max(last_generation, action["row"]["generation"])
    return Memory(last_generation, ceiling, drained)


@dataclass(frozen=True)
class Difference:
    """Where a replayed core decided something else than the journal has."""

    number: int
    wanted: list[dict[str, Any]]
    got: list[dict[str, Any]]


def differences(
    entries: Iterable[Entry], new_run: Callable[[CoordinatorStarted], Run]
) -> Iterable[Difference]:
    """Plays a journal to fresh cores, one for each start; what they decide otherwise.

    Raises ConfigError for an event that this release does not know.
    """
    run: Run | None = None
    for entry in entries:
        if entry.event["type"] == STEPS_DROPPED:  # nothing but training steps
            continue
        event = decode_event(entry.event)
        if isinstance(event, CoordinatorStarted):
            run = new_run(event)
        assert run is not None, "the journal does not begin with a start"
        got = plain([encode(action) for action in run.handle(event, entry.at_s)])
        if got != entry.actions:
            yield Difference(entry.number, entry.actions, got)
