"""What the restarting side and its workers say to each other: JSON lines over two pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from liver_hpc.protocol.messages import ClassDigest

HOST = "127.0.0.1"
"""Where all of a baseline job runs, unless its workers are on nodes of a test cluster."""


class Line(BaseModel):
    """Frozen; the type field tells which one it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Orders(Line):
    """What a worker is started for. Without a load_directory the state begins from the seed.

    digests: whether those of the state are told with Ready and Written; they cost time. host: an
    address of this node's. held: it waits for Go before it does anything. storage_bytes_per_s: what
    the storage carries, of all workers together; None: as fast as it is.
    """

    run_directory: Path
    layout: str
    rank: int
    generation: int
    load_directory: Path | None = None
    digests: bool = False
    host: str = HOST
    held: bool = False
    storage_bytes_per_s: float | None = None


# ---- to a worker


class Go(Line):
    """To one that is held: the job that it was started for begins now."""

    type: Literal["go"] = "go"


class Meet(Line):
    """Where worker 0 keeps the store; it is told too."""

    type: Literal["meet"] = "meet"
    host: str
    port: int


class Save(Line):
    """Save at the next common boundary, then end."""

    type: Literal["save"] = "save"
    directory: str


class Leave(Line):
    """End at the next common boundary without saving."""

    type: Literal["leave"] = "leave"


Order = Go | Meet | Save | Leave
ToWorker = Annotated[Order, Field(discriminator="type")]


# ---- from a worker; times are epoch seconds


class Entered(Line):
    """The interpreter runs."""

    type: Literal["entered"] = "entered"
    at_s: float


class Held(Line):
    """Everything is imported, and nothing built: it waits for Go."""

    type: Literal["held"] = "held"


class Imported(Line):
    """Everything is imported and the device open; port: of worker 0's store, else 0."""

    type: Literal["imported"] = "imported"
    at_s: float
    port: int


class Ready(Line):
    """Data, groups and model stood at built_s, the state was in them at loaded_s."""

    type: Literal["ready"] = "ready"
    built_s: float
    loaded_s: float
    step: int
    digests: tuple[ClassDigest, ...]


class Stepped(Line):
    """One step was done, as worker 0 saw it."""

    type: Literal["stepped"] = "stepped"
    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    started_s: float
    ended_s: float


class Written(Line):
    """The checkpoint of the boundary after `step` steps is complete."""

    type: Literal["written"] = "written"
    step: int
    boundary_s: float
    saved_s: float
    digests: tuple[ClassDigest, ...]


News = Held | Entered | Imported | Ready | Stepped | Written
FromWorker = Annotated[News, Field(discriminator="type")]

_TO_WORKER: TypeAdapter[Order] = TypeAdapter(ToWorker)
_FROM_WORKER: TypeAdapter[News] = TypeAdapter(FromWorker)


def read_to_worker(descriptor: int, handle: Callable[[Order], None]) -> None:
    """Hands on every line until the other end closes. Blocks."""
    with open(descriptor, encoding="utf-8") as lines:
        for line in lines:
            handle(_TO_WORKER.validate_json(line))


def read_from_worker(descriptor: int, handle: Callable[[News], None]) -> None:
    """Hands on every line until the worker closes. Blocks."""
    with open(descriptor, encoding="utf-8") as lines:
        for line in lines:
            handle(_FROM_WORKER.validate_json(line))


class Writer:
    """The sending end of a pipe. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._stream = os.fdopen(descriptor, "w", encoding="utf-8")
        self._lock = threading.Lock()

    def send(self, line: Line) -> None:
        """Raises BrokenPipeError when nobody reads any more."""
        with self._lock:
            self._stream.write(line.model_dump_json() + "\n")
            self._stream.flush()

    def close(self) -> None:
        with self._lock:
            try:
                self._stream.close()
            except BrokenPipeError:  # what was unsent finds nobody
                return
