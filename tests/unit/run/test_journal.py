"""The journal: what is told as written is on the disk, and no disk stops who appends."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.run import journal as module
from liver_hpc.run.entries import Entry, encode, read_entries
from liver_hpc.run.epoch import Epoch, Superseded, claim_epoch, newest_epoch
from liver_hpc.run.events import JournalFailed
from liver_hpc.run.journal import Journal, JournalNews, Written, continue_in_copy
from tests.fakes import MemoryJournal

LIMIT_S = 30.0
RESERVE_BYTES = 1000
BEGUN = {"type": "begun"}


def step_done(number: int) -> dict[str, Any]:
    return {"type": "step_done", "step": number, "loss": 4.0}


def until(condition: Any, what: str) -> None:
    poll_until(condition, Deadline.after(SystemClock(), LIMIT_S, what))


class Disk:
    """Says how much is free."""

    def __init__(self, free_bytes: int = RESERVE_BYTES) -> None:
        self.free_bytes = free_bytes

    def __call__(self, directory: Path) -> int:
        return self.free_bytes


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def current(path: Path) -> Epoch:
    """That of the newest coordinator of the journal's run."""
    return Epoch(path.parent, newest_epoch(path.parent))


@contextmanager
def opened(path: Path, disk: Disk | None = None) -> Iterator[Journal]:
    """A journal that is closed afterwards; what it tells is forgotten."""
    journal = Journal(path, lambda told: None, current(path), RESERVE_BYTES, disk or Disk())
    try:
        yield journal
    finally:
        journal.close(LIMIT_S)


def numbers(path: Path) -> list[int]:
    return [entry.number for entry in read_entries(path)]


# ---- what both journals do


class Rig(ABC):
    """A journal, what it has told, and how its disk fails."""

    journal: Journal

    def __init__(self) -> None:
        self.told: list[Written | JournalFailed] = []

    @abstractmethod
    def fail(self) -> None: ...
    @abstractmethod
    def recover(self) -> None: ...
    @abstractmethod
    def entries(self) -> list[Entry]: ...

    def written(self) -> int:
        """The newest number that was told as written; -1 for none."""
        return max([-1, *(each.number for each in self.told if isinstance(each, Written))])

    def failures(self) -> int:
        return sum(isinstance(each, JournalFailed) for each in self.told)


class OnDisk(Rig):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._disk = path, Disk()
        self.journal = Journal(path, self.told.append, current(path), RESERVE_BYTES, self._disk)

    def fail(self) -> None:
        self._disk.free_bytes = RESERVE_BYTES - 1

    def recover(self) -> None:
        self._disk.free_bytes = RESERVE_BYTES

    def entries(self) -> list[Entry]:
        return list(read_entries(self._path))


class InMemory(Rig):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._memory = MemoryJournal(self.told.append)
        self.journal = self._memory

    def fail(self) -> None:
        self._memory.fail("the disk is full")

    def recover(self) -> None:
        self._memory.recover()

    def entries(self) -> list[Entry]:
        return self._memory.entries


@pytest.fixture(params=[OnDisk, InMemory])
def rig(request: pytest.FixtureRequest, path: Path) -> Iterator[Rig]:
    rig: Rig = request.param(path)
    yield rig
    rig.journal.close(LIMIT_S)


def test_entries_are_numbered_told_as_written_and_come_back(rig: Rig) -> None:
    recorded = {"type": "record", "table": "traffic", "row": {"bytes": 3}}
    assert rig.journal.append(5.0, BEGUN) == 0
    assert rig.journal.append(6.5, step_done(0), [recorded]) == 1
    until(lambda: rig.written() == 1, "both entries")
    assert rig.entries() == [Entry(0, 5.0, BEGUN, []), Entry(1, 6.5, step_done(0), [recorded])]
    assert rig.failures() == 0


def test_what_is_told_as_written_only_grows(rig: Rig) -> None:
    for number in range(50):
        rig.journal.append(1.0, step_done(number))
    until(lambda: rig.written() == 49, "all entries")
    told = [each.number for each in rig.told if isinstance(each, Written)]
    assert told == sorted(set(told))


def test_a_failing_disk_is_told_once_and_its_recovery_too(rig: Rig) -> None:
    rig.journal.append(1.0, BEGUN)
    until(lambda: rig.written() == 0, "the first entry")
    rig.fail()
    assert [rig.journal.append(2.0, step_done(number)) for number in range(3)] == [1, 2, 3]
    until(lambda: rig.failures() == 1, "the failure")
    assert "the disk is full" in rig.journal.error
    assert rig.written() == 0
    rig.recover()
    until(lambda: rig.written() == 3, "what waited")
    assert rig.journal.error == ""
    assert rig.failures() == 1
    assert [entry.number for entry in rig.entries()] == [0, 1, 2, 3]


def test_what_json_does_not_know_is_refused_and_takes_no_number(rig: Rig) -> None:
    with pytest.raises(ValueError, match="Unable to serialize"):
        rig.journal.append(1.0, {"type": "begun", "what": object()})
    assert rig.journal.append(1.0, BEGUN) == 0


def test_after_the_end_an_entry_comes_too_late(rig: Rig) -> None:
    rig.journal.append(1.0, BEGUN)
    rig.journal.close(LIMIT_S)
    rig.journal.close(LIMIT_S)
    with pytest.raises(LiverError, match="begun came too late"):
        rig.journal.append(2.0, BEGUN)
    assert len(rig.entries()) == 1


# ---- the file


def test_the_file_is_its_owners_alone(path: Path) -> None:
    with opened(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_later_coordinator_goes_on_with_the_numbers(path: Path) -> None:
    for first in (0, 2, 4):
        with opened(path) as journal:
            assert [journal.append(1.0, BEGUN), journal.append(1.0, BEGUN)] == [first, first + 1]
    assert numbers(path) == [*range(6)]


def test_a_journal_cut_anywhere_is_gone_on_with(path: Path) -> None:
    with opened(path) as journal:
        for number in range(3):
            journal.append(1000.0, step_done(number), [{"type": "record", "text": "\u00fc"}])
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = whole[:size].count(b"\n")
        with opened(path) as journal:
            assert journal.append(1.0, BEGUN) == kept
        assert numbers(path) == [*range(kept + 1)]


def test_a_torn_line_that_is_cut_off_is_told(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(path) as journal:
        journal.append(1.0, BEGUN)
    with path.open("ab") as file:
        file.write(b'{"n":1,"t":')
    with opened(path):
        assert "its 11 bytes are left out" in caplog.text
    assert path.read_bytes().endswith(b"}\n")


def test_a_damaged_last_line_is_not_gone_on_with(path: Path) -> None:
    with opened(path) as journal:
        journal.append(1.0, BEGUN)
    path.write_bytes(path.read_bytes().replace(b"begun", b"began"))
    with pytest.raises(ConfigError, match=r"journal\.jsonl, last line: 1 is damaged"):
        Journal(path, print, current(path), 0)


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(LiverError, match=r"gone/journal\.jsonl cannot be written: No such file"):
        Journal(tmp_path / "gone" / "journal.jsonl", print, Epoch(tmp_path, 1), 0)


def test_what_waits_together_goes_with_one_sync(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whoever appends does not wait for it."""
    with opened(path) as journal:
        syncs, may_sync = [], threading.Event()

        def slow_sync(descriptor: int) -> None:
            syncs.append(os.fstat(descriptor).st_size)
            assert may_sync.wait(LIMIT_S)

        monkeypatch.setattr(os, "fsync", slow_sync)
        journal.append(1.0, BEGUN)
        until(lambda: syncs, "the first sync")
        for number in range(200):
            journal.append(1.0, step_done(number))
        may_sync.set()
        until(lambda: len(syncs) == 2, "the second sync")
    assert syncs[1] == path.stat().st_size
    assert numbers(path) == [*range(201)]
    assert len(syncs) == 2


def test_many_threads_may_append(path: Path) -> None:
    found: list[int] = []

    def append() -> None:
        found.extend(journal.append(1.0, BEGUN) for _ in range(200))

    with opened(path) as journal:
        threads = [threading.Thread(target=append) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
    assert sorted(found) == numbers(path) == [*range(1600)]


# ---- a disk that takes no more


def test_what_cannot_be_written_at_the_end_is_told_and_raises_nothing(path: Path) -> None:
    disk = Disk()
    with opened(path, disk) as journal:
        disk.free_bytes = 0
        journal.append(1.0, BEGUN)
    assert "wanted 1000 bytes free, got 0; 1 entries wait in memory" in journal.error
    assert numbers(path) == []


def test_a_disk_that_never_answers_does_not_hold_up_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()
    with opened(path) as journal:
        monkeypatch.setattr(os, "fsync", lambda descriptor: answers.wait(LIMIT_S))
        journal.append(1.0, BEGUN)
        journal.close(0.05)
        assert "waited 0.05 s for the disk" in journal.error
        answers.set()


def test_a_part_of_a_line_that_a_failed_write_leaves_is_cut_off(path: Path) -> None:
    """A limit on the file's size lets the first bytes of a write through, then fails."""
    program = """
import resource, sys, threading
from pathlib import Path
from liver_hpc.run import journal
journal.RETRY_S = 0.01
told, path = [], Path(sys.argv[1])
failed, written = threading.Event(), threading.Event()
tell = lambda each: (failed if isinstance(each, journal.JournalFailed) else written).set()
ours = journal.Journal(path, tell, journal.Epoch(path.parent, 1), 0)
ours.append(1.0, {"type": "begun"})
assert written.wait(30)
written.clear()
most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 150, most))
for number in range(5):
    ours.append(2.0, {"type": "step_done", "step": number})
assert failed.wait(30)
print(ours.error)
resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
assert written.wait(30)
ours.close(30)
print(repr(ours.error))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)],
        capture_output=True, text=True, timeout=LIMIT_S, check=True,
    )  # fmt: skip
    first, last = done.stdout.splitlines()
    assert "File too large" in first
    assert last == "''"
    assert numbers(path) == [*range(6)]


def test_a_sync_that_fails_writes_all_of_it_again_in_order(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, disk = os.fsync, Disk(0)
    with opened(path, disk) as journal:

        def failing_sync(descriptor: int) -> None:
            monkeypatch.setattr(os, "fsync", sync)
            journal.append(2.0, BEGUN)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        for number in range(100):
            journal.append(1.0, step_done(number))
        monkeypatch.setattr(os, "fsync", failing_sync)
        disk.free_bytes = RESERVE_BYTES
        until(lambda: path.read_bytes().count(b"begun"), "the entry that came meanwhile")
    entries = list(read_entries(path))
    assert entries[-1] == Entry(100, 2.0, BEGUN, [])
    assert len(entries) == 101


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {done.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_full_file_system_loses_nothing_once_it_has_room(small_disk: Path) -> None:
    path, ballast = small_disk / "journal.jsonl", small_disk / "ballast"
    told: list[Written | JournalFailed] = []
    journal = Journal(path, told.append, current(path), 0)
    ballast.write_bytes(bytes(48 * 1024))
    for number in range(500):
        journal.append(1.0, step_done(number))
    until(lambda: JournalFailed("No space left on device") in told, "the full disk")
    assert numbers(path)[-1:] != [499]
    ballast.unlink()
    until(lambda: Written(499) in told, "all entries")
    journal.close(LIMIT_S)
    assert journal.error == ""
    assert numbers(path) == [*range(500)]


def test_what_another_process_has_written_is_not_written_over(path: Path) -> None:
    with opened(path) as ours:
        ours.append(1.0, BEGUN)
        until(lambda: numbers(path) == [0], "the first entry")
        with opened(path) as other:
            other.append(1.0, BEGUN)
        ours.append(2.0, {"type": "late"})
        until(lambda: "another process has written to it" in ours.error, "the failure")
    assert [entry.event for entry in read_entries(path)] == [BEGUN, BEGUN]


@contextmanager
def writes(
    monkeypatch: pytest.MonkeyPatch, write: Callable[[FileIO, memoryview], int]
) -> Iterator[None]:
    class File(FileIO):
        def write(self, data: Any) -> int:
            return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(module, "FileIO", File)
        yield


def test_nothing_comes_of_what_is_written_once_another_coordinator_has_taken_over(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not have read that; so it is never told as written. And no more is tried."""
    epoch, told = claim_epoch(path.parent), list[JournalNews]()

    def takes_over(file: FileIO, data: memoryview) -> int:
        claim_epoch(path.parent)
        return FileIO.write(file, data)

    ours = Journal(path, told.append, epoch, 0)
    ours.append(1.0, BEGUN)
    until(lambda: told == [Written(0)], "the first entry")
    with writes(monkeypatch, takes_over):
        ours.append(2.0, {"type": "late"})
        until(lambda: len(told) == 2, "the news")
    with opened(path) as theirs:
        theirs.append(3.0, {"type": "taken over"})
    ours.append(4.0, {"type": "later"})
    ours.close(LIMIT_S)
    assert isinstance(told[1], Superseded)
    assert len(told) == 2
    assert [entry.event["type"] for entry in read_entries(path)][1:] == ["late", "taken over"]


def test_one_that_wakes_finds_what_the_next_coordinator_has_written(path: Path) -> None:
    epoch, told = claim_epoch(path.parent), list[JournalNews]()
    ours = Journal(path, told.append, epoch, 0)
    claim_epoch(path.parent)
    with opened(path) as theirs:
        theirs.append(1.0, BEGUN)
    ours.append(2.0, {"type": "late"})
    until(lambda: len(told) == 1, "the news")
    ours.close(LIMIT_S)
    assert isinstance(told[0], Superseded)
    assert [entry.event for entry in read_entries(path)] == [BEGUN]


def test_what_is_written_is_not_written_again_while_it_is_not_known_whose_the_run_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, looks = list[JournalNews](), iter([0, OSError(errno.ESTALE, "Stale file handle")])

    def newest(directory: Path) -> int:
        found = next(looks, 0)
        if isinstance(found, OSError):
            raise found
        return found

    monkeypatch.setattr("liver_hpc.run.epoch.newest_epoch", newest)
    ours = Journal(path, told.append, Epoch(path.parent, 1), 0)
    ours.append(1.0, BEGUN)
    until(lambda: len(told) == 2, "the news")
    assert told == [JournalFailed("Stale file handle"), Written(0)]
    ours.close(LIMIT_S)
    assert numbers(path) == [0]


def test_a_write_that_is_tried_again_cuts_nothing_off_that_the_next_coordinator_has_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETRY_S", LIMIT_S)
    told = list[JournalNews]()

    def fails(file: FileIO, data: memoryview) -> int:
        FileIO.write(file, data[:5])
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    ours = Journal(path, told.append, claim_epoch(path.parent), 0)
    with writes(monkeypatch, fails):
        ours.append(1.0, {"type": "late"})
        until(lambda: told, "the failure")
    claim_epoch(path.parent)
    with opened(path) as theirs:
        theirs.append(2.0, BEGUN)
    ours.close(LIMIT_S)  # with a last attempt
    assert [type(each) for each in told] == [JournalFailed, Superseded]
    assert [entry.event for entry in read_entries(path)] == [BEGUN]


def test_one_that_stood_still_as_it_wrote_writes_over_nothing_of_the_next_coordinators(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, stands, wakes = list[JournalNews](), threading.Event(), threading.Event()

    def stands_still(file: FileIO, data: memoryview) -> int:
        stands.set()
        assert wakes.wait(LIMIT_S)
        return FileIO.write(file, data)

    with opened(path) as before:
        before.append(1.0, BEGUN)
    mode = path.stat().st_mode
    ours = Journal(path, told.append, claim_epoch(path.parent), 0)
    with writes(monkeypatch, stands_still):
        ours.append(2.0, {"type": "late"})
        assert stands.wait(LIMIT_S)
    continue_in_copy(path, claim_epoch(path.parent))
    with opened(path) as theirs:
        theirs.append(3.0, {"type": "taken over"})
    wakes.set()
    ours.close(LIMIT_S)
    assert [type(each) for each in told] == [Superseded]
    assert [entry.event["type"] for entry in read_entries(path)] == ["begun", "taken over"]
    assert path.stat().st_mode == mode
    assert {each.name for each in path.parent.iterdir()} == {path.name, "coordinators"}


def test_a_copy_takes_the_place_of_no_later_coordinators_journal(path: Path) -> None:
    epoch = claim_epoch(path.parent)
    continue_in_copy(path, epoch)  # there is nothing to copy
    with opened(path) as journal:
        journal.append(1.0, BEGUN)
    claim_epoch(path.parent)
    number = path.stat().st_ino
    with pytest.raises(Superseded):
        continue_in_copy(path, epoch)
    assert path.stat().st_ino == number


def test_a_copy_ends_at_a_hole(path: Path) -> None:
    """Of what was written at once a later part has come alone, and its node is lost."""
    with opened(path) as journal:
        journal.append(1.0, BEGUN)
    whole = path.read_bytes()
    late = b"".join(encode(n, 2.0, step_done(n)) for n in range(1, 9))
    path.write_bytes(whole + late[:30] + b"\0" * 200 + late[230:])
    continue_in_copy(path, claim_epoch(path.parent))
    with opened(path) as journal:
        journal.append(3.0, {"type": "taken over"})
    assert [entry.event["type"] for entry in read_entries(path)] == ["begun", "taken over"]


def test_what_was_told_as_written_survives_a_kill(path: Path) -> None:
    program = """
import itertools, sys
from pathlib import Path
from liver_hpc.run.journal import Epoch, Journal
path = Path(sys.argv[1])
journal = Journal(path, lambda told: print(told.number, flush=True), Epoch(path.parent, 1), 0)
for number in itertools.count():
    journal.append(1.0, {"type": "step_done", "step": number})
    sys.stdout.flush()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        told = [int(process.stdout.readline()) for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        process.wait(LIMIT_S)
    found = numbers(path)
    assert found == [*range(len(found))]
    assert len(found) > told[-1]
    with opened(path) as journal:
        assert journal.append(1.0, BEGUN) == len(found)
