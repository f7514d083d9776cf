"""Submission with Slurm's commands played: what is asked how often, and what is made of answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from liver_hpc.cluster.slurm.commands import (
    ControllerUnreachable,
    SlurmCommands,
    SlurmError,
)
from liver_hpc.cluster.slurm.submit import submit_once
from tests.slurm_answers import Answer

AWAY = Answer(1, "", "sbatch: error: Unable to contact slurm controller (connect failure)")


class Played:
    """Answers in their order; `asked` is what was called."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[str] = []

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        self.asked.append(words[0])
        return self._answers.pop(0)


def commands(played: Played) -> SlurmCommands:
    return SlurmCommands(command_s=1.0, unreachable_s=0.0, run=played)


def queued(job: int, shown: str = "", state: str = "PENDING") -> Answer:
    return Answer(0, f"{job}|{shown or job}|{state}|None|N/A||run\n")


def test_a_job_is_submitted_once() -> None:
    played = Played(Answer(0, "12\n"))
    assert submit_once(commands(played), Path("batch.sh"), "run-1") == "12"
    assert played.asked == ["sbatch"]


def test_a_job_that_a_silent_controller_took_is_found_by_its_name() -> None:
    both = Answer(0, queued(13, "12+1").stdout + queued(12, "12+0").stdout)
    played = Played(AWAY, both)
    assert submit_once(commands(played), Path("batch.sh"), "run-1") == "12"
    assert played.asked == ["sbatch", "squeue"]


def test_a_job_that_a_silent_controller_did_not_take_is_submitted_again() -> None:
    played = Played(AWAY, Answer(0, ""), Answer(0, "14\n"))
    assert submit_once(commands(played), Path("batch.sh"), "run-1") == "14"


def test_a_refusal_is_not_repeated() -> None:
    played = Played(Answer(1, "", "sbatch: error: invalid partition specified: nowhere"))
    with pytest.raises(SlurmError, match="invalid partition specified: nowhere"):
        submit_once(commands(played), Path("batch.sh"), "run-1")
    assert played.asked == ["sbatch"]


def test_a_controller_that_stays_unreachable_is_an_error() -> None:
    with pytest.raises(ControllerUnreachable, match="Unable to contact"):
        submit_once(commands(Played(AWAY, AWAY)), Path("batch.sh"), "run-1")
