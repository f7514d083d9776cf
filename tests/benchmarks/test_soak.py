"""A few random events of a real run, and the arithmetic of what is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.harness import loss_difference
from benchmarks.soak.__main__ import growth, main
from benchmarks.soak.coordinator import NodeBook
from benchmarks.soak.storm import Held, Log
from liver_hpc.run.events import NodeGone, NodeGranted, NodeWarned
from liver_hpc.run.records import RunRecords


def test_growth_is_of_the_process_that_was_seen_most_and_later_than_the_beginning() -> None:
    log = Log()
    log.held["worker"] = [Held(event, 0, 7, 10_000, 90, 9) for event in range(1, 51)]
    log.held["worker"] += [Held(event, 0, 7, 1_000, 100, 9) for event in range(51, 59)]
    log.held["worker"] += [Held(event, 0, 7, 1_010, 102, 9) for event in range(59, 67)]
    log.held["worker"] += [Held(event, 0, 8, 5_000, 300, 9) for event in range(67, 70)]
    found = growth(log, RunRecords([], [], [], {}))
    assert found["worker_memory_growth_percent"] == pytest.approx(1.0)
    assert (found["worker_descriptors_more"], found["worker_seen"]) == (2, 16)


def test_losses_differ_by_the_worst_step() -> None:
    assert loss_difference({0: 1.0, 1: 2.2}, {0: 1.0, 1: 2.0, 2: 5.0}) == pytest.approx(0.1)


def test_what_a_book_says_is_heard_once_by_each_reader(tmp_path: Path) -> None:
    says, hears = NodeBook(tmp_path), NodeBook(tmp_path)
    says.grant("n1")
    says.warn("n1", 1.0, 2.0)
    granted, warned = hears.news()
    assert isinstance(granted, NodeGranted)
    assert warned == NodeWarned("n1", "preempted", 1.0, 2.0)
    says.take("n1")
    (gone,) = hears.news()
    assert isinstance(gone, NodeGone)
    assert [type(each) for each in NodeBook(tmp_path).news()] == [
        NodeGranted,
        NodeWarned,
        NodeGone,
    ]
    hears.give_back("n1")
    assert says.given_back() == ["n1"]
    assert says.given_back() == []


@pytest.mark.parametrize("events", ["0", "-1"])
def test_fewer_than_one_event_are_refused(
    events: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.soak.__main__.run", lambda *_: pytest.fail("was measured"))
    with pytest.raises(SystemExit):
        main([f"--events={events}"])
    assert f"wanted a whole number of at least 1, got '{events}'" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_few_events_of_a_real_run(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    assert main(["--quick", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert (figures["wrong_digests"], figures["hangs"], figures["steps_missing"]) == (0, 0, 0)
    assert figures["lost_steps_beyond_copies"] == 0
    assert figures["processes_left"] == 0
