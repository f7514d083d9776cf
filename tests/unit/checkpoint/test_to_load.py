"""What a run begins with: its own newest checkpoint, that of `checkpoint.load`, the weights of
`checkpoint.weights`, or nothing."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.index import INDEX_FILE, Checkpoint
from liver_hpc.checkpoint.newest import Loaded, goes_on_from, newest_checkpoint, to_load
from liver_hpc.cli.check import _check_checkpoints
from liver_hpc.config.megatron_checkpoint import (
    FORMAT_FILE,
    METADATA_FILE,
    TRACKER_FILE,
    iteration_path,
    tracked_step,
)
from liver_hpc.config.schema import CheckpointSection
from liver_hpc.errors import CheckpointError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.messages import Restored
from liver_hpc.run.events import ShellFailed, StateRestored
from tests.fakes import tiny_run
from tests.unit.checkpoint.disk import (
    Disk,
    digests_of,
    empty,
    filled,
    opened,
    restore_part,
    restored_rank_map,
    scalar_state,
)
from tests.unit.config.test_megatron_checkpoint import checkpoint
from tests.unit.layout.models import TIED

FILES = ("metadata.json", ".metadata", "common.pt")


def of(directory: Path, load: Path | None, own: Checkpoint | None = None) -> Loaded | None:
    return to_load(tiny_run(checkpoint={"load": load}), directory, own)


@pytest.fixture
def own(tmp_path: Path) -> Checkpoint:
    """A run's own checkpoint of step 8."""
    disk = Disk(TIED, tmp_path / "run")
    disk.save(Layout(1, 1, 2), 8)
    found = newest_checkpoint(disk.directory)
    assert found is not None
    return found


def test_without_load_nothing_is_loaded(tmp_path: Path) -> None:
    assert of(tmp_path, None) is None


def test_a_new_run_begins_with_what_a_job_has_saved(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 50, *FILES)
    assert of(tmp_path / "run", tmp_path) == Loaded(path, 50)


def test_a_new_run_begins_with_what_another_run_has_saved(own: Checkpoint, tmp_path: Path) -> None:
    assert (own.path / INDEX_FILE).exists()
    assert of(tmp_path / "new", own.path.parent) == Loaded(own.path, 8, own)
    (own.path / own.index.parts[0].file).unlink()
    with pytest.raises(CheckpointError, match="is missing, wanted"):
        of(tmp_path / "new", own.path.parent)


@pytest.mark.parametrize("damaged", [False, True])
def test_what_another_run_has_saved_is_compared_with_what_it_says_of_it(
    own: Checkpoint, tmp_path: Path, damaged: bool
) -> None:
    """All copies that were read are alike: the file has changed."""
    config = tiny_run(checkpoint={"load": own.path.parent})
    later = opened(config, TIED, tmp_path / "new")
    later.open()
    if damaged:
        file = own.path / own.index.parts[0].file
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    one = Layout(1, 1, 1)
    state = (empty if damaged else filled)(TIED, one, next(one.coordinates()))
    message = Restored(worker=0, generation=0, scalars=scalar_state(8), digests=digests_of(state))
    came = restore_part(later, message, restored_rank_map(one))
    if not damaged:
        assert came == StateRestored(0)
        return
    assert isinstance(came, ShellFailed)
    assert "what was read is not what was saved: " in came.reason
    assert "has changed on the disk" in came.reason


def test_a_runs_own_goes_first(tmp_path: Path, own: Checkpoint) -> None:
    checkpoint(tmp_path, 50, *FILES)
    assert of(own.path.parent, tmp_path, own) is None


@pytest.mark.parametrize(("step", "loaded"), [(7, False), (50, True)])
def test_in_one_directory_the_newest_goes_first(own: Checkpoint, step: int, loaded: bool) -> None:
    path = checkpoint(own.path.parent, step, *FILES)
    assert of(own.path.parent, own.path.parent, own) == (Loaded(path, step) if loaded else None)


@pytest.mark.parametrize("tracked", ["", "16"])
def test_in_one_directory_a_torn_or_stale_tracker_keeps_nobody_from_his_own(
    own: Checkpoint, tracked: str
) -> None:
    """As it is where the newest checkpoint is damaged, or was set aside by who was killed then."""
    (own.path.parent / TRACKER_FILE).write_text(tracked)
    assert of(own.path.parent, own.path.parent, own) is None
    with pytest.raises(CheckpointError):
        of(own.path.parent, own.path.parent)


@pytest.mark.parametrize("damaged", ["tracker", ".metadata", "all of the newest"])
def test_what_is_looked_at_before_a_start_is_what_it_goes_on_from(
    own: Checkpoint, damaged: str
) -> None:
    """Of a job whose --load is its --save: the tracker file may name what is no checkpoint."""
    directory = own.path.parent
    config = tiny_run(checkpoint={"load": directory, "directory": directory})
    newest = iteration_path(directory, 9)
    Disk(TIED, directory.parent).save(Layout(1, 1, 2), 9)
    (directory / TRACKER_FILE).write_text("" if damaged == "tracker" else "9")
    if damaged == ".metadata":
        (newest / METADATA_FILE).unlink()
    elif damaged != "tracker":
        shutil.rmtree(newest)
    assert goes_on_from(config) == (newest if damaged == "tracker" else own.path)
    before = checkpoint(directory, 50, *FILES)
    assert goes_on_from(config) == before, "another job has gone on"


def test_in_one_directory_its_own_is_none_of_another_job(own: Checkpoint) -> None:
    assert tracked_step(own.path.parent) == 8
    assert of(own.path.parent, own.path.parent, own) is None


def save_over(path: Path) -> None:
    """As a job of Megatron's does, which leaves the index where it is."""
    for file in path.iterdir():
        if file.name not in (INDEX_FILE, FORMAT_FILE):
            file.write_bytes(file.read_bytes() + b"x")
    later_ns = (path / INDEX_FILE).stat().st_mtime_ns + 10**9
    os.utime(path / METADATA_FILE, ns=(later_ns, later_ns))


@pytest.mark.parametrize("same", [False, True])
def test_one_that_another_job_has_saved_over_is_that_jobs(
    tmp_path: Path, same: bool, caplog: pytest.LogCaptureFixture
) -> None:
    disk = Disk(TIED, tmp_path / "run")
    for step in (4, 8):
        disk.save(Layout(1, 1, 2), step)
    path = disk.directory / "iter_0000008"
    save_over(path)
    load = disk.directory if same else None
    later = opened(tiny_run(checkpoint={"load": load}), TIED, tmp_path / "run")
    resumed = later.open()
    assert resumed is not None
    assert (resumed.step, resumed.layout) == (
        (8, "the layout of another job") if same else (4, "tp1 pp1 dp2")
    )
    assert disk.steps() == ["iter_0000004", "iter_0000008"], "it is not damaged"
    assert f"another job has saved over {path}" in caplog.text
    assert of(tmp_path / "new", disk.directory) == Loaded(path, 8), "another run's is that, too"


def test_a_run_whose_only_one_was_saved_over_does_not_begin_anew(
    tmp_path: Path, own: Checkpoint
) -> None:
    save_over(own.path)
    with pytest.raises(CheckpointError, match=r"has saved over .*iter_0000008; there is no other"):
        Disk(TIED, tmp_path / "run").checkpoints.open()


def test_one_that_was_copied_is_still_the_runs(own: Checkpoint) -> None:
    """Its table of contents may be newer, then."""
    later_ns = (own.path / INDEX_FILE).stat().st_mtime_ns + 10**9
    os.utime(own.path / METADATA_FILE, ns=(later_ns, later_ns))
    assert newest_checkpoint(own.path.parent) == own


def test_the_same_directory_may_be_empty_at_first_and_no_other(tmp_path: Path) -> None:
    assert of(tmp_path, tmp_path) is None
    with pytest.raises(CheckpointError, match="has no latest_checkpointed_iteration"):
        of(tmp_path / "run", tmp_path)


def begun(
    directory: Path, own: Checkpoint | None = None, load: Path | None = None, **section: Any
) -> Loaded | None:
    return to_load(tiny_run(checkpoint={"load": load, **section}), directory, own)


def test_weights_are_taken_where_there_is_nothing_to_go_on_from(
    tmp_path: Path, own: Checkpoint
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    path = checkpoint(others, 50, *FILES)
    new = tmp_path / "new"
    new.mkdir()
    assert begun(new, weights=others) == Loaded(path, 0, weights=True)
    assert begun(own.path.parent, own, weights=others) is None
    assert begun(new, load=new, weights=others) == Loaded(path, 0, weights=True)
    saved = checkpoint(new, 60, *FILES)
    assert begun(new, load=new, weights=others) == Loaded(saved, 60)
    (others / TRACKER_FILE).unlink()
    with pytest.raises(CheckpointError, match="others has no checkpoint"):
        begun(tmp_path / "another", weights=others)


@pytest.mark.parametrize("damaged", [False, True])
def test_weights_of_another_run_are_compared_with_what_it_says_of_them(
    own: Checkpoint, tmp_path: Path, damaged: bool
) -> None:
    later = opened(tiny_run(checkpoint={"weights": own.path.parent}), TIED, tmp_path / "new")
    resumed = later.open()
    assert resumed is not None
    assert (resumed.path, resumed.step, resumed.weights) == (str(own.path), 0, True)
    one = Layout(1, 1, 1)
    state = (empty if damaged else filled)(TIED, one, next(one.coordinates()))
    state.begin_optimizer()  # the rest of the state is another one
    digests = digests_of(state)
    came = restore_part(
        later,
        Restored(worker=0, generation=0, scalars=scalar_state(0), digests=digests),
        restored_rank_map(one),
    )
    if damaged:
        assert isinstance(came, ShellFailed)
        assert "what was read is not what was saved: parameter" in came.reason
    else:
        assert came == StateRestored(0)


def problems(**section: Any) -> list[str]:
    return list(_check_checkpoints(CheckpointSection(**section), 100))


def test_submit_refuses_what_cannot_be_loaded_or_is_anothers(tmp_path: Path) -> None:
    (missing,) = problems(load=tmp_path)
    assert "has no checkpoint" in missing
    assert problems(load=tmp_path, directory=tmp_path) == []
    checkpoint(tmp_path, 50, *FILES)
    assert problems(load=tmp_path) == []
    (other,) = problems(directory=tmp_path)
    assert "holds checkpoints of another run, the newest of step 50" in other
    checkpoint(tmp_path, 60, "mp_rank_00")
    (legacy,) = problems(load=tmp_path)
    assert "legacy format (torch)" in legacy


@pytest.mark.parametrize("step", [100, 420])
def test_submit_refuses_what_has_all_steps_already(tmp_path: Path, step: int) -> None:
    checkpoint(tmp_path, step, *FILES)
    (over,) = problems(load=tmp_path)
    assert over.endswith(
        f"is of step {step}, and train.steps, which counts from step 0 on, is 100: "
        "nothing would be trained"
    )
    assert problems(load=tmp_path, directory=tmp_path) == [], "of a job that is queued once more"


def test_submit_refuses_weights_that_are_not_there_or_beside_a_checkpoint_to_go_on_from(
    tmp_path: Path,
) -> None:
    (missing,) = problems(weights=tmp_path)
    assert missing == f"checkpoint: {tmp_path} has no checkpoint: it lacks {TRACKER_FILE}"
    checkpoint(tmp_path, 50, *FILES)
    assert problems(weights=tmp_path) == []
    saves = tmp_path / "saves"
    assert problems(weights=tmp_path, load=saves, directory=saves) == []
    (both,) = problems(weights=tmp_path, load=tmp_path)
    assert "a run begins with one of them" in both
