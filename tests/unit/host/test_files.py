"""Files that are there as a whole or not at all, and locks."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import ConfigError, DeadlineError
from liver_hpc.host.files import (
    file_lock,
    first_alone,
    locked_alone,
    make_directory,
    shared_with,
    write_whole,
)


@pytest.mark.parametrize("data", ["text \N{SNOWMAN}\n", b"\x00bytes"])
@pytest.mark.parametrize("sync", [True, False])
def test_a_file_takes_the_place_of_another(tmp_path: Path, data: str | bytes, sync: bool) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    reader = path.open("rb")
    write_whole(path, data, mode=0o600, sync=sync)
    assert reader.read() == b"before", "whoever reads goes on reading what was there"
    assert path.read_bytes() == (data if isinstance(data, bytes) else data.encode())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["file"]


def test_what_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("before")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "after", sync=True)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["file"]


def test_nobody_else_writes_into_a_directory_that_is_made(tmp_path: Path) -> None:
    there, before = tmp_path / "a", os.umask(0)
    try:
        make_directory(there / "b" / "c")
        make_directory(there / "d", mode=0o700)
        make_directory(there, mode=0o700)  # as it is
        with locked_alone(there / "e" / "f" / "lock"):
            pass
    finally:
        os.umask(before)
    made = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (there, *there.rglob("*"))}
    assert made == {"a": 0o755, "b": 0o755, "c": 0o755, "d": 0o700, "e": 0o755}


def test_a_directory_of_ones_own_is_one_that_nobody_else_may_write_to(tmp_path: Path) -> None:
    for mode, why in ((0o755, ""), (0o700, ""), (0o775, "(mode 775)"), (0o1777, "(mode 1777)")):
        tmp_path.chmod(mode)
        assert shared_with(tmp_path.lstat()).endswith(why)
        assert bool(shared_with(tmp_path.lstat())) is bool(why)
    tmp_path.chmod(0o700)
    (tmp_path / "link").symlink_to(tmp_path)
    assert shared_with((tmp_path / "link").lstat()) == "is no directory"
    another = os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, os.geteuid() + 1, 0, 0, 0, 0, 0))
    assert shared_with(another).startswith("belongs to user ")


# ---- locks


def test_what_was_done_under_a_lock_on_another_host_is_seen_by_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS believes for a while that a name is not there, until the directory is opened."""
    mark, opened = tmp_path / "mark", []
    mark.touch()
    open_before, exists_before = os.open, Path.exists

    def open_(path: Path, *how: Any, **more: Any) -> int:
        opened.append(path)
        return open_before(path, *how, **more)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(
        Path, "exists", lambda path: (path != mark or tmp_path in opened) and exists_before(path)
    )
    assert not mark.exists()
    with first_alone(mark):
        assert mark.exists()


def test_a_lock_is_asked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a shared file system, maybe by hundreds of workers."""
    asked, flock = [], fcntl.flock
    with file_lock(tmp_path / "lock"):
        monkeypatch.setattr(fcntl, "flock", lambda *how: (asked.append(how), flock(*how)))
        with pytest.raises(DeadlineError), file_lock(tmp_path / "lock", limit_s=0.6):
            pass
    assert len(asked) <= 4


@pytest.mark.parametrize("there", ["link", "pipe"])
def test_what_others_have_put_in_a_locks_place_is_refused(there: str, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    if there == "link":
        lock.symlink_to(tmp_path / "mine")
    else:
        os.mkfifo(lock)
    with pytest.raises(ConfigError, match="lock: cannot be written: "), file_lock(lock):
        pass
    assert not (tmp_path / "mine").exists()


def test_what_one_has_done_others_do_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that have waited for it: hundreds of workers are not to read data by turns."""
    mark, flock = tmp_path / "mark", fcntl.flock
    waits, together = threading.Semaphore(0), threading.Barrier(2)

    def flock_told(*how: Any) -> None:
        try:
            flock(*how)
        except BlockingIOError:
            waits.release()
            raise

    def follow() -> None:
        with first_alone(mark):
            together.wait(10.0)

    monkeypatch.setattr(fcntl, "flock", flock_told)
    followers = [threading.Thread(target=follow) for _ in range(2)]
    with first_alone(mark):
        for each in followers:
            each.start()
            assert waits.acquire(timeout=10.0)
    for each in followers:
        each.join()
    assert not together.broken


HOLD = """
import pathlib, time
from liver_hpc.host.files import locked_alone
with locked_alone(pathlib.Path("made/lock")):
    print("has it", flush=True)
    time.sleep(60.0)
"""


def test_one_at_a_time_has_a_lock_and_a_killed_one_has_it_no_more(
    tmp_path: Path, repository: Path
) -> None:
    path = tmp_path / "made/lock"
    words, environment = [sys.executable, "-c", HOLD], {**os.environ, "PYTHONPATH": str(repository)}
    holder = subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == b"has it\n"
        with pytest.raises(BlockingIOError), locked_alone(path):
            pass
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with locked_alone(path):
        pass
    assert not path.exists()


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whoever had it before: the next one would make another file, and lock that."""
    path, flock = tmp_path / "lock", fcntl.flock

    def too_late(*how: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        path.unlink()
        flock(*how)

    monkeypatch.setattr(fcntl, "flock", too_late)
    with locked_alone(path), pytest.raises(BlockingIOError), locked_alone(path):
        pass


def test_what_was_made_for_a_lock_is_gone_with_it(tmp_path: Path) -> None:
    with locked_alone(tmp_path / "made/lock"):
        pass
    assert os.listdir(tmp_path) == []


def test_a_lock_is_no_link_of_somebody(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), locked_alone(tmp_path / "lock"):
        pass
    assert os.listdir(tmp_path) == ["lock"]
