"""The process beside the coordinator: woken, heard, ended; and nothing where nobody wants it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.performer import Services
from liver_hpc.coordinator.tracking import Watched, tracked
from liver_hpc.run.epoch import Epoch, Superseded
from liver_hpc.run.journal import Journal
from tests.fakes import threads_refused
from tests.unit.tracking.told import STARTED, entries, step_done

pytest.importorskip("tensorboard")


def config_of(run_directory: Path, **tracking: Any) -> RunConfig:
    values = {"train": {"steps": 9, "global_batch": 2}, "workers": {"initial": 1, "max": 1}}
    config = RunConfig.model_validate({**values, "layouts": {1: {"dp": 1}}, "tracking": tracking})
    (run_directory / "run.yaml").write_text(dump_run(config))
    return config


def recorded(run_directory: Path, watched: Watched) -> None:
    """Three steps, with a journal that wakes the process."""
    nothing: Any = None
    services = Services(
        clock=SystemClock(),
        recipe=nothing,
        launcher=nothing,
        rendezvous=nothing,
        open_journal=partial(Journal, run_directory / "journal.jsonl", reserve_bytes=0),
    )
    journal = watched(services).open_journal(lambda told: None, Epoch(run_directory, 1))
    for entry in entries(STARTED, *(step_done(number) for number in range(3))):
        journal.append(entry.at_s, entry.event)
    journal.close(10.0)


def children() -> list[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    mine = [each for each in mine if each.status() != psutil.STATUS_ZOMBIE]  # of other tests
    return [each for each in mine if "liver_hpc.tracking.main" in each.cmdline()]


def test_nobody_is_started_where_nothing_is_wanted(tmp_path: Path) -> None:
    with tracked(config_of(tmp_path), tmp_path, pytest.fail) as watched:
        services = object()
        assert watched(services) is services  # type: ignore[arg-type]
        assert children() == []


def test_it_is_told_all_before_it_ends(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard={})
    with tracked(config, tmp_path, pytest.fail) as watched:
        assert len(children()) == 1
        recorded(tmp_path, watched)
    assert children() == []
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [each.step for each in reader.Scalars("train/loss")] == [1, 2, 3]
    stands = json.loads((tmp_path / "tracking" / "tensorboard-stands.json").read_text())
    assert (stands["entry"], stands["step"]) == (3, 3)


def test_one_that_fails_is_noted_once_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    config = config_of(tmp_path, tensorboard={"directory": str(tmp_path / "file" / "in it")})
    notes: list[str] = []
    with tracked(config, tmp_path, notes.append) as watched:
        recorded(tmp_path, watched)
    (note,) = notes
    assert note.startswith("tracking.tensorboard has failed: NotADirectoryError: ")
    assert children() == []


def test_one_that_is_killed_is_noted_and_the_next_start_has_another(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard={})
    notes: list[str] = []
    with tracked(config, tmp_path, notes.append) as watched:
        (child,) = children()
        child.kill()
        poll_until(lambda: notes != [], Deadline.after(SystemClock(), 10.0, "the note"))
        recorded(tmp_path, watched)
        assert child not in children()
    assert notes == ["tracking has ended (signal 9): trackers are told no more"]
    assert children() == []
    stands = json.loads((tmp_path / "tracking" / "tensorboard-stands.json").read_text())
    assert stands["step"] == 3


def test_a_tracker_that_has_failed_is_tried_again_by_the_next_start(tmp_path: Path) -> None:
    (tmp_path / "full").touch()
    config = config_of(tmp_path, tensorboard={"directory": str(tmp_path / "full")})
    notes: list[str] = []
    with tracked(config, tmp_path, notes.append) as watched:
        poll_until(lambda: notes != [], Deadline.after(SystemClock(), 60.0, "the note"))
        (tmp_path / "full").unlink()
        recorded(tmp_path, watched)
    assert len(notes) == 1
    assert children() == []
    stands = json.loads((tmp_path / "tracking" / "tensorboard-stands.json").read_text())
    assert stands["step"] == 3


def test_one_that_no_thread_hears_is_noted_and_told_all(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard={})
    notes: list[str] = []
    with ExitStack() as stack:
        with threads_refused("tracking"):
            watched = stack.enter_context(tracked(config, tmp_path, notes.append))
        with threads_refused("tracking's end"):
            recorded(tmp_path, watched)
    (note,) = notes
    assert "is not heard: tracking: can't start new thread" in note
    assert children() == []
    stands = json.loads((tmp_path / "tracking" / "tensorboard-stands.json").read_text())
    assert stands["step"] == 3


def test_where_another_coordinator_has_taken_over_it_is_killed(tmp_path: Path) -> None:
    config = config_of(tmp_path, tensorboard={})
    begun_s = time.monotonic()
    with pytest.raises(Superseded), tracked(config, tmp_path, pytest.fail):
        raise Superseded(1)
    assert time.monotonic() - begun_s < 10.0
    assert children() == []


STANDS_STILL = """
import threading
from liver_hpc.tracking import main as module

module.CLOSE_S = 0.2
module.Following.open = lambda self: threading.Event().wait()
print("stands", flush=True)
module.main()
"""


def test_one_that_stands_still_ends_in_time_where_its_coordinator_was_killed(
    tmp_path: Path,
) -> None:
    config_of(tmp_path, tensorboard={})
    (tmp_path / "logs").mkdir()
    words = [sys.executable, "-c", STANDS_STILL, str(tmp_path)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    with process, contextlib.ExitStack() as at_last:
        at_last.callback(process.kill)
        assert process.stdout.readline() == b"stands\n"
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdin.close()
        assert process.wait(30.0) == -signal.SIGALRM
