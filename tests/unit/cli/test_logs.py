"""`liver logs`: whose log is meant, and how it is followed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from liver_hpc.cli.following import Following, lines_of
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.outcome import Outcome
from tests.unit.cli.test_main import Captured, liver


def log(run: RunDirectory, name: str, text: str) -> Path:
    path = run.path / "logs" / name
    with path.open("a") as file:
        file.write(text)
    return path


def admit(run: RunDirectory, *admitted: tuple[str, list[int]]) -> None:
    lines = [
        encode(n, 1.0, {"type": "agent_met"}, [{"type": "admit", "agent": a, "workers": ids}])
        for n, (a, ids) in enumerate(admitted)
    ]
    (run.path / JOURNAL_FILE).write_bytes(b"".join(lines))


def test_the_coordinators_log_by_default(run: RunDirectory, capsys: Captured) -> None:
    log(run, "coordinator.log", "one\ntwo")
    assert liver("logs", "latest") == 0
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_workers_log_is_found_by_its_id(run: RunDirectory, capsys: Captured) -> None:
    admit(run, ("a0", [0, 1]), ("a1", [2, 3]))
    log(run, "worker-a1-1.log", "of worker 3\n")
    assert liver("logs", "latest", "--worker", "3") == 0
    assert capsys.readouterr().out == "of worker 3\n"


def test_a_worker_of_the_newest_start_is_meant(run: RunDirectory, capsys: Captured) -> None:
    admit(run, ("a0", [0, 1]), ("a4", [1, 2]))
    log(run, "worker-a4-0.log", "of the restart\n")
    assert liver("logs", "latest", "--worker", "1") == 0
    assert capsys.readouterr().out == "of the restart\n"


def test_an_agents_log(run: RunDirectory, capsys: Captured) -> None:
    log(run, "agent-a1.log", "of an agent\n")
    assert liver("logs", "latest", "--agent", "a1") == 0
    assert capsys.readouterr().out == "of an agent\n"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "has no logs/coordinator.log yet"),
        (["--worker", "5"], "has had no worker 5; workers of the run are [0, 1]"),
        (["--agent", "../a"], "has had no agent '../a'; agents of the run are a0"),
        (["--agent", "a", "--worker", "1"], "not allowed with argument"),
    ],
)
def test_logs_that_are_not_there(
    run: RunDirectory, options: list[str], said: str, capsys: Captured
) -> None:
    admit(run, ("a0", [0, 1]))
    log(run, "agent-a0.log", "")
    assert liver("logs", "latest", *options) == 2
    assert said in capsys.readouterr().err


def test_a_log_is_followed_to_the_end_of_the_run(run: RunDirectory, capsys: Captured) -> None:
    """Over a half line, and over a coordinator that begins another file."""
    seen: list[str] = []
    deadline = Deadline.after(SystemClock(), 20.0, "the follower")
    path = run.path / "logs" / "coordinator.log"

    def follow() -> None:
        for line in lines_of(path, Following(run, path)):
            seen.append(line)

    follower = threading.Thread(target=follow)
    follower.start()
    log(run, "coordinator.log", "one\nhal")
    poll_until(lambda: seen == ["one"], deadline)
    log(run, "coordinator.log", "f\n")
    poll_until(lambda: seen == ["one", "half"], deadline)
    path.rename(path.with_suffix(".1"))
    log(run, "coordinator.log", "of the next\n")
    poll_until(lambda: len(seen) == 3, deadline)
    assert follower.is_alive()
    Outcome("finished", "", 3).write(run.path)
    poll_until(lambda: not follower.is_alive(), deadline)
    assert seen == ["one", "half", "of the next"]


def test_nobody_is_left_to_write(run: RunDirectory, capsys: Captured) -> None:
    log(run, "coordinator.log", "the last words\n")
    run.note_job_id("99999999")  # of no process
    assert liver("logs", "latest", "--follow") == 0
    assert capsys.readouterr().out == "the last words\n"


def test_what_was_written_before_the_end_is_told(run: RunDirectory, capsys: Captured) -> None:
    log(run, "coordinator.log", "all of it\nand the end")
    Outcome("finished", "", 3).write(run.path)
    assert liver("logs", "latest", "--follow") == 0
    assert capsys.readouterr().out == "all of it\nand the end\n"
