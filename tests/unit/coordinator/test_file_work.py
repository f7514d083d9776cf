from __future__ import annotations

import threading
from pathlib import Path

import pytest

from liver_hpc.coordinator.file_work import FileWork
from liver_hpc.run.epoch import Epoch, claim_epoch

WAITS_S = 10.0


def test_tasks_are_done_in_order_and_nobody_waits_for_them(tmp_path: Path) -> None:
    """What they find out is there once somebody has been woken."""
    woken, goes_on, done = threading.Event(), threading.Event(), list[str]()
    work = FileWork[str]("files", Epoch(tmp_path, 1), woken.set)

    def task(name: str, found: str | None) -> str | None:
        assert goes_on.wait(WAITS_S)
        done.append(name)
        return found

    work.do(lambda: task("first", None))
    work.do(lambda: task("second", "a"))
    assert not work.settle(0.05)
    assert (done, work.found()) == ([], [])
    goes_on.set()
    assert woken.wait(WAITS_S)
    assert work.settle(WAITS_S)
    assert (done, work.found(), work.found()) == (["first", "second"], ["a"], [])
    work.do(lambda: "later")
    assert work.settle(WAITS_S)
    assert work.found() == ["later"]
    work.close(WAITS_S)


def test_who_has_been_superseded_does_nothing_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    work, done = FileWork[str]("files", claim_epoch(tmp_path)), list[int]()
    work.do(lambda: done.append(1))
    assert work.settle(WAITS_S)
    claim_epoch(tmp_path)
    work.do(lambda: done.append(2))
    assert work.settle(WAITS_S)
    assert done == [1]
    assert "files: not done any more: another coordinator has taken over" in caplog.text
    work.close(WAITS_S)


def test_what_is_not_done_in_time_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    work, goes_on = FileWork[bool]("the files", Epoch(tmp_path, 1)), threading.Event()
    work.do(lambda: goes_on.wait(WAITS_S))
    work.close(0.05)
    assert "waited 0.05 s for the files; not all is done" in caplog.text
    goes_on.set()
