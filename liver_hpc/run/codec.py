"""Events and actions as the journal holds them, and what a journal leaves for the next start."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from liver_hpc.errors import ConfigError
from liver_hpc.run.actions import Action, AttemptBegins, Record, RecordAll
from liver_hpc.run.entries import Entry
from liver_hpc.run.events import Event, Memory, SaidTogether
from liver_hpc.run.outcome import TOO_FEW_NODES, TOO_LITTLE_TIME
from liver_hpc.run.records import TABLES

ATTEMPT_BEGINS = "attempt_begins"
RECORD_ALL = "record_all"
RECORDS = ("record", RECORD_ALL)

_TABLES = {kind: name for name, kind in TABLES.items()}


def name_of(kind: type) -> str:
    """The `type` of an event or an action: "node_granted" for NodeGranted."""
    if issubclass(kind, BaseModel):
        return str(kind.model_fields["type"].default)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def encode(item: Event | Action) -> dict[str, Any]:
    """What `entries.encode` makes the JSON of, with a `type` to be known by."""
    if isinstance(item, Record):
        return {"type": "record", "table": _TABLES[type(item.row)], "row": _plain(item.row)}
    if isinstance(item, RecordAll):
        first, *_ = item.rows
        columns = {f.name: [getattr(row, f.name) for row in item.rows] for f in fields(first)}
        return {"type": RECORD_ALL, "table": _TABLES[type(first)], "columns": columns}
    if isinstance(item, SaidTogether):
        return {"type": "said_together", "messages": item.messages, "numbers": item.numbers}
    return {"type": name_of(type(item)), **_plain(item)}


def _plain(value: Any) -> Any:
    return to_jsonable_python(value, inf_nan_mode="strings")


def rows_of(action: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows that a record, or one of many, has for its table."""
    if action["type"] == RECORD_ALL:
        columns = action["columns"]
        for values in zip(*columns.values(), strict=True):
            yield dict(zip(columns, values, strict=True))
    else:
        yield action["row"]


def record_of(kind: type[Any], row: Mapping[str, Any]) -> Any:
    """The record of a row, also of another release's: what this one does not know is left out. Of a
    number that is not finite the journal has the word, which `float` knows."""
    known = {f.name: f.type for f in fields(kind) if f.name in row}
    return kind(**{n: float(row[n]) if t == "float" else row[n] for n, t in known.items()})


_EVENTS = {name_of(kind): TypeAdapter[Event](kind) for kind in get_args(Event)}


def decode_event(values: Mapping[str, Any]) -> Event:
    """The event that `encode` was given; raises ConfigError for anything else."""
    kind = _EVENTS.get(str(values.get("type")))
    if kind is None:
        raise ConfigError(f"an event of type {values.get('type')!r} is not known")
    try:
        return kind.validate_python(values)
    except ValidationError as error:
        raise ConfigError(f"event {values.get('type')!r}: {error.errors()[0]['msg']}") from error


decode_attempt = TypeAdapter(AttemptBegins).validate_python
"""The action that `encode` was given."""


def memory_of(entries: Iterable[Entry]) -> Memory:
    """What the starts that a journal tells of leave for the next one; of any release's journal."""
    last_generation, ceiling, drained, evaluated, agents, in_vain = -1, None, (), 0, 0, 0
    wrote = None
    for entry in entries:
        for said in entry.event.get("messages", (entry.event,)):
            last_generation = max(last_generation, said.get("generation", -1))
        if entry.event.get("type") == "evaluated":
            evaluated = max(evaluated, entry.event["step"])
        elif entry.event.get("type") == "checkpoint_written":
            wrote = entry.event["step"]
        elif entry.event.get("type") == "step_done":
            in_vain = 0
        for action in entry.actions:
            if action["type"] == "remember":
                ceiling, drained = action["ceiling"], tuple(action["drained"])
            elif action["type"] == "launch":
                agents += len(action["agents"])
            elif action["type"] == "start_agent":
                agents += 1
            elif action["type"] == "end":
                vain = action["reason"].startswith((TOO_FEW_NODES, TOO_LITTLE_TIME))
                in_vain = in_vain + 1 if vain and action["state"] == "requeue" else 0
            elif action["type"] == "record" and action["table"] == "reconfigurations":
                last_generation = max(last_generation, action["row"]["generation"])
    return Memory(last_generation, ceiling, drained, evaluated, agents, in_vain, wrote)
