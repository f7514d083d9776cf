"""A recipe that kills its worker at a chosen moment of a chosen handoff. Loaded by workers only.

`LIVER_TEST_FAULT` is "worker:phase": PREPARE (before the target is built), TRANSFER (once the
first bytes of parameters have arrived) or FORWARD (in the target's first forward, while optimizer
state streams). With REFUSE a worker lives on: it fails its first two PREPAREs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from liver_hpc.errors import LiverError
from tests.integration.random_tokens import RandomTokenGPT

REFUSALS = 2


class FaultyGPT(RandomTokenGPT):
    """RandomTokenGPT with a fault planted in the worker that opens it."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        fault = os.environ.get("LIVER_TEST_FAULT", "")
        if fault:
            worker, phase = fault.split(":")
            plant(int(worker), phase)


def plant(worker: int, phase: str) -> None:
    """Wraps one function of the handoff, in this process, so that `worker` dies in it."""
    from liver_hpc.handoff.crossing import Crossing
    from liver_hpc.worker import trainer

    def die_if(mine: int) -> None:
        if mine == worker:
            os.kill(os.getpid(), signal.SIGKILL)

    if phase == "PREPARE":
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
