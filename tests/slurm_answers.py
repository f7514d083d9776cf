"""What a command of Slurm is played to have printed."""

from __future__ import annotations

import subprocess


class Answer(subprocess.CompletedProcess[str]):
    """How a command ended, and what it said on its outputs."""

    def __init__(self, code: int, output: str, complaint: str = "") -> None:
        super().__init__([], code, output, complaint)
