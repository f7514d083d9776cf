"""Events and actions as the journal holds them: plain values for JSON, and events back again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from liver_hpc.errors import ConfigError
from liver_hpc.run.actions import Action, Record
from liver_hpc.run.events import Event
from liver_hpc.run.records import TABLES


def name_of(kind: type) -> str:
    """The `type` of an event or an action: "node_granted" for NodeGranted."""
    if issubclass(kind, BaseModel):
        return str(kind.model_fields["type"].default)
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


_TABLES = {kind: name for name, kind in TABLES.items()}
_adapters: dict[type, TypeAdapter[Any]] = {}
_EVENTS: dict[str, type] = {name_of(kind): kind for kind in get_args(Event)}


def encode(item: Event | Action) -> dict[str, Any]:
    """Plain values, with a `type` to be known by."""
    if isinstance(item, Record):
        row = _adapter(type(item.row)).dump_python(item.row, mode="json")
        return {"type": "record", "table": _TABLES[type(item.row)], "row": row}
    values = _adapter(type(item)).dump_python(item, mode="json")
    return {"type": name_of(type(item)), **values}


def decode_event(values: Mapping[str, Any]) -> Event:
    """The event that `encode` was given; raises ConfigError for anything else."""
    kind = _EVENTS.get(str(values.get("type")))
    if kind is None:
        raise ConfigError(f"an event of type {values.get('type')!r} is not known")
    given = (
        values if issubclass(kind, BaseModel) else {k: v for k, v in values.items() if k != "type"}
    )
    try:
        event: Event = _adapter(kind).validate_python(given)
    except ValidationError as error:
        raise ConfigError(f"event {values.get('type')!r}: {error.errors()[0]['msg']}") from error
    return event


def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]
