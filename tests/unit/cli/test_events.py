"""`liver events`: lines or JSON, from a step on, followed to the end of the run."""

from __future__ import annotations

import json
import threading

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, encode
from liver_hpc.run.outcome import Outcome
from tests.unit.cli.test_main import Captured, liver


def entries(first: int, *texts: str) -> bytes:
    """A step, and something to note, for each."""
    lines = []
    for number, text in enumerate(texts, first):
        lines.append(encode(2 * number, 5.0, {"type": "step_done", "step": number}))
        note = {"type": "note", "text": text}
        lines.append(encode(2 * number + 1, 5.0, {"type": "any"}, [note]))
    return b"".join(lines)


def test_lines_from_a_step_on(run: RunDirectory, capsys: Captured) -> None:
    (run.path / JOURNAL_FILE).write_bytes(entries(0, "first", "second", "third"))
    assert liver("events", "latest", "--since", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2:] for line in lines] == [
        ["step", "2", "second"], ["step", "3", "third"]
    ]  # fmt: skip


def test_json_for_programs(run: RunDirectory, capsys: Captured) -> None:
    (run.path / JOURNAL_FILE).write_bytes(entries(0, "first", "second"))
    assert liver("events", "latest", "--json") == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found[1] == {"t": 5.0, "step": 2, "kind": "note", "text": "second", "data": {}}


def test_nothing_was_recorded(run: RunDirectory, capsys: Captured) -> None:
    assert liver("events", "latest") == 2
    assert "has no journal.jsonl: nothing was recorded yet" in capsys.readouterr().err


def test_a_journal_is_followed_from_before_its_beginning_to_its_end(
    run: RunDirectory, capsys: Captured
) -> None:
    journal, codes, seen = run.path / JOURNAL_FILE, list[int](), list[str]()
    follower = threading.Thread(target=lambda: codes.append(liver("events", "latest", "--follow")))
    follower.start()
    deadline = Deadline.after(SystemClock(), 20.0, "the follower")

    def shown(count: int) -> bool:
        seen.extend(capsys.readouterr().out.splitlines())
        return len(seen) == count

    data = entries(0, "first", "second")
    journal.write_bytes(data[:-30])  # the last line is not whole yet
    poll_until(lambda: shown(1), deadline)
    journal.write_bytes(data + entries(2, "third"))
    poll_until(lambda: shown(3), deadline)
    assert follower.is_alive()
    Outcome("finished", "", 3).write(run.path)
    poll_until(lambda: not follower.is_alive(), deadline)
    assert codes == [0]
    assert [line.split()[-1] for line in seen] == ["first", "second", "third"]
