"""Stop, resize, replace and scripted notices: granted, queued, merged, refused."""

from __future__ import annotations

import pytest

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from tests.fakes import Fault
from tests.unit.coordinator.live import LIMIT_S, Start, held_in_prepare, let_go

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize("phase", [Phase.BOOT, Phase.PREPARE, Phase.ARMED, Phase.TRANSFER])
def test_a_stop_before_the_commit_cancels_the_handoff(make: Start, phase: Phase) -> None:
    run = make()
    # In ARMED a silent source worker too, or the first AtBoundary would begin TRANSFER.
    held = (0, 1, 2, 3) if phase is Phase.ARMED else (3,)
    for worker in held:
        run.cluster.faults.fail_at(worker, phase, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(phase)
    if phase is Phase.ARMED:
        run.silent(0, 1)
    for worker in (0, 1):
        run.cluster.workers[worker].script.mute = False
    assert run.ask(m.StopRequest()).text == f"stopping after generation 1 ({phase})"
    assert run.outcome().state == "stopped"
    record = run.record(0)
    assert record.outcome == "aborted"
    assert record.detail == f"{phase}: the run is to stop: an operator's request"
    if phase is not Phase.BOOT:
        order = [type(message) for message in run.cluster.workers[0].script.received]
        assert order.index(m.Abort) < order.index(m.Resume) < order.index(m.Stop)


def test_a_stop_after_the_commit_waits_for_the_handoff(make: Start) -> None:
    run = make()
    run.cluster.faults.fail_at(2, Phase.RELEASE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.RELEASE)
    run.silent(2)
    assert run.status()["layout"] == "tp2 pp1 dp2"
    assert run.ask(m.StopRequest()).text == "stopping after generation 1 (RELEASE)"
    assert not run.cluster.got(0, m.Stop)
    joiner = run.cluster.workers[2]
    joiner.script.mute = False
    joiner.say(joiner.script.first_step())
    assert run.outcome().state == "stopped"
    assert run.record(0).detail == ""


def test_requests_during_a_handoff_are_queued_or_merged_and_told_so(make: Start) -> None:
    run = held_in_prepare(make)
    first = run.resize("tp=2")
    assert first.text == (
        "queued: resize to tp2 pp1 dp1 (operator) waits behind generation 1 (PREPARE)"
    )
    merged = run.resize("pp=2")
    assert merged.text == (
        "merged: replaces queued resize to tp2 pp1 dp1 (operator); "
        "resize to tp1 pp2 dp1 (operator) waits behind generation 1 (PREPARE)"
    )
    assert run.ask(m.ReplaceRequest(replace=0)).text.startswith("queued: replace worker 0")
    assert run.ask(m.ReplaceRequest(replace=0)).text.startswith("merged: replaces queued replace")
    assert run.status()["queued"] == [
        "resize to tp1 pp2 dp1 (operator)",
        "replace worker 0 (operator)",
    ]
    let_go(run)
    assert run.record(1).target == "tp1 pp2 dp1"
    run.until(lambda: run.phase() == "IDLE" and not run.status()["queued"], "the queue to empty")
    done = [(r.notice, r.outcome) for r in run.metrics.reconfigurations]
    assert done[0] == ("resize to tp2 pp1 dp2 (operator)", "completed")
    assert done[1] == ("resize to tp1 pp2 dp1 (operator)", "completed")


def test_a_queued_request_that_has_lost_its_point_is_dropped(make: Start) -> None:
    run = held_in_prepare(make)
    assert run.resize("tp=2,dp=2").text.startswith("queued")
    let_go(run)
    run.record(0)
    run.until(lambda: not run.status()["queued"], "the queue to empty")
    assert run.status()["last_event"] == (
        "dropped: resize to tp2 pp1 dp2 (operator): the run already has layout tp2 pp1 dp2"
    )
    assert len(run.metrics.reconfigurations) == 1


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (m.ResizeRequest(layout="dp=3"), "layout tp1 pp1 dp3 is not allowed; allowed are tp1 pp1"),
        (m.ResizeRequest(layout="dp=8"), "wants 8 workers, workers.max is 4; allowed are tp1 pp1"),
        (m.ResizeRequest(layout="dp=two"), "got 'dp=two'"),
        (m.ResizeRequest(layout="dp=0"), "every axis must be at least 1"),
        (m.ResizeRequest(workers=3), "no layout of 3 workers is allowed; allowed are tp1 pp1"),
        (m.ResizeRequest(), "either a layout or a number of workers"),
        (m.ResizeRequest(workers=2, layout="tp=2"), "either a layout or a number of workers"),
        (m.ReplaceRequest(replace=7), "worker 7 does not train; workers are [0, 1]"),
    ],
)
def test_requests_that_are_refused(make: Start, request_: m.FromOperator, wanted: str) -> None:
    run = make()
    reply = run.ask(request_)
    assert not reply.ok
    assert wanted in reply.text
    assert run.status()["handoff"] is None
    assert run.metrics.reconfigurations == []


def test_a_number_of_workers_takes_its_preferred_layout(make: Start) -> None:
    run = make()
    assert run.ask(m.ResizeRequest(workers=4)).text == "started: resize to tp2 pp1 dp2 (operator)"
    assert run.record(0).detail == ""


def test_requests_before_training_begins_wait_for_it(make: Start) -> None:
    run = make(begin=False)
    run.cluster.faults.fail_at(1, Phase.BOOT, Fault.SILENT)
    run.start_only()
    reply = run.resize("tp=2")
    assert (
        reply.text == "queued: resize to tp2 pp1 dp1 (operator) waits behind the start of the run"
    )
    run.until(lambda: 1 in run.cluster.workers, "worker 1 to connect")
    late = run.cluster.workers[1]
    assert late.listening.wait(LIMIT_S)
    late.script.mute = False
    late.channel.send(m.Hello(worker=1, pid=1, host="test", booted_s=0.0))
    assert run.record(0).detail == ""


def test_requests_to_a_run_that_stops_are_refused(make: Start) -> None:
    run = make()
    run.cluster.workers[1].script.mute = True
    run.ask(m.StopRequest())
    reply = run.resize("tp=2")
    assert (reply.ok, reply.text) == (False, "the run is about to end")
    run.cluster.workers[1].say([m.Finished(worker=1, step=0)])
    assert run.outcome().state == "stopped"


def test_scripted_notices_are_granted_in_order(make: Start) -> None:
    notices = [
        {"at_step": 4, "replace": 1},
        {"at_step": 1, "workers": 4},
        {"at_step": 4, "layout": {"dp": 7}},
        {"at_step": 5, "layout": {"tp": 2}},
    ]
    run = make(notices=notices)
    run.cluster.train(2)
    assert run.record(0).notice == "resize to tp2 pp1 dp2 (step 1)"
    run.cluster.train(3)
    assert run.record(1).notice == "replace worker 1 (step 4)"
    run.until(lambda: run.phase() == "IDLE", "the handoff to end")
    run.cluster.train(1)
    assert run.record(2).notice == "resize to tp2 pp1 dp1 (step 5)"
    assert [r.outcome for r in run.metrics.reconfigurations] == ["completed"] * 3


def test_scripted_notices_are_queued_but_never_merged(make: Start) -> None:
    notices = [{"at_step": 0, "layout": {"tp": 2}}, {"at_step": 0, "layout": {"pp": 2}}]
    run = held_in_prepare(make, notices=notices)
    run.cluster.train(1)
    run.until(lambda: len(run.status()["queued"]) == 2, "both notices to be queued")
    let_go(run)
    assert run.record(2).target == "tp1 pp2 dp1"
    assert run.record(1).target == "tp2 pp1 dp1"
