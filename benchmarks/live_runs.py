"""A run on this machine, started as `liver submit` does, that a benchmark reshapes and watches."""

from __future__ import annotations

import threading
from collections.abc import Callable

from liver_hpc.cli.client import Watch, await_coordinator, request, stop
from liver_hpc.cli.submission import submit_run
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.report.store import read_run
from liver_hpc.run.entries import JOURNAL_FILE, read_entries, steps_done
from liver_hpc.run.records import RunRecords

_POLL_S = 0.1
_ASK_S = 0.5
"""A question takes a coordinator and whoever asks some ms of the cores that are measured. Figures
come from what the run records: they do not depend on this."""


def _without_checkpoints(config: RunConfig) -> RunConfig:
    """Unless the run file says how often: whatever is measured, it is not when one comes."""
    if config.checkpoint.every_steps != "auto":
        return config
    options = config.checkpoint.model_copy(update={"every_steps": None})
    return config.model_copy(update={"checkpoint": options})


class LiveRun:
    """A context manager that leaves the run stopped; afterwards `records` holds all of it.

    event_s: the longest that anything may take. poll_s: how often a step is looked for.
    cluster: where it runs, "local" or "slurm". Raises LiverError
    when the run ends by itself or a handoff is aborted, DeadlineError when something takes too
    long.
    """

    def __init__(
        self, config: RunConfig, event_s: float, poll_s: float = _POLL_S, cluster: str = "local"
    ) -> None:
        self._event_s = event_s
        self._poll_s = poll_s
        self._pause = threading.Event()
        self.asked_s: list[float] = []
        """When each change was asked for, in epoch seconds."""
        self.run = submit_run(_without_checkpoints(config), cluster)
        await_coordinator(self.run)  # on Slurm the job is only queued
        self._watch = Watch(self.run)

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops the run, if it has not ended."""
        self._watch.close()
        if self.run.outcome() is None:
            stop(self.run)

    def records(self) -> RunRecords:
        """Everything recorded so far."""
        return read_run(self.run.path)

    def worker_pids(self) -> dict[int, int]:
        """Of all workers that the run has had: a worker that was forked has the command line of the
        process that forked it."""
        said = (entry.event for entry in read_entries(self.run.path / JOURNAL_FILE))
        hellos = (event for event in said if event.get("type") == "hello")
        return {int(event["worker"]): int(event["pid"]) for event in hellos}

    def settle(self, steps: int) -> int:
        """Waits for so many whole steps from now; returns how many have been done in all."""
        begun = self.until(lambda status: status.state == "training", "the first step").step
        return self.reach(begun + steps + 1)

    def reach(self, step: int) -> int:
        """Waits until at least `step` steps have been done; returns how many have. Until then it
        looks into the journal's end, and asks nobody."""
        deadline = Deadline.after(SystemClock(), self._event_s, f"step {step} in {self.run}")
        journal = self.run.path / JOURNAL_FILE
        while steps_done(journal) < step and self.run.outcome() is None:
            deadline.check()
            self._pause.wait(self._poll_s)
        return self.until(lambda status: status.step >= step, f"step {step}").step

    def resize(self, layout: Layout) -> None:
        """Asks for a layout."""
        self._ask(ResizeRequest(layout=str(layout)))

    def replace(self) -> None:
        """Asks for a fresh worker in the place of the last one."""
        status = self.until(lambda status: True, "the status")
        self._ask(ReplaceRequest(replace=status.workers[-1]))

    def _ask(self, wanted: ResizeRequest | ReplaceRequest) -> None:
        self.asked_s.append(SystemClock().now_s())
        request(self.run, wanted)

    def await_handoffs(self) -> None:
        """Waits until all that was asked for is done, and the old world is gone."""
        asked = len(self.asked_s)
        self.until(lambda s: s.handoffs_done >= asked and s.handoff is None, f"handoff {asked}")

    def until(self, holds: Callable[[StatusSnapshot], bool], what: str) -> StatusSnapshot:
        """The first status of which `holds` is true."""
        deadline = Deadline.after(SystemClock(), self._event_s, f"{what} in {self.run}")
        while True:
            status = self._watch.snapshot()
            if status is None:
                raise LiverError(
                    f"{self.run} ended: {self.run.outcome()}; {self.run.where_logs_are()}"
                )
            if status.handoffs_aborted or status.handoffs_failed:
                raise LiverError(f"{self.run}: a handoff came to nothing: {status.last_event}")
            if holds(status):
                return status
            deadline.check()
            self._pause.wait(_ASK_S)
