"""The coordinator's side of checkpoints: what makes one complete, and what a run goes on from.

Workers write their parts; a checkpoint exists from the moment at which its directory, with the
index in it, gets its final name, so a crash at any moment leaves the one before it whole.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.checkpoint.index import (
    FORMAT_VERSION,
    FURTHER_FILES,
    INDEX_FILE,
    Checkpoint,
    CheckpointIndex,
    Part,
    SavedModel,
    checksum,
    complete_checkpoints,
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
from liver_hpc.clock import Clock
from liver_hpc.cluster.slurm.run_job import check_over
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE, iteration_path, loaded_checkpoint
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.remover import Remover, remove
from liver_hpc.errors import CheckpointError
from liver_hpc.host.files import flush_to_disk
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import NotRestored, Restored, Saved, ScalarState, WireRankMap
from liver_hpc.protocol.votes import Side, disagreements, unlike
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import versions_of
from liver_hpc.run import events as e
from liver_hpc.run.directory import RunDirectory, claim_checkpoints

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("liver-hpc", "torch", "megatron-core")


def newest_checkpoint(directory: Path) -> Checkpoint | None:
    """The complete checkpoint of the highest step under `directory` that is not damaged; None where
    there is none at all.

    Damaged: the index cannot be read, or parts are missing or not as long as written; the log says
    so. Raises CheckpointError when all are.
    """
    problems = []
    for _, path in reversed(complete_checkpoints(directory)):
        try:
            return _checked(path)
        except CheckpointError as error:
            problems.append(str(error))
            log.error("%s; the checkpoint before it is tried", error)
    if problems:
        raise CheckpointError(f"{'; '.join(problems)}; there is no earlier checkpoint")
    return None


def _checked(path: Path) -> Checkpoint:
    index = read_index(path)
    for part in (*index.parts, *index.further):
        file = path / part.file
        got_bytes = file.stat().st_size if file.is_file() else None
        if got_bytes != part.num_bytes:
            got = "missing" if got_bytes is None else f"{got_bytes} bytes long"
            raise CheckpointError(f"{file} is {got}, wanted {part.num_bytes} bytes")
    return Checkpoint(path, index)


def _is_whole(path: Path) -> bool:
    try:
        _checked(path)
    except CheckpointError as error:
        log.error("%s", error)
        return False
    return True


def _changed_files(checkpoint: Checkpoint) -> list[str]:
    """Which files are not what was written; reads all of them."""
    found = []
    for part in (*checkpoint.index.parts, *checkpoint.index.further):
        file = checkpoint.path / part.file
        try:
            got = checksum(file)
        except OSError as error:
            found.append(f"{file} cannot be read: {error.strerror}")
            continue
        if got != part.checksum:
            wanted = f"checksum {got}, wanted {part.checksum}"
            found.append(f"{file} has changed on the disk ({wanted})")
    return found


@dataclass(frozen=True)
class Loaded:
    """A checkpoint of a job of Megatron's, or of another run, which a run begins with. of_run: what
    another run says of it."""

    path: Path
    step: int
    of_run: Checkpoint | None = None


def to_load(config: RunConfig, directory: Path, own: Checkpoint | None) -> Loaded | None:
    """What a run begins with by `checkpoint.load`; None where it goes on from its own newest one,
    or from nothing, as a job does whose --load is its --save at first.

    The run's own goes first, but where both are in one directory the newest does. Raises
    CheckpointError for a directory without one, or with one that cannot be loaded.
    """
    load = config.checkpoint.load
    if load is None:
        return None
    load = load.expanduser()
    same = load.resolve() == directory.resolve()
    if own is not None and not same:
        return None
    try:
        found = loaded_checkpoint(load)
    except CheckpointError as error:
        if own is None:
            raise
        log.warning("checkpoint.load: %s: the run goes on from its own newest one", error)
        return None
    if found is None:
        if not same:
            raise CheckpointError(f"checkpoint.load: {load} has no {TRACKER_FILE}")
        log.info("checkpoint.load: %s has no checkpoint yet; training begins at step 0", load)
        return None
    step, path = found
    is_of_a_run = (path / INDEX_FILE).exists()
    if own is not None and own.index.scalars.step >= step:
        return None
    if is_of_a_run and same:
        return None  # its own, and damaged: it would be `own` else
    return Loaded(path, step, _checked(path) if is_of_a_run else None)


class Checkpoints:
    """The checkpoints of one run; used by the event loop alone.

    directory: where they lie.
    """

    def __init__(
        self, config: RunConfig, recipe: Recipe, run_directory: Path, clock: Clock
    ) -> None:
        self._run = RunDirectory(run_directory.absolute())
        self.directory = self._run.checkpoints_path
        self._config = config
        self._recipe = recipe
        self._clock = clock
        self._pending: dict[tuple[int, int], dict[int, Saved]] = {}
        self._source: Checkpoint | Loaded | None = None
        self._restored: dict[int, Restored] = {}
        self._remover = Remover()

    # ---- before the run

    def open(self) -> e.Resumed | None:
        """What this run goes on from; None for a new one. Clears away what was never completed, and
        sets aside what is damaged and newer.

        Raises CheckpointError when all are damaged or it is of another model, ConfigError when the
        directory is somebody else's.
        """
        claim_checkpoints(self._run, self._config, check_over)
        put_back(self.directory)
        for _, path in remains(self.directory):
            remove(path)
        own = newest_checkpoint(self.directory)
        loaded = to_load(self._config, self.directory, own)
        if loaded is not None:
            self._source = loaded
            return e.Resumed(str(loaded.path), loaded.step, -1, "the layout of another job")
        self._source = own
        if own is None:
            return None
        path, index = own.path, own.index
        for step, damaged in complete_checkpoints(self.directory):
            if step > index.scalars.step:
                log.error("%s is damaged, and now called %s", damaged, self._set_aside(damaged))
        difference = index.model.difference(SavedModel.of(self._recipe.spec))
        if difference:
            raise CheckpointError(f"{path} is of another model: {difference}")
        layout = str(index.rank_map.rank_map().layout)
        return e.Resumed(str(path), index.scalars.step, index.generation, layout)

    def take_over(self, lives: Callable[[int], bool]) -> None:
        """From another coordinator, whose worlds may be writing one: clears away what no world
        completes any more. lives: whether the world of a generation does."""
        put_back(self.directory, lambda generation: not lives(generation))
        for generation, path in remains(self.directory):
            if path.suffix == ".removed":
                self._remover.remove(path)
            elif not lives(generation):
                remove(path)

    def restored(
        self, message: Restored | NotRestored, rank_map: RankMap
    ) -> e.StateRestored | e.CheckpointDamaged | e.ShellFailed | None:
        """What a worker of the first world holds; once all have come, or one cannot read what it
        needs, whether it is what was saved, and which file is at fault where it is not."""
        source = self._source
        if source is None:
            return None  # it is judged already
        if isinstance(message, NotRestored):
            self._source = None
            return self._refused(source, f"worker {message.worker}: {message.reason}")
        self._restored[message.worker] = message
        came, workers = self._restored.keys(), rank_map.workers
        if len(came) < len(workers) or came != {*workers}:
            return None
        self._source = None
        if isinstance(source, Loaded):
            what, problem = "read is not one state", self._unlike_copies(source, rank_map)
            if not problem and source.of_run is not None:
                what = "read is not what was saved"
                problem = self._unlike_saved(source.of_run.index, rank_map)
        else:
            what, problem = (
                "restored is not what was saved",
                self._difference(source.index, rank_map),
            )
        if problem:
            return self._refused(source, f"what was {what}: {problem}")
        return e.StateRestored(message.generation)

    def _refused(
        self, source: Checkpoint | Loaded, problem: str
    ) -> e.CheckpointDamaged | e.ShellFailed:
        """The run goes on from the checkpoint before where this one's files have changed; all of
        them are read for that."""
        if isinstance(source, Loaded):
            files = [] if source.of_run is None else _changed_files(source.of_run)
            return e.ShellFailed("; ".join([f"{source.path}: {problem}", *files[:1]]))
        path, problem = source.path, f"{source.path}: {problem}"
        changed = _first(_changed_files(source))
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

    def _unlike_copies(self, loaded: Loaded, rank_map: RankMap) -> str:
        """Where workers hold copies of the same that differ, or are not where the checkpoint is."""
        lead = self._restored[rank_map.workers[0]].scalars
        if lead.step != loaded.step:
            return f"it is of step {lead.step}, as {TRACKER_FILE} says of {loaded.step}"
        for worker, message in sorted(self._restored.items()):
            if other := _scalar_difference(lead, message.scalars):
                return f"worker {worker} against worker {rank_map.workers[0]}: {other}"
        digests = {worker: message.digests for worker, message in self._restored.items()}
        return _first(disagreements(Side("loaded", rank_map, digests)))

    def _difference(self, index: CheckpointIndex, rank_map: RankMap) -> str:
        for message in self._restored.values():
            other = _scalar_difference(index.scalars, message.scalars)
            if other:
                return f"worker {message.worker}: {other}"
        return self._unlike_saved(index, rank_map)

    def _unlike_saved(self, index: CheckpointIndex, rank_map: RankMap) -> str:
        saved = index.rank_map.rank_map()
        restored = {worker: message.digests for worker, message in self._restored.items()}
        differ = unlike(
            Side("saved", saved, dict(zip(saved.workers, index.digests, strict=True))),
            Side("restored", rank_map, restored),
        )
        return _first(differ)

    def _set_aside(self, path: Path) -> Path:
        """Of a damaged checkpoint; a job of Megatron's loads the one before it, then."""
        left = [step for step, other in complete_checkpoints(self.directory) if other != path]
        if left:
            try:
                track(self.directory, left[-1])
            except OSError as error:  # a full disk; this run does not read it
                log.warning("%s: %s", self.directory / TRACKER_FILE, error.strerror)
        return set_aside(path)

    # ---- while it trains

    def saved(
        self, message: Saved, world: WorldRef
    ) -> e.CheckpointWritten | e.CheckpointFailed | None:
        """A worker's part; once all have come, what became of the checkpoint."""
        step = message.scalars.step
        parts = self._pending.setdefault((message.generation, step), {})
        parts[message.worker] = message
        workers = world.rank_map.workers
        if len(parts) < len(workers) or parts.keys() != {*workers}:
            return None
        del self._pending[message.generation, step]
        problem = self._problem(parts, world.rank_map)
        if not problem:
            try:
                self._commit(parts, world)
            except OSError as error:
                problem = f"{error.filename}: {error.strerror}"
            except CheckpointError as error:
                problem = str(error)
        if problem:
            remove(partial_path(self.directory, step, message.generation))
            return e.CheckpointFailed(step, f"checkpoint of step {step} given up: {problem}")
        self._remove_old(world.generation)
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
            remove(partial_path(self.directory, step, generation))
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
        lead = parts[rank_map.workers[0]].scalars
        for worker, message in sorted(parts.items()):
            other = _scalar_difference(lead, message.scalars)
            if other:
                return f"worker {worker} against worker {rank_map.workers[0]}: {other}"
        digests = {worker: message.digests for worker, message in parts.items()}
        return _first(disagreements(Side("world", rank_map, digests)))

    def _commit(self, parts: Mapping[int, Saved], world: WorldRef) -> None:
        """Index, then name, but where the coordinator before came so far; raises OSError, and
        CheckpointError where not all is seen here that workers have written."""
        saved = [parts[worker] for worker in world.rank_map.workers]
        step = saved[0].scalars.step
        partial = partial_path(self.directory, step, world.generation)
        final = iteration_path(self.directory, step)
        is_named = not partial.exists() and (final / INDEX_FILE).exists()
        if is_named and _checked(final).index.generation == world.generation:
            track(self.directory, step)
            return
        further = [partial / name for name in FURTHER_FILES]
        index = CheckpointIndex(
            format_version=FORMAT_VERSION,
            run=self._config.name,
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
        )
        write_index(partial, index)
        _checked(partial)
        if (final / INDEX_FILE).exists():  # of before a restart from an earlier step
            final.rename(partial.with_suffix(".replaced"))
        elif final.exists():  # of somebody else
            log.warning("%s is not of this run, and now called %s", final, set_aside(final))
        os.rename(partial, final)
        flush_to_disk(self.directory)
        track(self.directory, step)

    def _remove_old(self, generation: int) -> None:
        """Leaves the newest ones; all where none of those is whole. The others get a name under
        which they are none any more at once, that of the world which has written a newer one."""
        found = complete_checkpoints(self.directory)
        keep = self._config.checkpoint.keep
        old = found[:-keep] if keep is not None else []
        if old and not any(_is_whole(path) for _, path in reversed(found[len(old) :])):
            log.error("none of the newest checkpoints is whole: those before stay")
            old = []
        for step, path in old:
            self._retire(path, partial_path(self.directory, step, generation))
        for _, path in remains(self.directory):
            if path.suffix == ".replaced":
                self._retire(path, path)

    def _retire(self, path: Path, name: Path) -> None:
        retired = name.with_suffix(".removed")
        try:
            path.rename(retired)
        except OSError as error:  # it is tried again after the next checkpoint
            log.warning("cannot remove %s: %s", path, error)
        else:
            self._remover.remove(retired)

    def close(self, limit_s: float) -> None:
        """Waits for old checkpoints to be removed, for so long at most."""
        self._remover.close(limit_s)


def _scalar_difference(wanted: ScalarState, got: ScalarState) -> str:
    differ = [
        f"{name} is {getattr(got, name)}, wanted {getattr(wanted, name)}"
        for name in ScalarState.model_fields
        if getattr(got, name) != getattr(wanted, name)
    ]
    return _first(differ)


def _first(texts: list[str]) -> str:
    """The first of several findings, and how many more there are."""
    if len(texts) < 2:
        return "".join(texts)
    return f"{texts[0]} (and {len(texts) - 1} more)"
