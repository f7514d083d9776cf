"""A worker that lives and holds the others up is told from those that wait for it."""

from __future__ import annotations

import time

import pytest

from liver_hpc.coordinator import progress
from liver_hpc.protocol import messages as m
from tests.unit.coordinator.live import LiveRun, Start

pytestmark = pytest.mark.timeout(30)

WAITS = {"stands": "distributed_c10d.py:7 in wait", "waits": True}
READS = {"stands": "loader.py:3 in next < data.py:9 in batch", "waits": False}


def beat(run: LiveRun, worker: int, waits: bool) -> None:
    step = run.cluster.workers[worker].script.step
    how = WAITS if waits else READS
    run.cluster.workers[worker].channel.send(m.Heartbeat(worker=worker, step=step, **how))


def test_who_holds_the_others_up_is_named_once_and_lives(
    make: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LEAST_S", 0.3)
    monkeypatch.setattr(progress, "USUAL_STEPS", 0)
    run = make()
    run.cluster.train(2)
    run.until(lambda: len(run.metrics.steps) == 2, "two steps")
    for worker in (0, 1):
        beat(run, worker, waits=worker == 0)
    named = "worker 1 on this machine is at loader.py:3 in next < data.py:9 in batch; "
    run.until(lambda: named in run.status()["last_event"], "its name")
    assert run.status()["last_event"].startswith("no step for ")
    assert run.status()["last_event"].endswith("the others wait")
    run.cluster.train(1)
    run.until(lambda: len(run.metrics.steps) == 3, "another step")
    held_up = [entry for entry in run.metrics.entries if entry.event["type"] == "held_up"]
    assert [entry.event["workers"] for entry in held_up] == [[1]]
    assert run.ask(m.StopRequest()).ok


def test_with_a_deadline_it_is_taken_for_lost(make: Start) -> None:
    run = make(deadlines={"step_s": 0.3})
    run.cluster.train(1)
    run.until(lambda: len(run.metrics.steps) == 1, "a step")
    for worker in (0, 1):
        beat(run, worker, waits=worker == 0)
    outcome = run.outcome()
    assert outcome.state == "failed"
    assert "worker 1 lost: it holds the others up: no step for " in outcome.reason
    assert run.cluster.workers[1].script.received[-1].type == "exit"


@pytest.mark.parametrize("waiting", [(), (0, 1)], ids=["all compute", "all wait"])
def test_nobody_is_named_where_all_do_the_same(make: Start, waiting: tuple[int, ...]) -> None:
    run = make(deadlines={"step_s": 0.2})
    run.cluster.train(1)
    run.until(lambda: len(run.metrics.steps) == 1, "a step")
    for worker in (0, 1):
        beat(run, worker, waits=worker in waiting)
    time.sleep(0.5)
    assert run.status()["state"] == "training"
    assert not [entry for entry in run.metrics.entries if entry.event["type"] == "held_up"]
    assert run.ask(m.StopRequest()).ok


def test_an_evaluation_that_is_due_has_its_time(make: Start) -> None:
    run = make(deadlines={"step_s": 0.2, "evaluation_s": 60.0}, eval={"every_steps": 1, "steps": 1})
    run.cluster.train(1)
    run.until(lambda: len(run.metrics.steps) == 1, "a step")
    for worker in (0, 1):
        beat(run, worker, waits=worker == 0)
    time.sleep(0.5)
    assert run.status()["state"] == "training"
    assert run.ask(m.StopRequest()).ok
