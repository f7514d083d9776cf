"""What makes a checkpoint complete, which one a run goes on from, and which are kept."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.index import (
    FORMAT_VERSION,
    INDEX_FILE,
    checksum,
    complete_checkpoints,
    newest_step,
    read_index,
    remains,
)
from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.config.megatron_checkpoint import tracked_step
from liver_hpc.coordinator import checkpoints as module
from liver_hpc.coordinator.file_work import FileWork, remove
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import NotRestored, Restored, Saved
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.events import (
    CheckpointDamaged,
    CheckpointDoubted,
    CheckpointFailed,
    CheckpointWritten,
    Resumed,
    ShellFailed,
    StateRestored,
)
from tests.fakes import tiny_run
from tests.unit.checkpoint.disk import (
    Disk,
    digests_of,
    empty,
    filled,
    opened,
    restore_part,
    restored_rank_map,
    save_part,
    scalar_state,
    write_part,
)
from tests.unit.layout.models import TIED

TWO = Layout(1, 1, 2)
Change = Callable[[Saved], Saved]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(TIED, tmp_path / "run")


def saved_with(disk: Disk, step: int, change: Change) -> object:
    """A checkpoint of which the second worker's message is another one."""
    first, second = (disk.part(TWO, at, step) for at in TWO.coordinates())
    assert save_part(disk.checkpoints, first, disk.world(TWO)) is None
    return save_part(disk.checkpoints, change(second), disk.world(TWO))


def test_a_checkpoint_is_complete_once_all_workers_have_saved(disk: Disk) -> None:
    first, second = (disk.part(TWO, at, 4) for at in TWO.coordinates())
    save_part(disk.checkpoints, second, disk.world(TWO))
    assert disk.steps() == [".step-00000004-g3.partial"]
    assert newest_checkpoint(disk.directory) is None
    longer = first.model_copy(update={"took_s": 1.5})
    assert save_part(disk.checkpoints, longer, disk.world(TWO)) == CheckpointWritten(
        step=4,
        path=str(disk.directory / "iter_0000004"),
        largest_bytes=max(first.num_bytes, second.num_bytes),
        took_s=1.5,
        total_bytes=first.num_bytes + second.num_bytes,
    )
    assert disk.steps() == ["iter_0000004"]
    newest = newest_checkpoint(disk.directory)
    assert newest is not None
    index = newest.index
    assert (index.scalars, index.generation) == (scalar_state(4), 3)
    assert index.rank_map.rank_map() == disk.world(TWO).rank_map
    assert [part.file for part in index.parts] == ["__0_0.distcp", "__1_0.distcp"]
    assert index.digests == (first.digests, second.digests)
    assert set(index.versions) == {"liver-hpc", "torch", "megatron-core"}


def test_workers_may_be_a_step_ahead_of_each_other(disk: Disk) -> None:
    ahead, behind = TWO.coordinates()
    for step in (4, 5):
        save_part(disk.checkpoints, disk.part(TWO, ahead, step), disk.world(TWO))
    for step in (4, 5):
        save_part(disk.checkpoints, disk.part(TWO, behind, step), disk.world(TWO))
    assert disk.steps() == ["iter_0000004", "iter_0000005"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda saved: saved.model_copy(update={"error": "No space left on device"}),
            "worker 6: No space left on device",
        ),
        (
            lambda saved: saved.model_copy(
                update={"scalars": saved.scalars.model_copy(update={"loss_scale": 2.0})}
            ),
            "worker 6 against worker 5: loss_scale is 2.0, wanted 1.0",
        ),
        (
            lambda saved: saved.model_copy(
                update={
                    "digests": tuple(
                        digest.model_copy(update={"value": "00000000000000ff"})
                        for digest in saved.digests
                    )
                }
            ),
            "parameter (split over tp): ",
        ),
    ],
)
def test_parts_that_do_not_fit_together_leave_the_one_before(
    disk: Disk, change: Change, said: str
) -> None:
    disk.save(TWO, 4)
    failed = saved_with(disk, 8, change)
    assert isinstance(failed, CheckpointFailed)
    assert failed.reason.startswith("checkpoint of step 8 given up: ")
    assert said in failed.reason
    assert disk.steps() == ["iter_0000004"]
    assert isinstance(disk.save(TWO, 9), CheckpointWritten)


@pytest.mark.parametrize("dies_in", ["write_index", "rename", "flush_to_disk"])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    disk: Disk, dies_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save(TWO, 4)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os if dies_in == "rename" else module, dies_in, die)
        with pytest.raises(KeyboardInterrupt):
            disk.save(TWO, 8)
    later = Disk(TIED, disk.run_directory).checkpoints.open()
    assert later is not None
    assert later.step == (8 if dies_in == "flush_to_disk" else 4)
    assert not any(name.startswith(".") for name in disk.steps())


def test_a_disk_on_which_the_index_cannot_be_written_costs_that_checkpoint(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.save(TWO, 4)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "checkpoint.json")

    with monkeypatch.context() as patched:
        patched.setattr(module, "write_index", full)
        assert disk.save(TWO, 8) == CheckpointFailed(
            8, "checkpoint of step 8 given up: checkpoint.json: No space left on device"
        )
    assert disk.steps() == ["iter_0000004"]


@pytest.mark.parametrize("again", [False, True])
def test_one_that_has_its_name_is_complete_though_no_job_of_megatrons_is_told_of_it(
    disk: Disk, again: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full just now; or for the next coordinator, which finds it named already."""
    said = [disk.part(TWO, at, 8) for at in TWO.coordinates()]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "track", full)
    for checkpoints in [disk.checkpoints, Disk(TIED, disk.run_directory).checkpoints][: 1 + again]:
        *_, written = [save_part(checkpoints, each, disk.world(TWO)) for each in said]
        assert isinstance(written, CheckpointWritten)
    assert disk.steps() == ["iter_0000008"]
    assert caplog.text.count("latest_checkpointed_iteration.txt: No space left") == 1 + again


def test_an_error_without_a_file_is_one_of_the_directory(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_index", full)
    why = f"{disk.directory}: No space left on device"
    assert disk.save(TWO, 8) == CheckpointFailed(8, f"checkpoint of step 8 given up: {why}")


def test_a_world_that_ends_takes_its_unfinished_checkpoint_along(disk: Disk) -> None:
    disk.save(TWO, 4)
    first, second = (disk.part(TWO, at, 8) for at in TWO.coordinates())
    assert disk.checkpoints.forget(3) is None
    save_part(disk.checkpoints, first, disk.world(TWO))
    assert disk.checkpoints.forget(2) is None
    assert disk.checkpoints.forget(3) == CheckpointFailed(
        8,
        "checkpoint of step 8 given up: not all workers had written when their world ended",
    )
    assert disk.steps() == ["iter_0000004"]
    assert save_part(disk.checkpoints, second, disk.world(TWO)) is None, "it came too late"


def test_the_newest_are_kept(tmp_path: Path) -> None:
    disk = Disk(TIED, tmp_path, keep=2)
    for step in (2, 99, 100, 3_000_000_000):
        disk.save(TWO, step)
    assert disk.steps() == ["iter_0000100", "iter_3000000000"]
    newest = newest_checkpoint(disk.directory)
    assert newest is not None
    assert newest.index.scalars.step == 3_000_000_000


def test_of_a_loss_that_is_no_number_the_checkpoints_before_stay(tmp_path: Path) -> None:
    """Also for a coordinator that did not write them."""
    disk = Disk(TIED, tmp_path, keep=2)
    for step, is_finite in ((1, True), (2, True), (3, True), (4, False), (5, False), (6, False)):
        disk.save(TWO, step, is_finite)
    kept = ["iter_0000002", "iter_0000003", "iter_0000005", "iter_0000006"]
    assert disk.steps() == kept
    later = Disk(TIED, tmp_path, keep=2)
    later.save(TWO, 7)
    assert later.steps() == ["iter_0000003", "iter_0000006", "iter_0000007"]
    later.save(TWO, 8)
    assert later.steps() == ["iter_0000007", "iter_0000008"]


def test_one_that_is_written_after_going_back_stays(tmp_path: Path) -> None:
    """A recovery from memory may go back to before the newest on disk."""
    disk = Disk(TIED, tmp_path, keep=2)
    for step in (60, 120, 40):
        written = disk.save(TWO, step)
    assert isinstance(written, CheckpointWritten)
    assert Path(written.path).is_dir()
    assert tracked_step(disk.directory) == 40
    disk.save(TWO, 80)
    assert disk.steps() == ["iter_0000080", "iter_0000120"]
    assert tracked_step(disk.directory) == 80


def test_those_of_another_run_in_the_directory_stay(tmp_path: Path) -> None:
    """A run may go on from them, and save where they are."""
    (shared := tmp_path / "shared").mkdir()
    for run, steps, keep in (("a", (2, 4, 6), 9), ("b", (8, 10), 1)):
        (tmp_path / run).mkdir()
        (tmp_path / run / "checkpoints").symlink_to(shared)
        disk = Disk(TIED, tmp_path / run, keep, shared)
        for step in steps:
            disk.save(TWO, step)
    assert disk.steps() == [f"iter_{step:07d}" for step in (2, 4, 6, 10)]


def test_nobody_waits_until_old_ones_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are no checkpoints any more at once; the next start removes what is left."""
    disk, goes_on, rmtree = Disk(TIED, tmp_path, keep=1), threading.Event(), shutil.rmtree
    disk.checkpoints._removals = FileWork("the removal of old checkpoints", Epoch(tmp_path, 1))

    def slow(path: Path) -> None:
        assert goes_on.wait(10.0)
        rmtree(path)

    monkeypatch.setattr(shutil, "rmtree", slow)
    for step in (4, 8, 8):
        assert isinstance(disk.save(TWO, step), CheckpointWritten)
    assert [step for step, _ in complete_checkpoints(disk.directory)] == [8]
    disk.checkpoints.close(10.0, removals_s=0.05)
    assert remains(disk.directory)
    assert "waited 0.05 s for the removal of old checkpoints; not all is done" in caplog.text
    goes_on.set()
    disk.checkpoints.close(10.0, removals_s=10.0)
    assert disk.steps() == ["iter_0000008"]


def test_a_step_that_was_saved_in_a_life_before_is_saved_anew(disk: Disk) -> None:
    disk.save(TWO, 4)
    disk.save(Layout(2, 1, 1), 4)
    assert disk.steps() == ["iter_0000004"]
    newest = newest_checkpoint(disk.directory)
    assert newest is not None
    assert newest.index.rank_map.rank_map().layout == Layout(2, 1, 1)


def test_a_run_directory_that_is_removed_is_made_again_for_its_owner_alone(disk: Disk) -> None:
    """As it was before, whatever the umask."""
    before = os.umask(0)
    try:
        assert isinstance(disk.save(TWO, 4), CheckpointWritten)
    finally:
        os.umask(before)
    assert stat.S_IMODE(disk.run_directory.stat().st_mode) == 0o700


def test_checkpoints_lie_elsewhere_also_where_the_run_directory_is_removed(tmp_path: Path) -> None:
    run, place = tmp_path / "run", tmp_path / "place"
    for path in (run, place):
        path.mkdir()
    (run / "checkpoints").symlink_to(place)
    disk = Disk(TIED, run, elsewhere=place)
    shutil.rmtree(run)
    assert isinstance(disk.save(TWO, 4), CheckpointWritten)
    assert (place / "iter_0000004").is_dir()
    assert not run.exists()


def test_what_a_killed_run_was_writing_is_cleared_away(disk: Disk) -> None:
    disk.save(TWO, 4)
    at = next(TWO.coordinates())
    write_part(filled(TIED, TWO, at), 8, disk.directory / ".step-00000008-g4.partial")
    assert Disk(TIED, disk.run_directory).checkpoints.open() is not None
    assert disk.steps() == ["iter_0000004"]


@pytest.mark.parametrize("takes_over", [False, True])
def test_one_that_was_to_be_replaced_is_there_again_where_nothing_came_in_its_place(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, takes_over: bool
) -> None:
    disk.save(TWO, 4)
    rename, names = os.rename, list[object]()

    def die_at_the_second(source: Any, target: Any) -> None:
        names.append(target)
        if len(names) == 2:
            raise KeyboardInterrupt
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", die_at_the_second)
        with pytest.raises(KeyboardInterrupt):
            disk.save(TWO, 4)
    assert not any(name.startswith("iter_") for name in disk.steps())
    later = Disk(TIED, disk.run_directory).checkpoints
    if takes_over:  # and the world that wrote it is gone
        later.take_over(lambda generation: False)
        assert disk.steps() == ["iter_0000004"]
    resumed = later.open()
    assert resumed is not None
    assert (resumed.step, disk.steps()) == (4, ["iter_0000004"])


@pytest.mark.parametrize("dies_in", [None, "write_index", "rename", "flush_to_disk", "track"])
def test_the_next_coordinator_completes_what_workers_had_written(
    disk: Disk, dies_in: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the one before came, and clears away what is of a world that is over."""
    said = [disk.part(TWO, at, 8) for at in TWO.coordinates()]
    write_part(
        filled(TIED, TWO, next(TWO.coordinates())), 9, disk.directory / ".step-00000009-g2.partial"
    )

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    if dies_in is not None:
        with monkeypatch.context() as patched:
            patched.setattr(os if dies_in == "rename" else module, dies_in, die)
            save_part(disk.checkpoints, said[0], disk.world(TWO))
            with pytest.raises(KeyboardInterrupt):
                save_part(disk.checkpoints, said[1], disk.world(TWO))
    later = Disk(TIED, disk.run_directory).checkpoints
    later.take_over(lambda generation: generation == 3)
    first, second = (save_part(later, each, disk.world(TWO)) for each in said)
    assert first is None
    assert isinstance(second, CheckpointWritten)
    assert disk.steps() == ["iter_0000008"]
    newest = newest_checkpoint(disk.directory)
    assert newest is not None
    assert tracked_step(disk.directory) == 8


def test_a_new_run_has_none(disk: Disk) -> None:
    assert disk.checkpoints.open() is None


@pytest.mark.parametrize("change", [{"format_version": FORMAT_VERSION + 1}, {"loss": 2.0}])
def test_one_of_another_release_is_not_passed_over(disk: Disk, change: dict[str, object]) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    file = disk.directory / "iter_0000008" / INDEX_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=r"is of another release, liver-hpc \d.*: "):
        Disk(TIED, disk.run_directory).checkpoints.open()
    assert disk.steps() == ["iter_0000004", "iter_0000008"]


def test_an_index_that_is_damaged_is_refused(disk: Disk) -> None:
    disk.save(TWO, 4)
    path = disk.directory / "iter_0000004"
    index = json.loads((path / INDEX_FILE).read_text())
    (path / INDEX_FILE).write_text(json.dumps(index | {"parts": "none"}))
    with pytest.raises(CheckpointError, match="is damaged: parts: "):
        read_index(path)
    (path / INDEX_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="is damaged"):
        read_index(path)


def test_restored_workers_are_compared_with_what_was_saved(disk: Disk) -> None:
    disk.save(Layout(2, 1, 2), 4)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    rank_map = restored_rank_map(TWO)
    states = [filled(TIED, TWO, at) for at in TWO.coordinates()]
    said = [
        restore_part(
            later,
            Restored(worker=w, generation=0, scalars=scalar_state(4), digests=digests_of(state)),
            rank_map,
        )
        for w, state in enumerate(states)
    ]
    assert said == [None, StateRestored(0)]


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"seed": 7}, "train.seed 1234, this one has 7: "),
        ({"global_batch": 16}, "32 samples in 4 steps, this one takes 64 "),
    ],
)
def test_a_run_of_other_samples_is_refused_before_a_worker_boots(
    disk: Disk, train: dict[str, Any], said: str
) -> None:
    disk.save(TWO, 4)
    config = tiny_run(train={"steps": 60, "global_batch": 8, **train})
    with pytest.raises(CheckpointError, match=f"iter_0000004 is of a run with {said}") as refused:
        opened(config, TIED, disk.run_directory).open()
    assert "remove" not in str(refused.value)
    assert disk.steps() == ["iter_0000004"]


@pytest.mark.parametrize("wrong", ["digests", "scalars"])
def test_workers_that_restored_something_else_are_refused(disk: Disk, wrong: str) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    one = Layout(1, 1, 1)
    (at,) = one.coordinates()
    state = (empty if wrong == "digests" else filled)(TIED, one, at)
    scalars = scalar_state(8).model_copy(update={"seed": 5} if wrong == "scalars" else {})
    message = Restored(worker=0, generation=0, scalars=scalars, digests=digests_of(state))
    said = "seed is 5, wanted 1234" if wrong == "scalars" else r"exp_avg \(split over tp\): "
    refused = restore_part(later, message, restored_rank_map(one))
    assert isinstance(refused, ShellFailed)
    assert re.search(said, refused.reason)
    assert "its files are as they were written" in refused.reason
    assert refused.reason.endswith(f"to go on from step 4 remove {disk.directory / 'iter_0000008'}")


# ---- damaged ones


def delete_a_part(path: Path) -> None:
    (path / "__1_0.distcp").unlink()


def shorten_a_part(path: Path) -> None:
    os.truncate(path / "__0_0.distcp", 100)


def change_a_part(path: Path) -> None:
    part = path / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1] + b"x")


def break_the_index(path: Path) -> None:
    (path / INDEX_FILE).write_text("{")


@pytest.mark.parametrize("damage", [delete_a_part, shorten_a_part, break_the_index])
def test_of_a_damaged_one_the_run_goes_on_from_the_one_before(
    disk: Disk, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    damage(disk.directory / "iter_0000008")
    left = sorted(path.name for path in (disk.directory / "iter_0000008").iterdir())
    later = Disk(TIED, disk.run_directory)
    source = later.checkpoints.open()
    assert source is not None
    assert source == Resumed(str(disk.directory / "iter_0000004"), 4, 3, "tp1 pp1 dp2")
    assert disk.steps() == ["damaged-iter_0000008", "iter_0000004"]
    aside = disk.directory / "damaged-iter_0000008"
    assert sorted(path.name for path in aside.iterdir()) == left, "it is kept as it was"
    assert f"iter_0000008 is damaged, and now called {aside}" in caplog.text

    later.save(TWO, 8)
    damage(disk.directory / "iter_0000008")
    assert Disk(TIED, disk.run_directory).checkpoints.open() is not None
    assert disk.steps() == ["damaged-iter_0000008", "damaged-iter_0000008-2", "iter_0000004"]


def gives_out(monkeypatch: pytest.MonkeyPatch, name: str, of: str, times: int) -> None:
    """The file system does not give a file that is called so, for so many times."""
    left, read = [times], getattr(Path, name)

    def fails(path: Path, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(of) and left[0]:
            left[0] -= 1
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read(path, *arguments, **options)

    monkeypatch.setattr(Path, name, fails)


@pytest.mark.parametrize(("times", "step"), [(1, 8), (99, 4)])
@pytest.mark.parametrize("read", ["read_bytes", "stat"])
def test_one_that_cannot_be_read_for_a_moment_is_not_damaged(
    disk: Disk, read: str, times: int, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for saved in (4, 8):
        disk.save(TWO, saved)
    file = INDEX_FILE if read == "read_bytes" else "__1_0.distcp"
    gives_out(monkeypatch, read, f"iter_0000008/{file}", times)
    resumed = Disk(TIED, disk.run_directory).checkpoints.open()
    assert resumed is not None
    assert resumed.step == step
    assert disk.steps() == ["iter_0000004", "iter_0000008"]


def test_what_cannot_be_read_again_has_not_changed_and_is_tried_from_the_start(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 8):
        disk.save(TWO, step)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    gives_out(monkeypatch, "open", "iter_0000008/__1_0.distcp", 99)
    told = NotRestored(worker=0, generation=0, reason="cannot be read")
    refused = restore_part(later, told, restored_rank_map(TWO))
    assert isinstance(refused, CheckpointDamaged)
    assert refused.reason.endswith(
        "__1_0.distcp cannot be read: Stale file handle; it is tried again"
    )
    assert disk.steps() == ["iter_0000004", "iter_0000008"]


def test_a_full_disk_keeps_nobody_from_the_one_before_a_damaged_one(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (4, 8):
        disk.save(TWO, step)
    newest = newest_checkpoint(disk.directory)
    assert newest is not None
    (newest.path / newest.index.parts[0].file).unlink()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "track", full)
    resumed = Disk(TIED, disk.run_directory).checkpoints.open()
    assert resumed is not None
    assert resumed.step == 4
    assert "damaged-iter_0000008" in disk.steps()


def test_damaged_ones_do_not_count_among_those_that_are_kept(disk: Disk) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    delete_a_part(disk.directory / "iter_0000008")
    later = Disk(TIED, disk.run_directory)
    later.checkpoints.open()
    for step in (9, 10, 11):
        later.save(TWO, step)
    assert disk.steps() == ["damaged-iter_0000008", "iter_0000010", "iter_0000011"]
    assert newest_step(disk.directory) == 11


def test_a_copy_under_a_higher_number_is_not_gone_on_from(disk: Disk) -> None:
    """It would be the newest for ever, and those that the run saves after it would be old ones."""
    for step in (40, 80):
        disk.save(TWO, step)
    shutil.copytree(disk.directory / "iter_0000040", disk.directory / "iter_0000900")
    resumed = disk.checkpoints.open()
    assert resumed is not None
    assert resumed.step == 80
    assert disk.steps() == ["damaged-iter_0000900", "iter_0000040", "iter_0000080"]


def test_where_all_are_damaged_the_run_does_not_begin_anew(disk: Disk) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    delete_a_part(disk.directory / "iter_0000004")
    break_the_index(disk.directory / "iter_0000008")
    for _ in range(2):  # nor when it is tried again
        said = r"iter_0000008/.* is damaged: .*; .*iter_0000004/__1_0.distcp is missing.* no earl"
        with pytest.raises(CheckpointError, match=said):
            Disk(TIED, disk.run_directory).checkpoints.open()
        assert disk.steps() == ["iter_0000004", "iter_0000008"]


def test_where_all_are_gone_the_run_does_not_begin_anew(disk: Disk) -> None:
    disk.save(TWO, 4)
    shutil.rmtree(disk.directory / "iter_0000004")
    later = Disk(TIED, disk.run_directory).checkpoints
    with pytest.raises(CheckpointError, match="the checkpoint of step 4, which this run has writ"):
        later.open(wrote=4)
    assert later.open() is None, "of a run that has written none"


def test_of_one_that_is_a_link_the_link_goes(disk: Disk, tmp_path: Path) -> None:
    """Its owner has moved the checkpoint to an archive."""
    disk.save(TWO, 4)
    archived = (disk.directory / "iter_0000004").rename(tmp_path / "archived")
    (disk.directory / "iter_0000004").symlink_to(archived)
    before = sorted(path.name for path in archived.iterdir())
    remove(disk.directory / "iter_0000004")
    assert sorted(path.name for path in archived.iterdir()) == before
    assert disk.steps() == []


def test_one_whose_bytes_have_changed_is_set_aside_for_the_next_start(disk: Disk) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    change_a_part(disk.directory / "iter_0000008")
    one = Layout(1, 1, 1)
    (at,) = one.coordinates()
    digests = digests_of(empty(TIED, one, at))
    message = Restored(worker=0, generation=0, scalars=scalar_state(8), digests=digests)
    later.restored(message, restored_rank_map(one))
    doubted, refused = later.found()
    assert isinstance(doubted, CheckpointDoubted)
    assert doubted.reason.startswith("what was restored is not what was saved: ")
    assert isinstance(refused, CheckpointDamaged)
    said = r"__0_0.distcp has changed on the disk .* it is now .*damaged-iter_0000008; the run goes"
    assert re.search(said, refused.reason)
    assert refused.reason.endswith("the run goes on from step 4")
    assert disk.steps() == ["damaged-iter_0000008", "iter_0000004"]


@pytest.mark.parametrize("damage", [delete_a_part, change_a_part, None])
def test_one_that_a_worker_cannot_read_is_set_aside_where_its_files_have_changed(
    disk: Disk, damage: Callable[[Path], None] | None
) -> None:
    disk.save(TWO, 4)
    disk.save(TWO, 8)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    path = disk.directory / "iter_0000008"
    if damage is not None:
        damage(path)
    rank_map = restored_rank_map(TWO)
    told = [NotRestored(worker=w, generation=0, reason="cannot be read") for w in (1, 0)]
    refused = restore_part(later, told[0], rank_map)
    assert restore_part(later, told[1], rank_map) is None, "it is judged already"
    assert isinstance(refused, CheckpointDamaged)
    assert refused.reason.startswith(f"{path}: worker 1: cannot be read; ")
    assert refused.reason.endswith("it is tried again") == refused.again == (damage is None)
    assert disk.steps() == [
        "iter_0000004" if damage is None else "damaged-iter_0000008",
        "iter_0000008" if damage is None else "iter_0000004",
    ]


def test_what_is_read_again_stays_as_it_is_once_the_start_is_over(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one may be reading it."""
    for step in (4, 8):
        disk.save(TWO, step)
    reads, goes_on = threading.Event(), threading.Event()
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    later._files = FileWork("files", Epoch(disk.run_directory, 1))

    def slow(path: Path) -> str:
        reads.set()
        assert goes_on.wait(10.0)
        return checksum(path)

    monkeypatch.setattr("liver_hpc.checkpoint.newest.checksum", slow)
    change_a_part(disk.directory / "iter_0000008")
    told = NotRestored(worker=0, generation=0, reason="cannot be read")
    later.restored(told, restored_rank_map(TWO))
    assert reads.wait(10.0)
    later.close(0.05, removals_s=0.05)
    goes_on.set()
    assert later.settle(10.0)
    assert disk.steps() == ["iter_0000004", "iter_0000008"]


def test_the_last_one_is_never_set_aside(disk: Disk) -> None:
    disk.save(TWO, 4)
    later = Disk(TIED, disk.run_directory).checkpoints
    later.open()
    change_a_part(disk.directory / "iter_0000004")
    told = NotRestored(worker=0, generation=0, reason="cannot be read")
    refused = restore_part(later, told, restored_rank_map(TWO))
    assert isinstance(refused, ShellFailed)
    assert "__0_0.distcp has changed on the disk" in refused.reason
    assert refused.reason.endswith("there is no earlier checkpoint")
    assert disk.steps() == ["iter_0000004"]


def test_parts_that_the_coordinator_does_not_see_make_no_checkpoint(disk: Disk) -> None:
    disk.save(TWO, 4)
    first, second = (disk.part(TWO, at, 8) for at in TWO.coordinates())
    save_part(disk.checkpoints, first, disk.world(TWO))
    (disk.directory / ".step-00000008-g3.partial" / "__0_0.distcp").unlink()
    failed = save_part(disk.checkpoints, second, disk.world(TWO))
    assert isinstance(failed, CheckpointFailed)
    assert "__0_0.distcp is missing" in failed.reason
    assert disk.steps() == ["iter_0000004"]


def test_the_only_whole_one_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever became of newer ones since they were written."""
    disk = Disk(TIED, tmp_path, keep=1)
    disk.save(TWO, 4)
    flush = module.flush_to_disk

    def damaging(directory: Path) -> None:
        flush(directory)
        delete_a_part(directory / "iter_0000008")

    with monkeypatch.context() as patched:
        patched.setattr(module, "flush_to_disk", damaging)
        disk.save(TWO, 8)
    assert disk.steps() == ["iter_0000004", "iter_0000008"]
    assert "iter_0000008/__1_0.distcp is missing" in caplog.text
    disk.save(TWO, 12)
    assert disk.steps() == ["iter_0000012"]
