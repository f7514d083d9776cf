"""Workers with a fault each, which a proof has to find. Imports no torch here."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.transitions.pool import open_seat
from benchmarks.transitions.proof import TARGET


def open_faulty(fault: Callable[[Any], None], directory: Path, worker: int) -> Any:
    """A Seat that does `fault(world)` in the target once all state has arrived there."""
    seat = open_seat(directory, worker)
    plain = seat.move

    def move(worlds: tuple[str, str], *arguments: Any) -> None:
        plain(worlds, *arguments)
        world = seat._places[worlds[1]].world
        if worlds[1] == TARGET and world is not None:
            fault(world)

    seat.move = move
    return seat


def a_wrong_bit(world: Any) -> None:
    """Of one replica's copy of a parameter."""
    if world.at.replica == 0:
        index, box = next(world.state.boxes("parameter"))
        world.state.view("parameter", index, box)[0, 0] += 1e-3


def a_counter_left_behind(world: Any) -> None:
    """Adam's, which is in no tensor that is moved."""
    world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))


def a_death(world: Any) -> None:
    os._exit(9)
