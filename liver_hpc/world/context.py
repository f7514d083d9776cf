"""What a worker keeps across its worlds, and the errors of work on a world that it survives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Clock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import MODELS_ERRORS
from liver_hpc.protocol.messages import FromWorker
from liver_hpc.recipes.base import Recipe
from liver_hpc.world.device import Device
from liver_hpc.world.network import Network
from liver_hpc.world.store import ControlStore

FAILURES = (*MODELS_ERRORS, MemoryError)
"""Errors of work on a world that the worker survives."""


@dataclass(frozen=True)
class WorkerContext:
    """What a worker keeps across its worlds. checkpoints: the directory that they are under."""

    worker: int
    config: RunConfig
    recipe: Recipe
    device: Device
    network: Network
    clock: Clock
    send: Callable[[FromWorker], None]
    open_store: Callable[[], ControlStore]
    checkpoints: Path
