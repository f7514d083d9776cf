"""Which of several coordinators counts."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from liver_hpc.errors import LiverError
from liver_hpc.run.epoch import (
    Epoch,
    Superseded,
    claim_epoch,
    claim_succession,
    last_sign,
    newest_epoch,
)


def test_the_next_one_supersedes_those_before(tmp_path: Path) -> None:
    assert newest_epoch(tmp_path) == 0
    first = claim_epoch(tmp_path)
    first.check()
    second = claim_epoch(tmp_path)
    assert (first.number, second.number, newest_epoch(tmp_path)) == (1, 2, 2)
    second.check()
    with pytest.raises(Superseded, match="taken over from number 1"):
        first.check()


def test_one_that_begins_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liver_hpc.run.epoch.SHOWN_EVERY_S", 0.01)
    with claim_epoch(tmp_path).shown():
        before, until_s = last_sign(tmp_path), time.monotonic() + 5.0
        while last_sign(tmp_path) == before:
            assert time.monotonic() < until_s
    time.sleep(0.1)
    after = last_sign(tmp_path)
    time.sleep(0.1)
    assert last_sign(tmp_path) == after


def test_no_two_have_the_same_number(tmp_path: Path) -> None:
    claimed: list[Epoch] = []
    threads = [
        threading.Thread(target=lambda: claimed.append(claim_epoch(tmp_path))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(each.number for each in claimed) == [*range(1, 17)]


def test_without_a_number_there_is_no_coordinator(tmp_path: Path) -> None:
    (tmp_path / "coordinators").write_text("no directory")
    with pytest.raises(LiverError, match="coordinators"):
        claim_epoch(tmp_path)


def test_one_alone_starts_what_comes_after_a_coordinator(tmp_path: Path) -> None:
    """At each attempt; one that came of an earlier attempt, and is gone, is followed as well."""
    first = claim_epoch(tmp_path)
    assert claim_succession(tmp_path, 1)
    assert not claim_succession(tmp_path, 1)
    assert claim_succession(tmp_path, 2)
    assert newest_epoch(tmp_path) == first.number
    claim_epoch(tmp_path)
    assert claim_succession(tmp_path, 1)
    with pytest.raises(LiverError, match="after-0-1: No such file or directory"):
        claim_succession(tmp_path / "nowhere", 1)


def test_a_coordinator_that_lives_or_begins_shows(tmp_path: Path) -> None:
    assert last_sign(tmp_path) is None
    first = claim_epoch(tmp_path)
    began = last_sign(tmp_path)
    assert began == last_sign(tmp_path) is not None
    first.show()
    shown = last_sign(tmp_path)
    assert shown not in (None, began)
    claim_epoch(tmp_path)
    assert last_sign(tmp_path) not in (None, began, shown)
