"""The coordinator's small parts: inbox, requests' order, step labels, files, address."""

from __future__ import annotations

import json
import logging
import stat
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.cluster.network import control_address
from liver_hpc.config.schema import NetworkSection
from liver_hpc.coordinator.connections import Asked, Control, Inbox, InboxClosed
from liver_hpc.errors import ConfigError, DeadlineError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.actions import Ended
from liver_hpc.protocol.events import Requested, WorldRef
from liver_hpc.protocol.messages import Reply, StatusRequest, StepDone
from liver_hpc.run.events import EndNear, PoolNote, StopSignalled
from liver_hpc.run.outcome import Outcome, open_log, write_private_json
from liver_hpc.run.recorder import RunRecorder
from liver_hpc.run.requests import OPERATOR, ReconfigurationRequest, RequestQueue
from tests.fakes import tiny_run

DP2, TP2, PP2 = Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)


# ---- inbox


def test_a_question_is_answered_by_the_loop() -> None:
    inbox = Inbox()
    answers: list[Reply] = []
    asking = threading.Thread(
        target=lambda: answers.append(inbox.ask(Asked(StatusRequest()), 10.0))
    )
    asking.start()
    event = inbox.get(10.0)
    assert isinstance(event, Asked)
    event.answer.set_result(Reply(ok=True, text="well"))
    asking.join(10.0)
    assert answers == [Reply(ok=True, text="well")]


def test_a_question_has_a_deadline() -> None:
    with pytest.raises(DeadlineError, match=r"waited 0.01 s for the coordinator's loop"):
        Inbox().ask(Asked(StatusRequest()), 0.01)


def test_questions_to_a_closed_inbox_are_refused_before_and_after() -> None:
    inbox = Inbox()
    early = Asked(StatusRequest())
    inbox.put(early)
    inbox.close()
    assert isinstance(early.answer, Future)
    with pytest.raises(InboxClosed, match="shutting down"):
        early.answer.result(0.0)
    with pytest.raises(InboxClosed, match="shutting down"):
        inbox.ask(Asked(StatusRequest()), 10.0)


def test_a_signal_reaches_each_start_whenever_it_came() -> None:
    """Also one that a start before has heard, too late to mind it."""
    control, inboxes = Control(), (Inbox(), Inbox())
    control.say(StopSignalled("SIGTERM"))
    control.reach(inboxes[0])
    control.say(EndNear("time limit", 0.0, 9.0))
    control.reach(inboxes[1])
    for inbox in inboxes:
        assert inbox.get(0.0) == StopSignalled("SIGTERM")
        assert isinstance(inbox.get(0.0), EndNear)
        assert inbox.empty()


def test_what_is_noted_between_two_starts_is_shown_by_the_next_one() -> None:
    """What a start has closes for a while after its loop has ended."""
    control, inboxes = Control(), (Inbox(), Inbox())
    control.reach(inboxes[0])
    inboxes[0].close()
    control.note("tracking has ended")
    control.reach(inboxes[1])
    assert inboxes[1].get(0.0) == PoolNote("tracking has ended")
    assert inboxes[1].empty()


# ---- requests


def test_only_operators_requests_of_the_same_kind_overtake_each_other() -> None:
    tp2, pp2 = (
        ReconfigurationRequest(OPERATOR, 1.0, layout=TP2),
        ReconfigurationRequest(OPERATOR, 2.0, layout=PP2),
    )
    scripted = ReconfigurationRequest("step 3", 1.0, layout=TP2)
    first, again = (
        ReconfigurationRequest(OPERATOR, 1.0, replace=1),
        ReconfigurationRequest(OPERATOR, 2.0, replace=1),
    )
    other = ReconfigurationRequest(OPERATOR, 2.0, replace=2)
    assert pp2.overtakes(tp2)
    assert again.overtakes(first)
    assert not other.overtakes(first)
    assert not first.overtakes(tp2)
    assert not tp2.overtakes(first)
    assert not pp2.overtakes(scripted)
    assert not scripted.overtakes(scripted)


def test_a_request_that_overtakes_takes_the_place_in_the_queue() -> None:
    config = tiny_run()
    requests = RequestQueue(config, lambda layout: None)
    assert requests.add(ReconfigurationRequest(OPERATOR, 1.0, layout=TP2)) is None
    assert requests.add(ReconfigurationRequest(OPERATOR, 2.0, replace=1)) is None
    assert requests.add(
        ReconfigurationRequest(OPERATOR, 3.0, layout=PP2)
    ) == ReconfigurationRequest(OPERATOR, 1.0, layout=TP2)
    assert requests.waiting == [
        ReconfigurationRequest(OPERATOR, 3.0, layout=PP2),
        ReconfigurationRequest(OPERATOR, 2.0, replace=1),
    ]


def test_notices_are_due_once_and_in_the_order_of_their_steps() -> None:
    config = tiny_run(
        notices=[{"at_step": 5, "workers": 4}, {"at_step": 0, "replace": 1}],
    )
    requests = RequestQueue(config, lambda layout: None)
    assert [notice.at_step for notice in requests.due(0)] == [0]
    assert requests.due(4) == []
    assert [notice.at_step for notice in requests.due(9)] == [5]
    assert requests.due(10) == []


# ---- step labels


def _step(number: int, generation: int, started_s: float) -> StepDone:
    return StepDone(
        worker=0,
        generation=generation,
        step=number,
        loss=1.0,
        grad_norm=1.0,
        learning_rate=0.1,
        tokens=1,
        started_s=started_s,
        ended_s=started_s + 1.0,
    )


def _labels(outcome: str) -> list[str]:
    """Steps around an attempt from 1002 to 1010 that enters its target world at 1006."""
    clock = FakeClock(1000.0)
    recorder = RunRecorder(lambda row: None, clock)
    source = WorldRef(0, RankMap(DP2, (0, 1)))
    labels: list[str] = []

    def step(done: StepDone) -> None:
        labels.append(recorder.step_done(done))

    step(_step(0, 0, 1000.0))
    step(_step(1, 0, 1000.9))
    clock.advance(2.0)
    recorder.attempt_begins(Requested(1, source, RankMap(TP2, (0, 1)), "test"), 1002.0)
    step(_step(2, 0, 1000.95))  # ended before the notice, heard of after it
    step(_step(3, 0, 1001.5))
    step(_step(4, 0, 1003.0))
    target = 1 if outcome == "completed" else 0
    if target:
        step(_step(5, 1, 1006.0))
        step(_step(6, 1, 1007.0))
    clock.advance(8.0)
    world = WorldRef(1, RankMap(TP2, (0, 1))) if target else source
    recorder.attempt_ended(Ended(1, "completed" if target else "aborted", "", world))
    step(_step(7, target, 1009.5))
    step(_step(8, target, 1010.5))
    return labels


def test_steps_of_a_completed_handoff_carry_their_phase() -> None:
    assert _labels("completed") == [
        "first", "", "", "prepare", "prepare", "first", "release", "release", ""
    ]  # fmt: skip


def test_steps_of_an_aborted_handoff_carry_their_phase() -> None:
    assert _labels("aborted") == ["first", "", "", "prepare", "prepare", "prepare", ""]


# ---- files, log, address


def test_private_files_are_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.json"
    path.write_text("old")
    write_private_json(path, {"port": 1})
    assert json.loads(path.read_text()) == {"port": 1}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(TypeError):
        write_private_json(path, {"port": object()})
    assert json.loads(path.read_text()) == {"port": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["coordinator.json"]


def test_the_outcome_file(tmp_path: Path) -> None:
    Outcome("stopped", "SIGTERM", 7).write(tmp_path)
    written = json.loads((tmp_path / "outcome.json").read_text())
    assert written == {"state": "stopped", "reason": "SIGTERM", "step": 7}


def test_log_lines_carry_the_identity_of_the_moment(tmp_path: Path) -> None:
    where = iter(["gen 0", "gen 1 BOOT"])
    handler = open_log(tmp_path / "logs" / "c.log", lambda: next(where))
    log = logging.Logger("test", logging.INFO)
    log.addHandler(handler)
    log.info("one")
    log.info("two")
    handler.close()
    lines = (tmp_path / "logs" / "c.log").read_text().splitlines()
    assert lines[0].endswith("[gen 0] INFO one")
    assert lines[1].endswith("[gen 1 BOOT] INFO two")


def test_a_log_that_cannot_be_written_says_nothing_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Else each line would be a traceback in the job's output, for as long as the disk is full."""
    (tmp_path / "full.log").symlink_to("/dev/full")
    handler = open_log(tmp_path / "full.log", lambda: "gen 0")
    log = logging.Logger("test", logging.INFO)
    log.addHandler(handler)
    log.info("one")
    assert capfd.readouterr() == ("", "")


def test_the_control_address() -> None:
    assert control_address(NetworkSection(), "local") == "127.0.0.1"
    assert control_address(NetworkSection(interface="lo"), "slurm") == "127.0.0.1"
    wanted = r"node .* has no interface 'nowhere0' .* it has lo \(127.0.0.1\)"
    with pytest.raises(ConfigError, match=wanted):
        control_address(NetworkSection(interface="nowhere0"), "slurm")
