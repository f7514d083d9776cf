"""A training job that changes its layout by stopping and starting again."""

from __future__ import annotations

import shutil
from pathlib import Path

from benchmarks.baseline.lines import Leave, Ready, Save, Stepped, Written
from benchmarks.baseline.methods import Method, num_bytes
from benchmarks.baseline.phases import Restart, RestartTimes, as_if_saved_before
from benchmarks.baseline.workers import Start, Surroundings, Workers
from liver_hpc.clock import Clock, SystemClock
from liver_hpc.config.load import load_run
from liver_hpc.coordinator.main import attributes_of
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.votes import Side, disagreements
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.report.hdf5 import write_hdf5
from liver_hpc.report.store import METRICS_FILE
from liver_hpc.run.records import RunRecords, StepRecord


class RestartJob:
    """Workers of one layout after the other; a context manager that leaves no worker and no
    checkpoint, unless it is killed itself.

    `run_directory` holds run.yaml; after each restart, and at the end, metrics.h5 has every step, a
    restart's target being the next generation, and every restart twice: as it was, and as if the
    checkpoint had existed.
    With `digests` each restart is checked to have moved the state bit by bit, which costs time that
    is counted: not for measuring.
    """

    def __init__(
        self, run_directory: Path, digests: bool = False, around: Surroundings | None = None
    ) -> None:
        self._directory = run_directory
        self._checkpoints = run_directory / "restarts"
        self._config = load_run(run_directory / "run.yaml")
        load_run_recipe(self._config, run_directory)  # derives what the workers read
        self._limits = self._config.deadlines
        self._digests = digests
        self._around = around or Surroundings()
        self._clock: Clock = SystemClock()
        self._records = RunRecords([], [], [], attributes_of(self._config, run_directory))
        self._workers: Workers | None = None
        self._held: Workers | None = None
        self._generation = -1

    def __enter__(self) -> RestartJob:
        return self

    def __exit__(self, *_error: object) -> None:
        for workers in (self._workers, self._held):
            if workers is not None:
                workers.kill()
        self._workers = self._held = None
        if self._checkpoints.exists():
            shutil.rmtree(self._checkpoints)  # of a restart that failed
        self._write_records()

    @property
    def layout(self) -> Layout:
        """The layout that trains now."""
        return self._running().start.layout

    # ---- life

    def begin(self, layout: Layout) -> None:
        """The first workers, from the seed; returns once they train."""
        workers = self._launch(layout)
        workers.meet(self._limits.boot_s)
        workers.ready(self._limits.boot_s)

    def train(self, steps: int) -> None:
        """Returns when the present workers have done so many steps in all."""
        self._running().steps(steps, steps * self._limits.collective_s)

    def restart(self, target: Layout, method: Method, steps: int = 4) -> Restart:
        """Save, stop, start, load; returns when the target has done `steps` steps after its first.

        Raises LiverError when a worker fails, or the state that was loaded is not the saved one.
        """
        source, limits = self._running(), self._limits
        directory = self._checkpoints / str(self._generation)
        directory.mkdir(parents=True)
        if method is Method.MEGATRON_WARM:
            self._held = self._spawn(target, directory, held=True)
            self._held.held(limits.boot_s)
            # Its imports are no part of it.
            source.steps(source.steps_done + 1, limits.collective_s)
        noticed_s = self._clock.now_s()
        source.tell(Save(directory=str(directory)))
        written = source.written(limits.collective_s + limits.transfer_s)
        source.join(limits.exit_s)
        stopped_s = self._clock.now_s()
        if self._held is not None:
            workers, self._held = self._held, None
            workers.go()
            self._workers = workers
        else:
            workers = self._launch(target, directory)
        workers.meet(limits.boot_s)
        ready = workers.ready(limits.boot_s + limits.transfer_s)
        first, *later = workers.steps(1 + steps, (1 + steps) * limits.collective_s)
        self._check(source.start.layout, written, target, ready)
        times = RestartTimes(
            noticed_s=noticed_s,
            last_step_ended_s=max(line.boundary_s for line in written),
            saved_s=max(line.saved_s for line in written),
            stopped_s=stopped_s,
            entered_s=workers.entered_s(limits.boot_s),
            imported_s=workers.imported_s(limits.boot_s),
            built_s=max(line.built_s for line in ready),
            loaded_s=max(line.loaded_s for line in ready),
            first_step_ended_s=first.ended_s,
        )
        restart = Restart(
            method=method.value,
            source=str(source.start.layout),
            target=str(target),
            times=times,
            target_steps_s=tuple(step.ended_s - step.started_s for step in later),
            num_bytes=num_bytes(directory),
        )
        self._records.baselines.append(restart.record())
        self._records.baselines.append(as_if_saved_before(restart.record()))
        self._write_records()
        shutil.rmtree(directory)
        return restart

    def stop(self) -> None:
        """The present workers end at their next boundary, and their steps are in the file."""
        workers = self._running()
        workers.tell(Leave())
        workers.join(self._limits.collective_s + self._limits.exit_s)
        self._workers = None
        self._write_records()

    # ---- parts

    def _write_records(self) -> None:
        write_hdf5(self._directory / METRICS_FILE, self._records)

    def _running(self) -> Workers:
        if self._workers is None:
            raise LiverError("the job has no workers: it has not begun, or has stopped")
        return self._workers

    def _launch(self, layout: Layout, directory: Path | None = None) -> Workers:
        self._workers = self._spawn(layout, directory)
        return self._workers

    def _spawn(self, layout: Layout, directory: Path | None, held: bool = False) -> Workers:
        self._generation += 1
        generation = self._generation
        is_first = True

        def heard(line: Stepped) -> None:
            nonlocal is_first
            fields = line.model_dump(exclude={"type"})
            phase, is_first = "first" if is_first else "", False
            step = StepRecord(**fields, generation=generation, phase=phase)
            self._records.steps.append(step)

        digests, around = self._digests, self._around
        start = Start(self._directory, layout, generation, directory, digests, held, around)
        return Workers(start, heard)

    def _check(
        self, source: Layout, written: list[Written], target: Layout, ready: list[Ready]
    ) -> None:
        """Raises LiverError where what was loaded is not what was saved."""
        steps = {line.step for line in written} | {line.step for line in ready}
        if len(steps) != 1:
            raise LiverError(f"saved and loaded boundaries differ: {sorted(steps)}")
        if not self._digests:
            return
        saved = {rank: line.digests for rank, line in enumerate(written)}
        restored = {rank: line.digests for rank, line in enumerate(ready)}
        differences = disagreements(
            Side("saved", _rank_map(source), saved), Side("restored", _rank_map(target), restored)
        )
        if differences:
            raise LiverError(f"what was loaded is not what was saved: {differences[0]}")


def _rank_map(layout: Layout) -> RankMap:
    return RankMap(layout, tuple(range(layout.workers)))
