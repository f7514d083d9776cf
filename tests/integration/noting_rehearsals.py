"""A recipe that notes who rehearses, and who has imported beforehand what a loss imports."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from liver_hpc.world import thread
from tests.integration.random_tokens import RandomTokenGPT

REHEARSALS, STEPS = "rehearsals", "steps"
LATE = "tabnanny"


class NotingGPT(RandomTokenGPT):
    """RandomTokenGPT whose first loss in a process writes a file, `rehearsals` or `steps`, then a
    slash, then the process id: whether LATE had been imported."""

    def open(self, run_directory: Path) -> None:
        super().open(run_directory)
        self._directory = run_directory

    def loss(self, model: Any, samples: Any) -> tuple[Any, Any]:
        directory = self._directory / (REHEARSALS if thread.here.rehearsing else STEPS)
        directory.mkdir(exist_ok=True)
        note = directory / str(os.getpid())
        if not note.exists():
            note.write_text(str(LATE in sys.modules))
        import tabnanny  # noqa: F401

        return super().loss(model, samples)
