"""What follows for trackers from the entries of a journal."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.report.derive import run_figures
from liver_hpc.run.entries import read_entries
from liver_hpc.tracking.base import Mark, Point
from liver_hpc.tracking.course import UNTOLD, Course
from tests.unit.report.journals import write_journal
from tests.unit.report.rows import reconfiguration, recovery
from tests.unit.report.run_of_everything import everything
from tests.unit.tracking.told import STARTED, entries, step_done

BEGIN = {
    "type": "begin",
    "generation": 0,
    "rank_map": {"tp": 1, "pp": 1, "dp": 2, "workers": [0, 1]},
}
NODE = {"name": "n1", "allocation": "main", "slots": 2}


def course_of(*events: Any) -> list[Point | Mark]:
    course = Course()
    return [what for entry in entries(*events) for what in course.take(entry)]


def recorded(table: str, row: Any) -> dict[str, Any]:
    return {"type": "record", "table": table, "row": asdict(row)}


def test_a_step_has_what_was_measured_and_who_was_there() -> None:
    begun = ({"type": "hello"}, [{"type": "send", "workers": [0, 1], "message": BEGIN}])
    granted = {"type": "node_granted", "node": NODE}
    (point,) = course_of(STARTED, granted, begun, step_done(0, metrics={"accuracy": 0.5}))
    assert point == Point(
        1,
        101.0,
        {
            "train/loss": 4.0,
            "train/grad_norm": 1.0,
            "train/learning_rate": 0.1,
            "train/step_s": 1.0,
            "train/tokens_per_s": 50.0,
            "run/workers": 2,
            "run/nodes": 1,
            "metrics/accuracy": 0.5,
        },
    )


@pytest.mark.parametrize(
    "after",
    [
        ({"type": "worker_gone", "worker": 1}, [{"type": "send", "message": {"type": "halt"}}]),
        ({"type": "broken"}, [{"type": "end", "state": "restart", "reason": ""}]),
        STARTED,
    ],
    ids=["loss", "end", "start"],
)
def test_no_worker_trains_after_the_end_of_a_world_and_no_node_is_held_that_is_gone(
    after: Any,
) -> None:
    begun = ({"type": "hello"}, [{"type": "send", "workers": [0, 1], "message": BEGIN}])
    granted = {"type": "node_granted", "node": NODE}
    gone, course = {"type": "node_gone", "node": "n1"}, Course()
    for entry in entries(STARTED, granted, begun, step_done(0)):
        list(course.take(entry))
    assert course.now == {"run/workers": 2, "run/nodes": 1}
    for entry in entries(gone, after):
        list(course.take(entry))
        assert course.now["run/nodes"] == 0
    assert course.now["run/workers"] == 0


def test_a_step_that_is_done_again_has_a_place_behind_the_one_before() -> None:
    course, places = Course(), []
    resumed = STARTED | {"resumed": {"step": 7, "weights": False}}
    for entry in entries(resumed, *(step_done(number) for number in (7, 8, 7, 8, 9))):
        list(course.take(entry))
        places.append(course.place)
    assert places == [0, 8, 9, 10, 11, 12]


def test_an_evaluation_stands_at_the_steps_that_were_done() -> None:
    evaluated = {"type": "evaluated", "step": 2, "loss": 3.5, "ended_s": 9.0, "generation": 0}
    _, _, point = course_of(STARTED, step_done(0), step_done(1), evaluated)
    assert point == Point(2, 9.0, {"validation/loss": 3.5})


def test_the_newest_checkpoint_and_one_that_failed_stand_where_they_were_told() -> None:
    resumed = STARTED | {"resumed": {"step": 7, "weights": False}}
    written = {"type": "checkpoint_written", "step": 8, "took_s": 2.5}
    failed = {"type": "checkpoint_failed", "step": 9, "reason": "Disk quota exceeded"}
    told = course_of(resumed, step_done(7), step_done(8), written, failed)
    points = [(what.step, what.values) for what in told if isinstance(what, Point)]
    assert points[0] == (7, {"checkpoint/step": 7})
    assert points[-1] == (9, {"checkpoint/step": 8, "checkpoint/took_s": 2.5})
    assert told[-1].kind == "checkpoint"  # type: ignore[union-attr]
    weights = STARTED | {"resumed": {"step": 0, "weights": True}}
    assert not [what for what in course_of(weights) if isinstance(what, Point)]


def test_a_recovery_is_marked_where_it_was_noticed() -> None:
    steps = [step_done(n) for n in (0, 1, 2)]
    lost = ({"type": "refilled"}, [recorded("recoveries", recovery(step=1, steps_redone=2))])
    told = course_of(STARTED, *steps, lost, *(step_done(n, 1) for n in (1, 2, 3)))
    assert [what.step for what in told if isinstance(what, Point)] == [1, 2, 3, 2, 3, 4]
    (mark,) = (what for what in told if isinstance(what, Mark))
    assert (mark.kind, mark.step) == ("recovery", 3)
    assert "lost workers 1; filled after 1.0 s, 2 steps are done again" in mark.text


def test_handoffs_resumes_takeovers_and_the_end_are_marked() -> None:
    resumed = STARTED | {"resumed": {"step": 7, "weights": False}}
    attempt = reconfiguration(outcome="aborted", detail="worker 3 lost", pause_s=float("nan"))
    told = course_of(
        resumed,
        ({"type": "aborted"}, [recorded("reconfigurations", attempt)]),
        {"type": "took_over", "epoch": 2},
        ({"type": "finished"}, [{"type": "end", "state": "finished", "reason": "all steps"}]),
    )
    assert [(mark.step, mark.kind, mark.text) for mark in told if isinstance(mark, Mark)] == [
        (7, "run", "goes on from the checkpoint of step 7"),
        (
            7,
            "handoff",
            "handoff to generation 1, dp2 to tp2 dp2 (resize to tp2 pp1 dp2 (operator)): aborted: "
            "worker 3 lost",
        ),
        (7, "run", "coordinator 2 took over"),
        (7, "run", "finished: all steps"),
    ]


def test_an_entry_that_lacks_a_field_is_told() -> None:
    with pytest.raises(ConfigError, match="entry 1: 'epoch'"):
        course_of(STARTED, {"type": "took_over"})


def test_what_no_tracker_is_told_of_is_not_kept(tmp_path: Path) -> None:
    """The process lives beside workers for as long as the run does."""
    course, records = Course(), everything()
    for entry in read_entries(write_journal(tmp_path, records)):
        _ = [*course.take(entry)]
    kept = course.fold.records
    assert all(getattr(records, name) and not getattr(kept, name) for name in UNTOLD)
    found, wanted = (replace(run_figures(each), reconfigurations=()) for each in (kept, records))
    assert repr(found) == repr(wanted)
