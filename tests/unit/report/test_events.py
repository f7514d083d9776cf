"""What happened in a run, line by line, from its journal's entries."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from liver_hpc.protocol.messages import DrainRequest, ReplaceRequest, StopRequest
from liver_hpc.report.events import RunEvent, events_of
from liver_hpc.run.codec import encode
from liver_hpc.run.entries import Entry
from liver_hpc.run.events import CheckpointWritten, OperatorAsked, TookOver
from liver_hpc.run.records import NoticeRecord, ObservationRecord
from tests.unit.report.rows import reconfiguration, recovery, straggler


def told(event: dict[str, Any], *actions: dict[str, Any]) -> list[RunEvent]:
    return [*events_of([Entry(0, 7.0, event, [*actions])])]


def text_of(event: dict[str, Any], *actions: dict[str, Any]) -> str:
    (found,) = told(event, *actions)
    return found.text


def row(table: str, record: Any) -> dict[str, Any]:
    values = {k: "NaN" if v != v else v for k, v in asdict(record).items()}
    return {"type": "record", "table": table, "row": values}


def test_a_line_knows_after_how_many_steps_it_came() -> None:
    note = {"type": "note", "text": "something"}
    entries = [
        Entry(0, 1.0, {"type": "coordinator_started", "resumed": {"step": 40}}, [note]),
        Entry(1, 2.0, {"type": "step_done", "step": 40}, []),
        Entry(2, 3.0, {"type": "any"}, [note]),
    ]
    found = [(each.at_s, each.step, each.kind) for each in events_of(entries)]
    assert found == [(1.0, 40, "start"), (1.0, 40, "note"), (3.0, 41, "note")]


def test_steps_alone_are_no_lines() -> None:
    phase = {"type": "step_phase", "phase": "prepare"}
    assert told({"type": "step_done", "step": 1}, phase) == []


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            {"type": "coordinator_started", "attributes": {"host": "n1", "config": "secret"}},
            "a coordinator starts the run on n1",
        ),
        (encode(TookOver(2, 17, "n3")), "coordinator 2 takes over on n3"),
        (
            encode(OperatorAsked(0, DrainRequest(node="n2", within_s=30.0))),
            "operator asks: drain node=n2 within_s=30.0",
        ),
        (encode(OperatorAsked(1, ReplaceRequest(replace=0))), "operator asks: replace worker=0"),
        (encode(OperatorAsked(2, StopRequest())), "operator asks: stop"),
        (
            encode(CheckpointWritten(30, "/c/iter_30", 2**20, 1.5, 3 * 2**20)),
            "checkpoint of step 30: 3.0 MiB in 1.5 s, /c/iter_30",
        ),
    ],
)
def test_events_that_are_told(event: dict[str, Any], text: str) -> None:
    assert text_of(event) == text


def test_the_run_file_is_not_in_a_line() -> None:
    event = {"type": "coordinator_started", "attributes": {"config": "setup: [password]"}}
    (found,) = told(event)
    assert "password" not in json.dumps(found.document())


def test_a_checkpoint_is_told_once() -> None:
    written = encode(CheckpointWritten(30, "/c/iter_30", 1, 1.5, 1))
    (found,) = told(written, {"type": "note", "text": "checkpoint of step 30"})
    assert found.kind == "checkpoint"


@pytest.mark.parametrize(
    ("ok", "said"), [(True, "told the operator: queued"), (False, ": refused: queued")]
)
def test_what_an_operator_was_told(ok: bool, said: str) -> None:
    assert text_of({"type": "any"}, {"type": "answer", "ok": ok, "text": "queued"}).endswith(said)


def test_a_handoff_has_what_it_cost() -> None:
    record = reconfiguration(
        generation=2, source="tp1 pp1 dp2", target="tp2 pp1 dp2", outcome="completed", detail="",
        pause_s=0.25, bytes_moved=2**21, notice_s=100.0, first_step_ended_s=104.5,
    )  # fmt: skip
    assert text_of({"type": "any"}, row("reconfigurations", record)) == (
        "handoff to generation 2, dp2 to tp2 dp2 (resize to tp2 pp1 dp2 (operator)): completed, "
        "paused 0.250 s, moved 2.0 MiB, 4.5 s from its notice on"
    )


def test_a_handoff_that_came_to_nothing_says_why() -> None:
    record = reconfiguration(outcome="aborted", detail="joiner 3 died", pause_s=math.nan)
    (found,) = told({"type": "any"}, row("reconfigurations", record))
    assert found.text.endswith(": aborted: joiner 3 died")
    assert found.document()["data"]["pause_s"] is None
    json.loads(json.dumps(found.document()), parse_constant=pytest.fail)


def test_a_recovery_and_a_node() -> None:
    record = recovery(lost="1", noticed_s=10.0, refilled_s=12.5, steps_redone=3)
    text = text_of({"type": "any"}, row("recoveries", record))
    assert "lost workers 1; filled after 2.5 s, 3 steps are done again; worker 1 lost" in text
    nan = math.nan
    notice = NoticeRecord(
        "preempted", "n4", "burst-3", 1.0, nan, nan, "live to dp2", 2, nan, nan, "in time"
    )
    text = text_of({"type": "any"}, row("notices", notice))
    assert text == "node n4, preempted: in time; live to dp2"


def test_what_would_have_been_done_is_told_once() -> None:
    record = ObservationRecord(
        1.0, 5, "nodes granted", "tp1 pp1 dp2", "tp1 pp1 dp4", "", 2.0, 0.5, "stays as it is"
    )
    note = {"type": "note", "text": "would have begun something; stays as it is"}
    (found,) = told({"type": "tick"}, row("observations", record), note)
    assert found.text == "would have gone from dp2 to dp4 (nodes granted); stays as it is"
    assert (found.kind, found.data["cost_s"]) == ("observation", 0.5)


def test_a_straggler_is_told_once_with_what_was_done() -> None:
    note = {"type": "note", "text": "node n3 straggles: forward passes of its worker 5 take long"}
    left = {"type": "note", "text": "node n3 has to be left: straggling, 600.0 s left"}
    found, then = told({"type": "node_straggles"}, row("stragglers", straggler("n3")), note, left)
    assert found.text == (
        "node n3 straggles: 1.8 times as slow as others for 61 s (worker 5, of 4 nodes); drained"
    )
    assert (found.kind, found.data["worker"]) == ("straggler", 5)
    assert then.text == left["text"]


def test_tables_of_workers_and_of_later_releases_are_left_out() -> None:
    rows = [{"type": "record", "table": name, "row": {}} for name in ("traffic", "weather")]
    assert told({"type": "painted"}, *rows) == []
