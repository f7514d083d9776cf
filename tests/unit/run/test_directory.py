"""Run directories: whose they are, what `latest` names, and where checkpoints lie."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import FakeClock, started_ticks
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.errors import ConfigError
from liver_hpc.run import directory as module
from liver_hpc.run.directory import (
    RunDirectory,
    check_free,
    claim_checkpoints,
    create_run_directory,
    find_run,
    point_latest,
)
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.outcome import Outcome
from tests.fakes import tiny_recipe, tiny_run

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")


def none_is_over(run: RunDirectory) -> None:
    raise ConfigError(f"run {run} is not over")


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A scratch directory in which everybody may write."""
    path = tmp_path / "scratch"
    path.mkdir()
    path.chmod(0o1777)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path, shared: Path) -> RunConfig:
    return tiny_run(runs_directory=tmp_path / "runs", checkpoint={"directory": shared})


# ---- checkpoints


def test_checkpoints_lie_in_the_run_directory(tmp_path: Path) -> None:
    config = tiny_run(runs_directory=tmp_path)
    run = create_run_directory(config)
    assert claim_checkpoints(run, config, none_is_over) == run.path / "checkpoints"
    assert not os.path.lexists(run.path / "checkpoints")


def test_elsewhere_they_lie_in_the_directory_itself(tmp_path: Path, shared: Path) -> None:
    """As Megatron's --save means it; one that is not there is made for this user alone."""
    for place in (shared, shared / "new" / "one"):
        config = tiny_run(runs_directory=tmp_path / "runs", checkpoint={"directory": place})
        run = create_run_directory(config)
        assert claim_checkpoints(run, config, none_is_over).resolve() == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_no_umask_lets_others_take_a_run_away(tmp_path: Path) -> None:
    runs, checkpoints = tmp_path / "a" / "runs", tmp_path / "b" / "checkpoints"
    config = tiny_run(runs_directory=runs, checkpoint={"directory": checkpoints})
    before = os.umask(0)
    try:
        run = create_run_directory(config)
    finally:
        os.umask(before)
    made = (runs.parent, runs, run.path, checkpoints.parent, checkpoints)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in made]
    assert modes == [0o755, 0o755, 0o700, 0o755, 0o700]


def test_a_run_finds_its_directory_again(
    elsewhere: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a disk that is full by now, too."""
    run = create_run_directory(elsewhere)
    place = claim_checkpoints(run, elsewhere, none_is_over).resolve()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "write_whole", full)
    assert claim_checkpoints(RunDirectory(run.path), elsewhere, none_is_over).resolve() == place


def test_a_run_whose_directory_another_one_has_taken_leaves_it_alone(elsewhere: RunConfig) -> None:
    """Until that one is over, or gone."""
    one, other = create_run_directory(elsewhere), create_run_directory(elsewhere)
    for _ in range(2):
        assert claim_checkpoints(other, elsewhere, none_is_over) == other.path / "checkpoints"
        with pytest.raises(ConfigError, match=rf"as .*liver-run says: run {other} is not over"):
            claim_checkpoints(one, elsewhere, none_is_over)
    claim_checkpoints(one, elsewhere, lambda run: None)
    with pytest.raises(ConfigError, match=rf"says: run {one} is not over"):
        claim_checkpoints(other, elsewhere, none_is_over)
    shutil.rmtree(one.path)
    claim_checkpoints(other, elsewhere, none_is_over)


def test_who_goes_on_from_what_lies_there_may_wait_behind_another_run(
    elsewhere: RunConfig, shared: Path
) -> None:
    """As a job whose --load is its --save, which may be queued behind another one."""
    follows = tiny_run(
        runs_directory=elsewhere.runs_directory, checkpoint={"directory": shared, "load": shared}
    )
    first = create_run_directory(follows)
    check_free(follows, none_is_over)
    second = create_run_directory(follows)
    claim_checkpoints(first, follows, none_is_over)
    with pytest.raises(ConfigError, match=rf"says: run {first} is not over"):
        claim_checkpoints(second, follows, none_is_over)
    with pytest.raises(ConfigError, match=rf"says: run {first} is not over"):
        check_free(elsewhere, none_is_over)
    claim_checkpoints(second, follows, lambda run: None)


def test_the_directory_of_another_run_is_taken_once_that_one_is_over(tmp_path: Path) -> None:
    """Where a run saves by itself, nobody else does: no `.liver-run` says whose that is."""
    config = tiny_run(runs_directory=tmp_path / "runs")
    one = create_run_directory(config)
    place = claim_checkpoints(one, config, none_is_over)
    place.mkdir()
    follows = tiny_run(
        runs_directory=config.runs_directory, checkpoint={"directory": place, "load": place}
    )
    other = create_run_directory(follows)
    for way in (follows, tiny_run(checkpoint={"directory": place})):
        with pytest.raises(ConfigError, match=rf"is another run's: run {one} is not over"):
            claim_checkpoints(other, way, none_is_over)
    claim_checkpoints(other, follows, lambda run: None)
    with pytest.raises(ConfigError, match=rf"liver-run says: run {other} is not over"):
        claim_checkpoints(one, config, none_is_over)
    claim_checkpoints(one, config, lambda run: None)
    with pytest.raises(ConfigError, match=rf"liver-run says: run {one} is not over"):
        claim_checkpoints(other, follows, none_is_over)


def test_a_scratch_that_was_cleaned_is_no_obstacle(elsewhere: RunConfig) -> None:
    run = create_run_directory(elsewhere)
    place = claim_checkpoints(run, elsewhere, none_is_over).resolve()
    shutil.rmtree(place)
    assert claim_checkpoints(run, elsewhere, none_is_over).resolve() == place
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_the_directory_may_be_a_link_of_ones_own(tmp_path: Path, shared: Path) -> None:
    (tmp_path / "link").symlink_to(shared)
    config = tiny_run(runs_directory=tmp_path / "runs", checkpoint={"directory": tmp_path / "link"})
    run = create_run_directory(config)
    assert claim_checkpoints(run, config, none_is_over).resolve() == shared


@as_root
@pytest.mark.parametrize("planted", ["directory", "link", "what a link leads to"])
def test_a_directory_of_another_user_is_refused(shared: Path, tmp_path: Path, planted: str) -> None:
    place, trap = shared / "tiny-1", tmp_path / "trap"
    config = tiny_run(runs_directory=tmp_path / "runs", checkpoint={"directory": place})
    run = create_run_directory(config, "tiny-1")
    shutil.rmtree(place)
    trap.mkdir()
    if planted == "directory":
        place.mkdir()
    else:
        place.symlink_to(trap)
    os.chown(trap if planted.startswith("what") else place, NOBODY, -1, follow_symlinks=False)
    checkpoints = Checkpoints(config, tiny_recipe(config), Epoch(run.path, 1), FakeClock())
    with pytest.raises(ConfigError, match=r"checkpoint.directory: .*tiny-1 belongs to user nobody"):
        checkpoints.open()


def test_a_place_that_cannot_be_written_is_the_run_files_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = tiny_run(runs_directory=tmp_path, checkpoint={"directory": tmp_path / "file"})
    with pytest.raises(ConfigError, match=r"^checkpoint.directory: .*file: "):
        create_run_directory(config)


# ---- found


@as_root
def test_a_run_of_another_user_is_refused(tmp_path: Path) -> None:
    run = create_run_directory(tiny_run(runs_directory=tmp_path), "tiny-1")
    point_latest(run)
    assert find_run("latest", tmp_path).path == run.path
    os.chown(run.path, NOBODY, -1)
    for name in ("latest", "tiny-1", str(run.path)):
        with pytest.raises(ConfigError, match=r"tiny-1 belongs to user nobody, this is user root"):
            find_run(name, tmp_path)


@as_root
def test_a_link_of_another_user_to_ones_own_run_is_refused(tmp_path: Path) -> None:
    run = create_run_directory(tiny_run(runs_directory=tmp_path), "tiny-1")
    point_latest(run)
    os.lchown(tmp_path / "latest", NOBODY, -1)
    with pytest.raises(ConfigError, match=r"latest belongs to user nobody, this is user root"):
        find_run("latest", tmp_path)
    assert find_run("tiny-1", tmp_path).path == run.path


@pytest.fixture
def as_nobody() -> Iterator[None]:
    yield
    os.seteuid(0)


@as_root
def test_latest_of_another_user_in_a_shared_directory_stays_and_is_told(
    shared: Path, as_nobody: None, tmp_path: Path
) -> None:
    for directory in (tmp_path, *tmp_path.parents):  # pytest's own are for their user alone
        if directory.name.startswith(("pytest-", "popen-", "test_")):
            directory.chmod(directory.stat().st_mode | 0o011)
    first = create_run_directory(tiny_run(runs_directory=shared), "tiny-1")
    assert point_latest(first) == ""
    os.seteuid(NOBODY)
    second = create_run_directory(tiny_run(runs_directory=shared), "tiny-2")
    problem = point_latest(second)
    assert problem == f"{shared}/latest does not name this run: Operation not permitted"
    assert (shared / "latest").readlink() == Path("tiny-1")
    assert [path.name for path in shared.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("noted", "known"), [("", ""), ("a|b c ", "a|b c"), ("a\nb", ""), ("a\udcff", "")]
)
def test_a_job_is_noted_with_its_name(tmp_path: Path, noted: str, known: str) -> None:
    run = create_run_directory(tiny_run(runs_directory=tmp_path))
    run.note_job_id("7", noted)
    assert (run.job_id(), run.job_name()) == ("7", known)
    run.job_id_path.write_text("7")  # as it was noted before names were
    assert (run.job_id(), run.job_name()) == ("7", "")


@pytest.mark.parametrize("fault", [errno.ENOENT, errno.ESTALE])
def test_what_another_host_has_written_is_seen_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: int
) -> None:
    """NFS believes for a while that a name is not there, until the directory is opened."""
    ended, opened, read = Outcome("finished", "all steps are done", 7), [], Path.read_bytes
    ended.write(tmp_path)
    open_before = os.open

    def open_(path: Path, *how: Any, **more: Any) -> int:
        opened.append(path)
        return open_before(path, *how, **more)

    def read_bytes(path: Path) -> bytes:
        if path.parent not in opened:
            raise OSError(fault, os.strerror(fault))
        return read(path)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    assert RunDirectory(tmp_path).outcome() == ended
    assert RunDirectory(tmp_path).coordinator() is None
    assert RunDirectory(tmp_path / "gone").outcome() is None


def test_a_process_is_known_by_when_it_was_started(tmp_path: Path) -> None:
    """Whatever the time of the file that names it: a file server may be behind."""
    path, run = tmp_path / "coordinator.json", RunDirectory(tmp_path)
    address = {"host": "127.0.0.1", "port": 1, "pid": os.getpid()}
    ours = started_ticks(os.getpid())
    for ticks, living in ((ours, os.getpid()), (ours - 1, None), (0, None)):
        path.write_text(json.dumps({**address, "started_ticks": ticks}))
        os.utime(path, (1000.0, 1000.0))
        assert run.coordinators_process() == living
