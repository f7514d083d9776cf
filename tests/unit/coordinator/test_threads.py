"""What has a thread has it from its start on: where there is none, it says so then, and by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.connections import ConnectionServer, Inbox
from liver_hpc.coordinator.file_work import FileWork
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import LiverError
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.journal import Journal
from tests.fakes import threads_refused
from tests.unit.coordinator.test_store import Asker

LIMIT_S = 10.0


def connections(path: Path) -> ConnectionServer:
    nothing: StoreService = None  # type: ignore[assignment]
    return ConnectionServer(Inbox(), nothing, 1.0)


@pytest.mark.parametrize(
    ("begin", "name"),
    [
        (lambda path: StoreService(FakeClock()), "store"),
        (lambda path: FileWork("the files", Epoch(path, 1)), "the files"),
        (lambda path: Journal(path / "journal.jsonl", print, Epoch(path, 1), 0), "journal"),
        (connections, "reader"),
        (lambda path: ControlServer("127.0.0.1", b"", bool), "accept-[0-9]+"),
    ],
)
def test_what_can_get_no_thread_says_so_when_it_is_to_start(
    begin: Callable[[Path], object], name: str, tmp_path: Path
) -> None:
    with threads_refused(), pytest.raises(LiverError, match=f"{name}: can't start new thread"):
        begin(tmp_path)


def test_the_store_answers_where_there_are_no_more_threads() -> None:
    store = StoreService(FakeClock(), gather_s=0.0)
    with threads_refused():
        assert Asker(store)("add", "n", amount=3).count == 3
    store.close()


def test_files_are_worked_on_where_there_are_no_more_threads(tmp_path: Path) -> None:
    work = FileWork[str]("files", Epoch(tmp_path, 1))
    with threads_refused():
        work.do(lambda: "done")
    assert work.settle(LIMIT_S)
    assert work.found() == ["done"]
    work.close(LIMIT_S)
