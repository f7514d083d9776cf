"""Traces of nodes that come and go, and what they would have cost."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.report.command import show
from liver_hpc.report.traces import (
    LIVE,
    RESTART,
    STABLE,
    Cost,
    Event,
    Strategy,
    Trace,
    compared,
    play,
    read_trace,
)
from liver_hpc.run.records import HoldingRecord, PlacementRecord, RunRecords
from tests.unit.report.journals import write_journal
from tests.unit.report.rows import reconfiguration, step

QUICK = Strategy("quick", lambda before, after: Cost(1.0, 10.0), late=Cost(30.0, 30.0))


def rate(workers: int) -> float:
    return 100.0 * workers


def test_a_change_costs_its_lost_time_and_the_new_workers_train_after_it() -> None:
    played = play(Trace(2, 100.0, (Event(20.0, 2),)), QUICK, rate)
    # 200 tokens a second until 30, but for one second; then 400.
    assert played.tokens == 200.0 * 29 + 400.0 * 70
    assert played.goodput == 0.99
    assert played.held_h * 3600 == pytest.approx(2 * 100 + 2 * 80)
    assert played.lost_h * 3600 == pytest.approx(2.0)
    assert (played.changes, played.late) == (1, 0)


def test_what_comes_while_it_is_busy_is_answered_at_once() -> None:
    events = (Event(20.0, 2), Event(22.0, 2), Event(25.0, 2))
    assert play(Trace(2, 100.0, events), QUICK, rate).changes == 2
    back = (Event(20.0, 2), Event(22.0, 2), Event(25.0, -2, 60.0))
    assert play(Trace(2, 100.0, back), QUICK, rate).changes == 1  # nothing is left to be done


def test_a_node_that_is_gone_too_early_costs_more() -> None:
    trace = Trace(2, 100.0, (Event(10.0, 2), Event(50.0, -2, 5.0)))
    played = play(trace, QUICK, rate)
    assert (played.changes, played.late) == (2, 1)
    assert played.goodput == pytest.approx(1 - 31.0 / 100.0)
    assert played.held_h * 3600 == pytest.approx(2 * 100 + 2 * 45)


def test_what_is_lost_after_the_end_is_not_counted() -> None:
    played = play(Trace(2, 100.0, (Event(99.5, 2),)), QUICK, rate)
    assert played.goodput == pytest.approx(0.995)
    assert play(Trace(2, 100.0, ()), QUICK, rate).tokens == 20_000.0


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


GOOD = "at_s,workers,warning_s\n# a comment\n0,2,\n100,2,\n5000,-2,120\n7200,0,\n"


def test_a_trace_is_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, GOOD))
    assert trace == Trace(2, 7200.0, (Event(100.0, 2), Event(5000.0, -2, 120.0)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "wanted a first line at_s,workers,warning_s"),
        ("time,workers\n0,2\n", "wanted a first line at_s,workers,warning_s"),
        ("at_s,workers,warning_s\n0,two,\n9,0,\n", "row 1: wanted numbers"),
        ("at_s,workers,warning_s\n0\n9,0,\n", "row 1: wanted numbers"),
        ("at_s,workers,warning_s\n5,2,\n9,0,\n", "row 1: wanted at_s 0"),
        ("at_s,workers,warning_s\n0,2,\n9,1,\n", "row 2: wanted the end"),
        ("at_s,workers,warning_s\n0,2,\n", "row 1: wanted the end"),
        ("at_s,workers,warning_s\n0,2,\n8,2,\n7,2,\n9,0,\n", "row 3: it is earlier"),
        ("at_s,workers,warning_s\n0,2,\n8,2,\n7,0,\n", "row 3: it is earlier"),
        ("at_s,workers,warning_s\n0,2,\n5,-2,1\n9,0,\n", "row 2: 0 workers are left; the 2"),
        ("at_s,workers,warning_s\n0,2,\n5,2,-1\n9,0,\n", "row 2: wanted finite times"),
    ],
)
def test_a_trace_that_is_none_is_refused_by_row(tmp_path: Path, text: str, said: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=f"{path}.*{said}"):
        read_trace(path)


def test_a_trace_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.csv: cannot be read"):
        read_trace(tmp_path / "nowhere.csv")


def records() -> RunRecords:
    """A handoff from 2 workers to 4 that has lost half a second; they are twice as fast. It was
    asked for an hour before it began; the first world's first step ended 11 s after its node came.
    """
    steps = [step(i) for i in range(10)]
    steps += [step(10, generation=1, phase="first", started_s=110.5)]
    steps += [step(11 + i, generation=1, started_s=111.5 + i / 2, took_s=0.5) for i in range(9)]
    times = {"source_last_step_ended_s": 110.0, "first_step_ended_s": 111.0}
    attempt = reconfiguration(notice_s=105.0 - 3600.0, began_s=105.0, **times)
    holding = HoldingRecord("n1", "main", "", 4, 89.0, math.nan)
    return RunRecords(steps, [attempt], [], {}, holdings=[holding])


def test_strategies_are_judged_by_the_runs_own_costs(tmp_path: Path) -> None:
    found = compared(written(tmp_path, GOOD), records())
    assert found["grow"] == {"lost_s": pytest.approx(0.5), "busy_s": pytest.approx(6.0)}
    assert found["restart"]["lost_s"] == 11.0
    assert "its start" in found["restart_is"]
    assert found["tokens_per_s"] == {2: 512.0, 4: 1024.0}
    live, restart, stable = found["strategies"]
    assert [each["strategy"] for each in (live, restart, stable)] == [LIVE, RESTART, STABLE]
    assert live["tokens"] > restart["tokens"] > stable["tokens"]
    assert live["goodput"] == pytest.approx(1 - 1.0 / 7200)
    assert restart["goodput"] == pytest.approx(1 - 22.0 / 7200)
    assert stable["held_h"] == pytest.approx(4.0)


@pytest.mark.parametrize(("known", "restart_s"), [(True, 15.0), (False, 3580.0)])
def test_a_wait_for_nodes_is_no_part_of_a_restart(
    tmp_path: Path, known: bool, restart_s: float
) -> None:
    """The job was queued again: its node went 5 s after the last step, and came 10 s before the
    next one."""
    run = records()
    run.holdings.clear()
    run.steps.append(step(20, generation=3, started_s=run.steps[-1].ended_s + 3580.0))
    times = [(90.0, run.steps[-2].ended_s + 5.0), (run.steps[-1].started_s - 10.0, math.nan)]
    run.holdings.extend(HoldingRecord("n1", "main", "", 4, *each) for each in times if known)
    found = compared(written(tmp_path, GOOD), run)
    assert found["restart"]["lost_s"] == pytest.approx(restart_s)
    assert "own restarts" in found["restart_is"]


def placed(generation: int, *nodes: str) -> list[PlacementRecord]:
    return [PlacementRecord(generation, "tp1 pp1 dp2", node, 1) for node in nodes]


def test_a_wait_for_the_last_node_is_no_part_of_a_restart(tmp_path: Path) -> None:
    """The first start had a node an hour before the other one; in the second one of the two is
    lost, and another comes in its place an hour later."""
    run = records()
    trace, lost_s = written(tmp_path, GOOD), run.steps[-1].ended_s + 5.0
    first = HoldingRecord("n1", "main", "", 2, 89.0 - 3600.0, math.nan)
    run.holdings[:] = [first, HoldingRecord("n2", "burst-1", "", 2, 89.0, lost_s)]
    run.placements.extend(placed(0, "n1", "n2"))
    assert compared(trace, run)["restart"]["lost_s"] == pytest.approx(11.0)
    run.steps.append(step(20, generation=3, started_s=lost_s + 3610.0))
    run.holdings.append(HoldingRecord("n3", "burst-2", "", 2, lost_s + 3600.0, math.nan))
    run.placements.extend([*placed(1, "n1", "n2"), *placed(3, "n1", "n3")])
    assert compared(trace, run)["restart"]["lost_s"] == pytest.approx(15.0)


def test_it_is_printed_and_in_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = records()
    run.steps.append(step(20, generation=3, started_s=130.0))
    write_journal(tmp_path, run)
    trace = written(tmp_path, GOOD)
    show(tmp_path, trace=trace)
    printed = capsys.readouterr().out
    assert "2 events in 2:00:00" in printed
    assert "none preemptible" in printed
    show(tmp_path, as_json=True, trace=trace)
    assert len(json.loads(capsys.readouterr().out)["trace"]["strategies"]) == 3


def test_a_run_without_a_handoff_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="wants a run with a completed handoff"):
        compared(written(tmp_path, GOOD), RunRecords([step(0)], [], [], {}))
