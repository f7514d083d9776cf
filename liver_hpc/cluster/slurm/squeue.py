"""One asker of squeue for all steps and jobs of a run: who comes while a question waits for its
turn gets the same answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from liver_hpc.cluster.slurm.commands import SQUEUE_PACE, SlurmCommands
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.process import start_thread

_TURNS = 3
"""Jobs and steps are asked for in turn: so many commands at most come before an answer."""

_Ask = Callable[[Sequence[str]], Any]


@dataclass
class _Question:
    """What is asked of squeue next, for all who wait for it."""

    ask: _Ask
    jobs: set[str]
    found: Future[Any] = field(default_factory=Future)


class Squeue:
    """Any thread may ask. Every answer is of a question that was put after the call; nothing is
    repeated.

    commands: all of them, not repeated. command_s: the longest that one takes.
    """

    def __init__(self, commands: SlurmCommands, command_s: float) -> None:
        self.commands = commands.once()
        self._ask_jobs: _Ask = partial(self.commands.jobs, own=True)
        self._ask_steps: _Ask = self.commands.steps
        self._limit_s = _TURNS * (command_s + SQUEUE_PACE.interval_s)
        self._lock = threading.Lock()
        self._waiting: list[_Question] = []
        self._asks = False  # whether there is a thread that does

    def jobs(self, ids: Sequence[str], urgent_s: float | None = None) -> dict[str, JobInfo]:
        """As `SlurmCommands.jobs`. urgent_s: it comes before what else waits, and is not waited for
        any longer. Raises LiverError."""
        if not ids:
            return {}
        found: dict[str, JobInfo] = self._answer(self._ask_jobs, ids, urgent_s)
        return {job: info for job, info in found.items() if {job, info.het_leader} & {*ids}}

    def steps(self, job: str, name: str) -> list[str]:
        """The ids of a job's steps of this name, which is used in no other job of the run. Raises
        LiverError."""
        found: dict[str, list[str]] = self._answer(self._ask_steps, [job])
        return found.get(name, [])

    def _answer(self, ask: _Ask, jobs: Iterable[str], urgent_s: float | None = None) -> Any:
        with self._lock:
            question = next((each for each in self._waiting if each.ask is ask), None)
            if question is None:
                question = _Question(ask, set())
                self._waiting.append(question)
            if urgent_s is not None:
                self._waiting.sort(key=lambda each: each is not question)
            question.jobs.update(jobs)
            if not self._asks:
                start_thread(self._ask, "squeue")
                self._asks = True
        limit_s = urgent_s or self._limit_s
        try:
            return question.found.result(limit_s)
        except TimeoutError:
            raise DeadlineError(f"waited {limit_s:g} s for squeue") from None

    def _ask(self) -> None:
        """Until nobody waits."""
        while True:
            with self._lock:
                self._asks = bool(self._waiting)
                if not self._waiting:
                    return
            SQUEUE_PACE.await_turn()  # meanwhile others may come
            with self._lock:
                question = self._waiting.pop(0)
            try:
                question.found.set_result(question.ask(sorted(question.jobs)))
            except LiverError as error:
                question.found.set_exception(error)
