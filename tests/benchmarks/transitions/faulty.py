"""Seats with a fault each, which a proof has to find."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.transitions.proof import TARGET
from benchmarks.transitions.seat import Seat, open_seat
from liver_hpc.world.world import World


class Faulty(Seat):
    """One whose fault shows in the target once all state has arrived there."""

    fault: str

    def move(self, worlds: tuple[str, str], *arguments: Any) -> None:
        super().move(worlds, *arguments)
        world = self._places[worlds[1]].world
        if worlds[1] == TARGET and world is not None:
            getattr(self, self.fault)(world)

    def a_wrong_bit(self, world: World) -> None:
        """Of one replica's copy of a parameter."""
        if world.at.replica == 0:
            index, box = next(world.state.boxes("parameter"))
            world.state.view("parameter", index, box)[0, 0] += 1e-3

    def a_counter_left_behind(self, world: World) -> None:
        """Adam's, which is in no tensor that is moved."""
        scalars = world.scalar_state(0).model_copy(update={"optimizer_step": 0})
        world.load_scalar_state(scalars)

    def a_death(self, world: World) -> None:
        os._exit(9)


def open_faulty(fault: str, directory: Path, worker: int) -> Seat:
    seat = open_seat(directory, worker)
    seat.__class__ = Faulty
    seat.fault = fault  # type: ignore[attr-defined]
    return seat
