"""The coordinator's side of checkpoints: what makes one complete, and what a run goes on from.

Workers write their parts; a checkpoint exists from the moment at which its directory, with the
index in it, gets its final name, so a crash at any moment leaves the one before it whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain
from pathlib import Path

from liver_hpc.checkpoint.index import (
    FORMAT_VERSION,
    FURTHER_FILES,
    Checkpoint,
    CheckpointIndex,
    Part,
    SavedModel,
    complete_checkpoints,
    has_index,
    is_saved_over,
    part_name,
    partial_path,
    put_back,
    read_index,
    remains,
    set_aside,
    track,
    write_index,
    written_part,
)
from liver_hpc.checkpoint.newest import (
    Loaded,
    changed_files,
    check_own,
    checked,
    is_damaged,
    is_whole,
    newest_checkpoint,
    to_load,
)
from liver_hpc.clock import Clock
from liver_hpc.cluster.slurm.run_job import check_over
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE, is_taken, iteration_path
from liver_hpc.config.schema import RunConfig, TrainSection
from liver_hpc.coordinator.file_work import FileWork, remove
from liver_hpc.errors import CheckpointError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.ramp import samples_before
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import (
    ClassDigest,
    NotRestored,
    Restored,
    Saved,
    ScalarState,
    WireRankMap,
)
from liver_hpc.protocol.votes import Side, disagreements, unlike
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import versions_of
from liver_hpc.run import events as e
from liver_hpc.run.directory import RunDirectory, claim_checkpoints
from liver_hpc.run.epoch import Epoch

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("liver-hpc", "torch", "megatron-core")

Found = (
    e.CheckpointWritten
    | e.CheckpointFailed
    | e.StateRestored
    | e.CheckpointDoubted
    | e.CheckpointDamaged
    | e.ShellFailed
)
"""What comes of what workers say of checkpoints."""


class Checkpoints:
    """The checkpoints of one run; used by the event loop alone, which never waits for a file while
    it trains: what comes of what workers say is to be asked for.

    directory: where they lie. wake: called in another thread once something is to be `found`.
    """

    def __init__(
        self,
        config: RunConfig,
        recipe: Recipe,
        epoch: Epoch,
        clock: Clock,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._run = RunDirectory(epoch.run_directory.absolute())
        self.directory = self._run.checkpoints_place
        self._config = config
        self._recipe = recipe
        self._clock = clock
        self._pending: dict[tuple[int, int], dict[int, Saved]] = {}
        self._source: Checkpoint | Loaded | None = None
        self._restored: dict[int, Restored] = {}
        self._closed = False
        self._finite: dict[Path, bool] = {}
        self._files = FileWork[Found]("the files of checkpoints", epoch, wake)
        removals = f"the removal of old checkpoints in {self.directory}"
        self._removals = FileWork[Found](removals, epoch)

    def found(self) -> list[Found]:
        """What has come of what workers have said, since the last call."""
        return self._files.found()

    def settle(self, limit_s: float) -> list[Found]:
        """The same, of all that they have said; waits for it, for so long at most."""
        self._files.settle(limit_s)
        return self.found()

    def close(self, limit_s: float, removals_s: float) -> None:
        """Waits for what is to be done, for so long at most, and for old checkpoints to be removed;
        the log says where some are left. None that was to be read again is set aside after it."""
        self._closed = True
        self._files.close(limit_s)
        self._removals.close(removals_s)

    def _remove(self, path: Path) -> None:
        """In a thread; nobody waits for it."""
        self._removals.do(partial(remove, path))

    # ---- before the run

    def open(self, wrote: int | None = None) -> e.Resumed | None:
        """What this run goes on from; None for a new one. Clears away what was never completed, and
        sets aside what is damaged and newer. wrote: the step of the newest checkpoint that starts
        before have written.

        Raises CheckpointError when all are damaged, or gone, or it is of another model, or a run
        with other samples, ConfigError when the directory, or the newest one, is somebody else's.
        """
        claim_checkpoints(self._run, self._config, check_over)
        put_back(self.directory)
        for _, _, path in remains(self.directory):
            remove(path)
        others = [*filter(is_saved_over, sorted(self.directory.glob("iter_*")))]
        for path in others:
            log.warning("another job has saved over %s: it is none of this run's any more", path)
        own = newest_checkpoint(self.directory)
        check_own(own, self._run.path, self._config.checkpoint)
        if others and own is None and not self._config.checkpoint.goes_on_from_others:
            raise CheckpointError(f"another job has saved over {others[-1]}; there is no other one")
        loaded = to_load(self._config, self.directory, own)
        here = self.directory.resolve()
        goes_on = own is not None or (loaded is not None and loaded.path.parent.resolve() == here)
        if wrote is not None and not others and not goes_on:
            gone = f"the checkpoint of step {wrote}, which this run has written, is gone"
            raise CheckpointError(
                f"{self.directory}: {gone}, and there is no other one of it: put one back and "
                "resume the run, or submit the run file as a new one"
            )
        if loaded is not None:
            self._source = loaded
            of = "the layout of another job"
            return e.Resumed(str(loaded.path), loaded.step, -1, of, loaded.weights)
        self._source = own
        if own is None:
            return None
        path, index = own.path, own.index
        for step, damaged in complete_checkpoints(self.directory):
            if step > index.scalars.step and is_damaged(damaged):
                log.error("%s is damaged, and now called %s", damaged, self._set_aside(damaged))
        difference = index.model.difference(SavedModel.of(self._recipe.spec))
        if difference:
            raise CheckpointError(f"{path} is of another model: {difference}")
        if other := _other_samples(index.scalars, self._config.train):
            raise CheckpointError(f"{path} is of a run with {other}")
        layout = str(index.rank_map.rank_map().layout)
        return e.Resumed(str(path), index.scalars.step, index.generation, layout)

    def take_over(self, lives: Callable[[int], bool]) -> None:
        """From another coordinator, whose worlds may be writing one: clears away what no world
        completes any more. lives: whether the world of a generation does."""
        put_back(self.directory, lambda generation: not lives(generation))
        for _, generation, path in remains(self.directory):
            if path.suffix == ".removed" or not lives(generation):
                self._remove(path)

    def restored(self, message: Restored | NotRestored, rank_map: RankMap) -> None:
        """What a worker of the first world holds; once all have come, or one cannot read what it
        needs, it is found out whether it is what was saved, and which file is at fault where it is
        not."""
        source = self._source
        if source is None:
            return  # it is judged already
        if isinstance(message, NotRestored):
            self._source = None
            why = f"worker {message.worker}: {message.reason}"
            self._find_out(lambda: self._refused(source, why, is_unread=True))
            return
        self._restored[message.worker] = message
        came, workers = self._restored.keys(), rank_map.workers
        if len(came) == len(workers) and came == {*workers}:
            self._source = None
            self._find_out(lambda: self._judged(source, message.generation, rank_map))

    def _find_out(self, task: Callable[[], Found]) -> None:
        def found() -> Found:
            try:
                return task()
            except Exception as error:  # the thread's last line: who waits for it must hear of it
                log.exception("the files of checkpoints")
                return e.ShellFailed(str(error))

        self._files.do(found)

    def _judged(self, source: Checkpoint | Loaded, generation: int, rank_map: RankMap) -> Found:
        if isinstance(source, Loaded):
            what, problem = "read is not one state", self._unlike_copies(source, rank_map)
            if not problem and source.of_run is not None:
                what = "read is not what was saved"
                problem = self._unlike_saved(source.of_run.index, rank_map, source.weights)
        else:
            what, problem = (
                "restored is not what was saved",
                self._difference(source.index, rank_map),
            )
        if problem:
            self._files.say(e.CheckpointDoubted(f"what was {what}: {problem}"))
            return self._refused(source, f"what was {what}: {problem}")
        return e.StateRestored(generation)

    def _refused(self, source: Checkpoint | Loaded, problem: str, is_unread: bool = False) -> Found:
        """The run goes on from the checkpoint before where this one's files have changed; all of
        them are read for that. is_unread: by a worker, on whose node it may not have been given."""
        if isinstance(source, Loaded):
            of_run = source.of_run
            files = [] if of_run is None else [*chain(*self._changed(of_run))]
            return e.ShellFailed("; ".join([f"{source.path}: {problem}", *files[:1]]))
        path, problem = source.path, f"{source.path}: {problem}"
        changed, unread = map(_first, self._changed(source))
        if self._closed:  # the next start may be reading it
            return e.ShellFailed(f"{problem}; not all of its files were read again")
        if (unread or is_unread) and not changed:
            read = unread or "its files are as they were written"
            return e.CheckpointDamaged(f"{problem}; {read}; it is tried again", again=True)
        steps = [step for step, _ in complete_checkpoints(self.directory)]
        earlier = [step for step in steps if step < source.index.scalars.step]
        what = changed or "its files are as they were written"
        if not earlier:
            return e.ShellFailed(f"{problem}; {what}; there is no earlier checkpoint")
        if not changed:
            todo = f"to go on from step {earlier[-1]} remove {path}"
            return e.ShellFailed(f"{problem}; {what}; {todo}")
        todo = f"it is now {self._set_aside(path)}; the run goes on from step {earlier[-1]}"
        return e.CheckpointDamaged(f"{problem}; {what}; {todo}")

    def _changed(self, checkpoint: Checkpoint) -> tuple[list[str], list[str]]:
        return changed_files(checkpoint, goes_on=lambda: not self._closed)

    def _unlike_copies(self, loaded: Loaded, rank_map: RankMap) -> str:
        """Where workers hold copies of the same that differ, or are not where the checkpoint is."""
        step = self._restored[rank_map.workers[0]].scalars.step
        if step != loaded.step:
            return f"it is of step {step}, as {TRACKER_FILE} says of {loaded.step}"
        return _unlike_each_other("loaded", self._restored, rank_map)

    def _difference(self, index: CheckpointIndex, rank_map: RankMap) -> str:
        for message in self._restored.values():
            other = _scalar_difference(index.scalars, message.scalars)
            if other:
                return f"worker {message.worker}: {other}"
        return self._unlike_saved(index, rank_map)

    def _unlike_saved(
        self, index: CheckpointIndex, rank_map: RankMap, weights: bool = False
    ) -> str:
        """weights: they alone were read, and where they were cast nothing can be compared."""
        if weights and index.model.difference(SavedModel.of(self._recipe.spec)):
            return ""
        kept = _of_parameters if weights else tuple[ClassDigest, ...]
        saved = index.rank_map.rank_map()
        restored = {worker: kept(message.digests) for worker, message in self._restored.items()}
        differ = unlike(
            Side("saved", saved, dict(zip(saved.workers, map(kept, index.digests), strict=True))),
            Side("restored", rank_map, restored),
        )
        return _first(differ)

    def _set_aside(self, path: Path) -> Path:
        """Of a damaged checkpoint; a job of Megatron's loads the one before it, then."""
        left = [step for step, other in complete_checkpoints(self.directory) if other != path]
        if left:
            self._track(left[-1])
        return set_aside(path)

    # ---- while it trains

    def saved(self, message: Saved, world: WorldRef, is_finite: bool = True) -> None:
        """A worker's part; once all have come, they are made a checkpoint. is_finite: whether the
        run's loss and gradients are numbers."""
        step = message.scalars.step
        parts = self._pending.setdefault((message.generation, step), {})
        parts[message.worker] = message
        workers = world.rank_map.workers
        if len(parts) == len(workers) and parts.keys() == {*workers}:
            del self._pending[message.generation, step]
            self._find_out(lambda: self._made_of(parts, step, world, is_finite))

    def _made_of(
        self, parts: Mapping[int, Saved], step: int, world: WorldRef, is_finite: bool
    ) -> Found:
        problem = self._problem(parts, world.rank_map)
        if not problem:
            try:
                self._commit(parts, world, is_finite)
            except OSError as error:
                problem = f"{error.filename or self.directory}: {error.strerror}"
            except CheckpointError as error:
                problem = str(error)
        if problem:
            remove(partial_path(self.directory, step, world.generation))
            return e.CheckpointFailed(step, f"checkpoint of step {step} given up: {problem}")
        try:
            self._remove_old(world.generation, step)
        except OSError as error:  # it is tried again after the next checkpoint
            log.warning("old checkpoints in %s: %s", self.directory, error)
        return e.CheckpointWritten(
            step=step,
            path=str(iteration_path(self.directory, step)),
            largest_bytes=max(part.num_bytes for part in parts.values()),
            took_s=max(part.took_s for part in parts.values()),
            total_bytes=sum(part.num_bytes for part in parts.values()),
        )

    def forget(self, generation: int) -> e.CheckpointFailed | None:
        """A world has ended: what of its checkpoints has not come by now will not."""
        steps = sorted(step for of, step in self._pending if of == generation)
        for step in steps:
            del self._pending[generation, step]
            self._remove(partial_path(self.directory, step, generation))
        if not steps:
            return None
        why = "not all workers had written when their world ended"
        return e.CheckpointFailed(steps[-1], f"checkpoint of step {steps[-1]} given up: {why}")

    @staticmethod
    def _problem(parts: Mapping[int, Saved], rank_map: RankMap) -> str:
        """Why these parts do not make a checkpoint; empty when they do."""
        failed = [f"worker {worker}: {m.error}" for worker, m in sorted(parts.items()) if m.error]
        if failed:
            return _first(failed)
        return _unlike_each_other("world", parts, rank_map)

    def _commit(self, parts: Mapping[int, Saved], world: WorldRef, is_finite: bool) -> None:
        """Index, then name, but where the coordinator before came so far; raises OSError, and
        CheckpointError where not all is seen here that workers have written."""
        saved = [parts[worker] for worker in world.rank_map.workers]
        step = saved[0].scalars.step
        unnamed = partial_path(self.directory, step, world.generation)
        final = iteration_path(self.directory, step)
        is_named = not unnamed.exists() and has_index(final)
        if is_named and checked(final).index.generation == world.generation:
            self._track(step)
            return
        further = [unnamed / name for name in FURTHER_FILES]
        index = CheckpointIndex(
            format_version=FORMAT_VERSION,
            run=self._config.name,
            run_directory=str(self._run.path),
            saved_s=self._clock.now_s(),
            generation=world.generation,
            scalars=saved[0].scalars,
            rank_map=WireRankMap.of(world.rank_map),
            parts=tuple(
                Part(file=part_name(rank), num_bytes=m.num_bytes, checksum=m.checksum)
                for rank, m in enumerate(saved)
            ),
            digests=tuple(message.digests for message in saved),
            model=SavedModel.of(self._recipe.spec),
            versions=versions_of(RECORDED_PACKAGES),
            further=tuple(map(written_part, further)),
            is_finite=is_finite,
        )
        write_index(unnamed, index)
        checked(unnamed)
        if has_index(final):  # of before a restart from an earlier step
            final.rename(unnamed.with_suffix(".replaced"))
        elif final.exists():  # of somebody else
            log.warning("%s is not of this run, and now called %s", final, set_aside(final))
        os.rename(unnamed, final)
        self._finite[final] = is_finite
        if not is_finite:
            log.error("of step %d the loss is no number: checkpoints before it stay", step)
        self._track(step)

    def _track(self, step: int) -> None:
        """Of a checkpoint, which is complete also where a full disk does not take this."""
        try:
            flush_to_disk(self.directory)
            track(self.directory, step)
        except OSError as error:  # this run does not read it
            log.warning("%s: %s", self.directory / TRACKER_FILE, error.strerror)

    def _remove_old(self, generation: int, step: int) -> None:
        """Leaves the newest ones of this run, as many whose losses were numbers, and that of
        `step`, which was written just now and may be of before a recovery; all where none of the
        newest is whole. The others get a name under which they are none any more at once, that of
        the world which has written a newer one. Nothing of another run is removed, from which this
        one may go on in its directory."""
        keep, found = self._config.checkpoint.keep, complete_checkpoints(self.directory)
        own = [*filter(self._is_own, found)] if keep else []
        newest = own[-keep:] if keep else []
        finite = [path for _, path in own if self._is_finite(path)][-keep:] if keep else []
        old = [each for each in own if each not in newest and each[1] not in finite]
        if old and not any(is_whole(path) for _, path in reversed(newest)):
            log.error("none of the newest checkpoints is whole: those before stay")
            old = []
        for of, path in old:
            if of != step:
                self._finite.pop(path, None)
                self._retire(path, partial_path(self.directory, of, generation))
        for _, _, path in remains(self.directory):
            if path.suffix == ".replaced":
                self._retire(path, path)

    def _is_finite(self, path: Path) -> bool:
        if path not in self._finite:
            try:
                self._finite[path] = read_index(path).is_finite
            except CheckpointError:
                return False
        return self._finite[path]

    def _is_own(self, found: tuple[int, Path]) -> bool:
        """By the name of the run's directory, as machines may know it by other paths."""
        if self._config.checkpoint.directory is None and not is_taken(self.directory):
            return True
        try:
            return Path(read_index(found[1]).run_directory).name == self._run.path.name
        except CheckpointError:
            return False

    def _retire(self, path: Path, name: Path) -> None:
        retired = name.with_suffix(".removed")
        try:
            path.rename(retired)
        except OSError as error:  # it is tried again after the next checkpoint
            log.warning("cannot remove %s: %s", path, error)
        else:
            self._remove(retired)


def _other_samples(saved: ScalarState, train: TrainSection) -> str:
    """By which the run that has saved this would go on with other samples than one of `train`."""
    if saved.seed != train.seed:
        return (
            f"train.seed {saved.seed}, this one has {train.seed}: a run goes on in its directory "
            "with the same samples; with another directory, and checkpoint.load, it takes others"
        )
    if saved.consumed_samples != (samples := samples_before(train, saved.step)):
        return (
            f"{saved.consumed_samples} samples in {saved.step} steps, this one takes {samples} "
            "(train.global_batch, train.rampup): a run keeps its batch"
        )
    return ""


def _unlike_each_other(name: str, told: Mapping[int, Saved | Restored], rank_map: RankMap) -> str:
    """Where workers are not at the same step, or hold copies of the same that differ."""
    lead = rank_map.workers[0]
    for worker, message in sorted(told.items()):
        if other := _scalar_difference(told[lead].scalars, message.scalars):
            return f"worker {worker} against worker {lead}: {other}"
    digests = {worker: message.digests for worker, message in told.items()}
    return _first(disagreements(Side(name, rank_map, digests)))


def _scalar_difference(wanted: ScalarState, got: ScalarState) -> str:
    differ = [
        f"{name} is {getattr(got, name)}, wanted {getattr(wanted, name)}"
        for name in ScalarState.model_fields
        if getattr(got, name) != getattr(wanted, name)
    ]
    return _first(differ)


def _of_parameters(digests: tuple[ClassDigest, ...]) -> tuple[ClassDigest, ...]:
    return tuple(each for each in digests if each.kind == PARAMETER)


def _first(texts: list[str]) -> str:
    """The first of several findings, and how many more there are."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{texts[0]} (and {len(texts) - 1} more)"
