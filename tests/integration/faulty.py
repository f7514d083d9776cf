"""A recipe whose worker fails at a chosen moment of a handoff. Loaded by workers only.

`LIVER_TEST_FAULT` is "worker:moment"; it happens once in a run. The worker dies: PREPARE (before
the target is built), SAVE (as it begins to write the boundary's checkpoint), TRANSFER (once the
first bytes of parameters have arrived), FORWARD (in the target's first forward, while optimizer
state streams), VERDICT (when it has heard that), REFILL (as it is to fill the world after a
loss). Or it lives: FLIP (a bit of what has arrived flips
before it is digested), STALL (it stands still once the first bytes have arrived), REFUSE (it fails
its first two PREPAREs), PARTNER (its connections to those with whom it exchanges snapshots break,
once it has had some).
"""

from __future__ import annotations

import os
import signal
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch

from liver_hpc.errors import LiverError
from tests.integration.random_tokens import RandomTokenGPT

STALL_S = 30.0
"""Longer than any deadline for the bytes."""
REFUSALS = 2
SNAPSHOTS = 3
"""Of so many before the connections break."""


class FaultyGPT(RandomTokenGPT):
    """RandomTokenGPT with a fault planted in the worker that opens it."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        fault = os.environ.get("LIVER_TEST_FAULT", "")
        if fault:
            worker, moment = fault.split(":")
            plant(int(worker), moment, run_directory / "has_failed")


def plant(worker: int, phase: str, done: Path) -> None:
    """Wraps one function of the handoff, in this process, so that `worker` fails in it. done: a
    file that says it has happened."""
    from liver_hpc.handoff.crossing import Crossing
    from liver_hpc.worker import trainer

    def die_if(mine: int) -> None:
        if mine == worker and not done.exists():
            done.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    if phase in ("FLIP", "STALL"):
        plant_living(worker, phase)
    elif phase == "SAVE":
        from liver_hpc.checkpoint.parts import Save

        hand_off, save, at_boundary = trainer.Trainer._hand_off, Save.now, [False]

        def handing_off(self: Any, *arguments: Any) -> None:
            at_boundary[0] = True
            hand_off(self, *arguments)

        def dying_save(self: Any, world: Any) -> Any:
            if at_boundary[0]:
                die_if(self._worker)
            return save(self, world)

        trainer.Trainer._hand_off = handing_off  # type: ignore[method-assign]
        Save.now = dying_save  # type: ignore[method-assign]
    elif phase == "VERDICT":
        verdict = Crossing._verdict

        def dying_verdict(self: Any) -> Any:
            found = verdict(self)
            die_if(self._session.context.worker)
            return found

        Crossing._verdict = dying_verdict  # type: ignore[method-assign]
    elif phase == "REFILL":
        from liver_hpc.worker.refilling import Refilling

        run = Refilling.run

        def dying_run(self: Any, world: Any, held: Any) -> Any:
            die_if(self._context.worker)
            return run(self, world, held)

        Refilling.run = dying_run  # type: ignore[method-assign]
    elif phase == "PREPARE":
        prepare = trainer.prepare

        def dying_prepare(session: Any, source: Any) -> Any:
            die_if(session.context.worker)
            return prepare(session, source)

        trainer.prepare = dying_prepare
    elif phase == "REFUSE":
        prepare, refused = trainer.prepare, []

        def refusing_prepare(session: Any, source: Any) -> Any:
            if session.context.worker == worker and len(refused) < REFUSALS:
                refused.append(session.generation)
                raise LiverError("told to")
            return prepare(session, source)

        trainer.prepare = refusing_prepare
    elif phase == "PARTNER":
        from liver_hpc.snapshot.exchange import Exchange

        swap, swaps = Exchange.swap, count(1)

        def breaking_swap(self: Any, *arguments: Any) -> None:
            if self._worker == worker and next(swaps) == SNAPSHOTS + 1:
                self.close()
            swap(self, *arguments)

        Exchange.swap = breaking_swap  # type: ignore[method-assign]
    elif phase == "TRANSFER":
        progress = Crossing._progress

        def dying_progress(self: Any, num_bytes: int) -> None:
            die_if(self._session.context.worker)
            progress(self, num_bytes)

        Crossing._progress = dying_progress  # type: ignore[method-assign]
    elif phase == "FORWARD":
        work = Crossing._work

        def dying_work(self: Any, scalars: Any, gradients: Any) -> Any:
            loss = self._target.world.recipe.loss

            def dying_loss(model: Any, samples: Any) -> Any:
                die_if(self._session.context.worker)
                return loss(model, samples)

            self._target.world.recipe.loss = dying_loss
            return work(self, scalars, gradients)

        Crossing._work = dying_work  # type: ignore[method-assign]
    else:
        raise ValueError(f"no such phase: {phase}")


def plant_living(worker: int, fault: str) -> None:
    """A fault in the first bytes that `worker` gets, which it survives."""
    from liver_hpc.handoff.crossing import Crossing
    from liver_hpc.transport.moved import Tally

    move, see, left = Crossing._move, Tally.see, [False]

    def moving(self: Any, *arguments: Any) -> Any:
        left[0] = self._session.context.worker == worker
        return move(self, *arguments)

    def seeing(self: Any, end: Any, peer: int, pieces: Any, views: Any) -> None:
        if end == "received" and left[0]:
            left[0] = False
            if fault == "STALL":
                time.sleep(STALL_S)
            views[0].view(torch.uint8)[0, 0] ^= 1
        see(self, end, peer, pieces, views)

    Crossing._move = moving  # type: ignore[method-assign]
    Tally.see = seeing  # type: ignore[method-assign]
