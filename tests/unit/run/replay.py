"""A journal played again: whether a core decides the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from liver_hpc.run.codec import decode_event, encode
from liver_hpc.run.entries import Entry, decode
from liver_hpc.run.entries import encode as encode_entry
from liver_hpc.run.events import CoordinatorStarted
from liver_hpc.run.machine import Run


def plain(value: Any) -> Any:
    """A value as a reader of the journal gets it."""
    (entry,) = decode([encode_entry(0, 0.0, {"value": value})], "memory, line")
    return entry.event["value"]


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
        event = decode_event(entry.event)
        if isinstance(event, CoordinatorStarted):
            run = new_run(event)
        assert run is not None, "the journal does not begin with a start"
        got = plain([encode(action) for action in run.handle(event, entry.at_s)])
        if got != entry.actions:
            yield Difference(entry.number, entry.actions, got)
