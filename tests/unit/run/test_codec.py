"""Events and actions in the journal's words: what is written is what was meant."""

from __future__ import annotations

import math
from typing import Any, get_args

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.events import Requested, WorldRef
from liver_hpc.run import actions as a
from liver_hpc.run import entries
from liver_hpc.run import events as e
from liver_hpc.run.actions import Ending
from liver_hpc.run.codec import decode_attempt, encode, name_of, rows_of
from liver_hpc.run.events import (
    EndNear,
    Node,
    NodeGone,
    NodeGranted,
    NodeWarned,
    PoolNote,
    SaidTogether,
    Seat,
)
from liver_hpc.run.records import (
    CrossingRecord,
    EvaluationRecord,
    NetworkRecord,
    NoticeRecord,
    ObservationRecord,
    Row,
    StragglerRecord,
    TrafficRecord,
    WorkerPhaseRecord,
)
from tests.unit.report.rows import reconfiguration, recovery
from tests.unit.run.replay import decode_event, plain

SCALARS = m.ScalarState(step=3, consumed_samples=24, optimizer_step=3, loss_scale=1.0, seed=7)
PAIR = m.PairDigests(kinds=("main",), peers=(1,), values="00000000000000ff")
DIGEST = m.ClassDigest(kind="main", tp_replicated=True, multi_stage=False, value="00000000000000ff")
HELD = m.HeldSnapshot(
    generation=1,
    layout="tp1 pp1 dp2",
    rank=1,
    scalars=SCALARS,
    digests={"main": "00000000000000ff"},
)
STEP = m.StepDone(
    worker=0, generation=1, step=7, loss=2.5, grad_norm=0.1, learning_rate=1e-3, tokens=64,
    started_s=10.1, ended_s=10.5,
)  # fmt: skip

EVENTS: list[e.Event] = [
    e.CoordinatorStarted(
        {"config": "name: t\n"},
        "/checkpoints",
        e.Resumed("/checkpoints/step-5", 5, 3, "tp1 pp1 dp2"),
        e.Memory(4, 2, ("n1", "n2"), 100, 7, 2, 90, 1, 95),
        epoch=3,
    ),
    e.CoordinatorStarted(),
    e.LaunchAllowed(),
    e.AgentMet("a0", 2),
    e.TookOver(2, 4711, "h"),
    e.Regained(),
    e.StoodStill(10.25),
    e.AgentListens("a0", "h", 4711),
    e.AgentEnded("a0", 137),
    e.LaunchFailed(("a0", "a1"), ("a1",), "no such node"),
    e.RendezvousFailed("it has ended"),
    e.WorkerGone(3, "signal 9"),
    e.OperatorAsked(0, m.ResizeRequest(layout="tp=2")),
    e.OperatorAsked(1, m.ResizeRequest(workers=4)),
    e.OperatorAsked(2, m.ReplaceRequest(replace=1)),
    e.OperatorAsked(3, m.DrainRequest(node="n1", within_s=2.5)),
    e.OperatorAsked(4, m.DrainRequest(node="n1", undo=True)),
    e.OperatorAsked(5, m.StopRequest(checkpoint=True)),
    e.StopSignalled("SIGTERM"),
    e.StateRestored(6),
    e.CheckpointDoubted("exp_avg differs"),
    e.CheckpointDamaged("iter_0000005/__0_0.distcp has changed"),
    e.CheckpointDamaged("iter_0000005/__0_0.distcp cannot be read", again=True),
    e.CheckpointWritten(5, "/checkpoints/step-5", 10, 0.1, 20),
    e.CheckpointFailed(5, "the disk is full"),
    e.JournalFailed(""),
    e.ShellFailed("worker 0 sent what it may not"),
    e.Tick(),
    NodeGranted(Node("n1", "main", 2, preemptible=True, automatic=False, burst=True)),
    NodeGranted(Node("", "machine")),
    NodeWarned("n1", "preempted", 10.25, 20.1),
    NodeWarned("n1", "drained", 10.25),
    NodeGone("n1", "it is down"),
    EndNear("time limit", 1.1, 2.2),
    PoolNote("the controller is away: \N{SNOWMAN}"),
    e.BurstOver("2.00 of 2 node hours are used up"),
    e.HeldUp((1, 3), "no step for 61 s"),
    m.Hello(worker=0, pid=1, host="h", booted_s=1.5, boot_timings_s={"import": 0.1}),
    m.Hello(worker=0, pid=1, host="h", booted_s=1.5, code={"torch": "2.11.0"}),
    STEP,
    m.Evaluated(worker=0, generation=1, step=8, loss=2.5, batches=10, started_s=10.5, ended_s=11.5),
    m.Prepared(worker=0, generation=1, timings_s={"groups": 0.5}, bytes_out=10, bytes_to={1: 10}),
    m.AtBoundary(worker=0, generation=1, scalars=SCALARS, last_step_ended_s=1.1),
    m.Verified(worker=0, generation=1, step=8, digests=(DIGEST,)),
    m.Vote(worker=0, generation=1, ok=True, source=(DIGEST,), target=(DIGEST,), sent=(PAIR,)),
    m.FirstStep(worker=0, generation=1, started_s=1.0, ended_s=2.0),
    m.Released(worker=0, generation=1, file_descriptors=9, resident_bytes=99, released_s=3.0),
    m.Aborted(worker=0, generation=1),
    m.Failed(worker=0, generation=1, reason="told to"),
    m.Finished(worker=0, step=9),
    m.Saved(worker=0, generation=1, scalars=SCALARS, num_bytes=10, digests=(DIGEST,)),
    m.Restored(worker=0, generation=1, scalars=SCALARS, digests=(DIGEST,)),
    m.NotRestored(worker=0, generation=1, reason="__0_0.distcp is truncated"),
    m.Transports(worker=0, generation=1, workers=2, host="h", kinds=("SHM",), detail="d"),
    m.Broken(worker=0, generation=1, reason="a peer is gone"),
    m.Halted(worker=0, generation=1, held=(HELD,)),
    m.Refilled(worker=0, generation=2, scalars=SCALARS, digests=(DIGEST,), shares={"main": "0f"}),
    m.Unprotected(worker=0, generation=1, step=5, reason="a connection is gone"),
    e.NodeStraggles("n3", 1.8, 60.5, worker=5, compared=4),
    e.NodeKeepsUp("n3", 61.0),
    SaidTogether((m.Aborted(worker=0, generation=1), m.Aborted(worker=1, generation=1)), (7, 3)),
]  # fmt: skip
RECORDS: list[Row] = [
    reconfiguration(),
    NoticeRecord("granted", "n1", "main", 1.0, math.nan, 2.0, "", -1, math.nan, 3.0, "in use"),
    ObservationRecord(1.0, 5, "nodes granted", "tp1", "tp2", "", 2.0, math.nan, "stays as it is"),
    StragglerRecord(1.0, 5, 0, "n3", 5, 1.8, 60.5, 4, "drained"),
    NetworkRecord(1, "gloo tcp", "h", "lo"),
    recovery(),
    WorkerPhaseRecord(1, 0, "n1", "boot", 1.0, math.nan),
    CrossingRecord(1, 0, *(0.5 for _ in range(12)), math.nan),
    TrafficRecord(1, 0, 1, 10),
    EvaluationRecord(8, 1, math.nan, 2, 1.0, 2.0),
]
BEGINS = a.AttemptBegins(
    Requested(
        generation=1,
        source=WorldRef(0, RankMap(Layout(1, 1, 2), (0, 1), (0, 0))),
        target=RankMap(Layout(2, 1, 2), (0, 1, 2, 3), (0, 0, 1, 1)),
        notice="resize",
        here=(2,),
    ),
    notice_s=1.5,
)
ACTIONS: list[a.Action] = [
    a.Launch((a.LaunchAgent("a0", Seat("n1", (0, 1)), Layout(2, 1, 2)),)),
    a.Admit("a0", (0, 1)),
    a.RecordAll([TrafficRecord(1, 0, 1, 10), TrafficRecord(1, 1, 0, 20)]),
    a.TurnAway("a0", "not expected"),
    a.EndAgent("a0", "of no more use"),
    a.KillAgent("a0"),
    a.Send((0, 1), m.Abort(generation=1, reason="r")),
    a.Disconnect(0),
    a.Answer(0, True, "started"),
    a.WantWorkers(2),
    a.StartAgent("a3", "n1"),
    a.GiveBack("n1"),
    a.Avoid("n1"),
    a.Readmit("n1"),
    a.ForgetGeneration(1),
    a.Remember(2, ("n1",)),
    *map(a.Record, RECORDS),
    BEGINS,
    a.StepPhase("first"),
    a.Note("n"),
    a.Log("l"),
    a.End(Ending.RESTART, "r", 5),
]


def through_a_journal(event: e.Event, actions: list[a.Action]) -> entries.Entry:
    line = entries.encode(0, 1.5, encode(event), [encode(action) for action in actions])
    (entry,) = entries.decode([line], "memory, line")
    return entry


def test_there_is_an_example_of_everything() -> None:
    assert {type(event) for event in EVENTS} == {*get_args(e.Event)}
    assert {type(action) for action in ACTIONS} == {*get_args(a.Action)}
    assert {type(row) for row in RECORDS} == {*get_args(Row)}
    names = [name_of(kind) for kind in get_args(e.Event)]
    assert len({*names}) == len(names)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: name_of(type(event)))
def test_every_event_comes_back_from_a_journal_as_it_was(event: e.Event) -> None:
    assert decode_event(encode(event)) == event
    back = decode_event(through_a_journal(event, []).event)
    assert back == event
    assert repr(back) == repr(event)


def test_a_loss_that_is_no_number_comes_back_too() -> None:
    event = STEP.model_copy(update={"loss": math.nan, "grad_norm": -math.inf})
    back = decode_event(through_a_journal(event, []).event)
    assert isinstance(back, m.StepDone)
    assert math.isnan(back.loss)
    assert back.grad_norm == -math.inf


@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: name_of(type(action)))
def test_every_action_is_written_as_plain_values(action: a.Action) -> None:
    """Which a replay compares with what a core decides: once plain, always the same."""
    values = encode(action)
    assert through_a_journal(e.Tick(), [action]).actions == [plain(values)]
    assert plain(plain(values)) == plain(values)
    assert values["type"] == name_of(type(action))


def test_what_a_handoff_is_for_comes_back_from_a_journal() -> None:
    (values,) = through_a_journal(e.Tick(), [BEGINS]).actions
    assert decode_attempt(values) == BEGINS


def test_rows_of_many_are_written_by_column_and_come_back() -> None:
    rows = [WorkerPhaseRecord(1, worker, "n1", "boot", 1.0, math.nan) for worker in range(3)]
    values = encode(a.RecordAll(rows))
    assert (values["table"], values["columns"]["worker"]) == ("worker_phases", [0, 1, 2])
    back = [*rows_of(plain(values))]
    assert back == [plain(encode(a.Record(row)))["row"] for row in rows]
    assert [*rows_of(encode(a.Record(rows[0])))] == [encode(a.Record(rows[0]))["row"]]


def test_a_row_is_written_with_its_table() -> None:
    values = encode(a.Record(NetworkRecord(1, "gloo tcp", "h", "lo")))
    row = {"generation": 1, "transport": "gloo tcp", "hosts": "h", "detail": "lo"}
    assert values == {"type": "record", "table": "networks", "row": row}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"type": "never_heard_of"}, "an event of type 'never_heard_of' is not known"),
        ({}, "an event of type None is not known"),
        ({"type": "worker_gone", "worker": "three", "reason": ""}, "event 'worker_gone': "),
        ({"type": "worker_gone", "worker": 3}, "event 'worker_gone': "),
        ({**encode(STEP), "step": None}, "event 'step_done': "),
        ({"type": "operator_asked", "number": 0, "request": {"type": "status"}}, "operator_asked"),
    ],
)
def test_what_is_no_event_is_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        decode_event(values)
