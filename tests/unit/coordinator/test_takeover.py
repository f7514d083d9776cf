"""A coordinator is gone at any entry of its journal; another one takes over."""

from __future__ import annotations

import base64
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.checkpoint.index import part_key
from liver_hpc.coordinator import main
from liver_hpc.coordinator.loop import Coordinator, new_core
from liver_hpc.coordinator.takeover import Left, _plain, what_is_left
from liver_hpc.errors import ConfigError, DeadlineError, MeetingError
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.channel import ITSELF, ChannelClosed
from liver_hpc.run import codec
from liver_hpc.run.actions import ForgetGeneration
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import Entry, Event, encode, last_start
from liver_hpc.run.epoch import Epoch, NotTakenOver, Superseded, claim_epoch
from liver_hpc.run.events import (
    CheckpointFailed,
    CheckpointWritten,
    LaunchAllowed,
    Node,
    PoolNote,
)
from liver_hpc.run.journal import JournalNews
from tests.fakes import JournalRecords, MemoryJournal, tiny_run
from tests.unit.coordinator.live import LIMIT_S, LiveRun

pytestmark = pytest.mark.timeout(60)

COORDINATOR_S = 20.0


class MortalJournal(MemoryJournal):
    """Goes on with what others have written."""

    def __init__(self, tell: Callable[[JournalNews], None], records: MortalRecords) -> None:
        super().__init__(tell)
        self._lines = records.lines
        self._records = records

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        deadly, before = self._records.deadly
        here = len(self._lines) == deadly
        if here:
            self._records.deadly = (-1, False)
        if here and before:
            raise Superseded(0)
        number = super().append(at_s, event, actions, said)
        if here:
            raise Superseded(0)
        return number


class MortalRecords(JournalRecords):
    """deadly: whoever appends this entry dies, before it is written or after."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[bytes] = []
        self.deadly = (-1, False)

    def open(self, tell: Callable[[JournalNews], None], epoch: Epoch) -> MemoryJournal:
        self.journal = MortalJournal(tell, self)
        return self.journal


class MortalRun(LiveRun):
    """Whose coordinator can be killed, as far as that can be played within a process: nobody hears
    of it but by its connections. deaths: how many were."""

    metrics: MortalRecords
    records = MortalRecords

    def __init__(self, directory: Path, nodes: Sequence[Node] = (), **sections: Any) -> None:
        self.deaths = 0
        self._died_at = 0  # so many entries had been written
        deadlines = {"coordinator_s": COORDINATOR_S, **sections.pop("deadlines", {})}
        config = tiny_run(deadlines=deadlines, **sections)
        super().__init__(directory, config, nodes)
        self.config = config
        self.cluster.directory = RunDirectory(directory)
        self.cluster.coordinator_s = COORDINATOR_S

    def _run(self) -> None:
        while True:
            try:
                self.result = self.coordinator.run()
                return
            except (Superseded, NotTakenOver):
                self.deaths += 1
                self._died_at = len(self.metrics.lines)
                self.coordinator = self.successor()

    def successor(self) -> Coordinator:
        left = what_is_left(self.metrics.entries, lambda: new_core(self.config, self._services))
        assert left is not None
        return self.new_coordinator(self.config, left)

    def die_at(self, entry: int, before: bool) -> None:
        """Whoever is to write this entry, counted from the next one."""
        self.metrics.deadly = (len(self.metrics.lines) + entry, before)

    def kill(self, before: bool = False) -> None:
        """At the next entry; returns once another coordinator has regained everybody."""
        deaths = self.deaths
        self.die_at(0, before)
        self.cluster.train()
        self.until(lambda: self.deaths > deaths, "the coordinator's end")
        self.regained()

    def kill_for_a_while(self) -> threading.Event:
        """At the next entry; no other coordinator begins before the event is set."""
        successor, go_on = self.successor, threading.Event()

        def later() -> Coordinator:
            assert go_on.wait(LIMIT_S)
            return successor()

        self.successor = later  # type: ignore[method-assign]
        self.die_at(0, before=False)
        self.cluster.train()
        self.until(lambda: self.deaths == 1, "the coordinator's end")
        return go_on

    def ask(self, request: m.FromOperator) -> m.Reply:
        """Of whichever coordinator there is."""
        replies: list[m.Reply] = []

        def answered() -> bool:
            try:
                replies.append(super(MortalRun, self).ask(request))
            except (ChannelClosed, DeadlineError):
                self._operator = None
            return bool(replies)

        self.until(answered, "an answer")
        return replies[0]

    def close(self) -> None:
        for agent in [*self.cluster.launcher._agents]:
            self.cluster.launcher.end(agent, 137)
        super().close()

    def regained(self) -> None:
        def is_so() -> bool:
            since = self.metrics.entries[self._died_at :]
            return "regained" in [entry.event["type"] for entry in since]

        self.until(is_so, "another coordinator")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., MortalRun]]:
    runs: list[MortalRun] = []

    def make(**sections: Any) -> MortalRun:
        (tmp_path / str(len(runs))).mkdir()
        run = MortalRun(tmp_path / str(len(runs)), **sections)
        runs.append(run)
        run.start()
        return run

    yield make
    for run in runs:
        run.close()
        run.check_replay()


def steps(run: LiveRun) -> list[int]:
    return [row.step for row in run.metrics.steps]


def reached(run: LiveRun, steps_done: int) -> None:
    run.until(lambda: len(run.metrics.steps) >= steps_done, f"{steps_done} steps")


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_training_goes_on_and_each_step_is_told_once(
    make: Callable[..., MortalRun], before: bool
) -> None:
    run = make()
    run.cluster.train(2)
    run.kill(before)
    run.cluster.train(2)
    run.kill(before)
    reached(run, 6)
    assert steps(run) == [*range(6)]
    assert run.status()["workers"] == [0, 1]
    assert run.ask(m.StopRequest()).ok


def test_what_was_told_of_a_part_of_a_checkpoint_is_known_to_the_next_coordinator(
    make: Callable[..., MortalRun],
) -> None:
    """Rank 0 may have a larger one to write, and asks later."""
    run = make()
    run.cluster.train()
    reached(run, 1)
    scalars = m.ScalarState(step=1, consumed_samples=8, optimizer_step=1, loss_scale=1.0, seed=1234)
    saved = m.Saved(worker=1, generation=0, scalars=scalars)
    run.cluster.workers[1].channel.send(saved)
    run.until(
        lambda: [each for each in run.metrics.entries if each.event["type"] == "saved"], "the part"
    )
    run.kill()
    key = part_key(0, 1, 1)
    assert run.coordinator._store._values[key] == base64.b64encode(b"\n").decode()
    assert run.ask(m.StopRequest()).ok


def test_what_parts_of_checkpoints_came_to_is_not_found_out_again() -> None:
    """One was made of them or given up; or their world has ended."""

    class Core:
        state = None

        def handle(self, event: Any, _at_s: float) -> list[Any]:
            return [ForgetGeneration(0)] if event == LaunchAllowed() else []

    def part(generation: int, step: int) -> m.Saved:
        at = m.ScalarState(
            step=step, consumed_samples=8, optimizer_step=1, loss_scale=1.0, seed=1234
        )
        return m.Saved(worker=1, generation=generation, scalars=at)

    def left_after(event: Any) -> list[int]:
        core: Any = Core()
        told: list[Any] = [part(0, 1), part(0, 2), part(1, 3), event]
        entries = [
            Entry(at, 0.0, _plain(codec.encode(each)), _plain(map(codec.encode, actions)))
            for at, each in enumerate(told)
            for actions in [core.handle(each, 0.0)]
        ]
        left = what_is_left(entries, lambda: core)
        assert left is not None
        return [each.scalars.step for each in left.saved]

    assert left_after(PoolNote("")) == [1, 2, 3]
    assert left_after(CheckpointFailed(2, "no room")) == [1, 3]
    assert left_after(CheckpointWritten(1, "", 0, 0.0, 0)) == [2, 3]
    assert left_after(LaunchAllowed()) == [3]


HANDOFF_ENTRIES = 25
"""About as many as a handoff has."""


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("entry", range(HANDOFF_ENTRIES))
def test_a_handoff_ends_in_one_of_its_worlds_wherever_the_coordinator_dies(
    make: Callable[..., MortalRun], entry: int, before: bool
) -> None:
    """From the operator's request on, which is not forgotten; whoever trains then does so
    together."""
    run = make()
    run.die_at(entry, before)
    run.resize("tp=2,dp=2")

    def is_there() -> bool:
        status = run.status()
        return status["layout"] == "tp2 pp1 dp2" and status["handoff"] is None

    run.until(is_there, "the layout that was asked for")
    if not run.deaths:  # it was over by then
        run.kill(before)
    run.regained()
    run.until(is_there, "the end of the handoff")
    outcomes = [record.outcome for record in run.metrics.reconfigurations]
    assert outcomes in (["completed"], ["aborted", "completed"])
    done = len(run.metrics.steps)
    assert str(run.cluster.world().layout) == "tp2 pp1 dp2"
    run.cluster.train(2)
    reached(run, done + 2)
    assert steps(run) == sorted(set(steps(run)))
    assert run.ask(m.StopRequest()).ok


def test_what_a_journal_lacks_that_could_not_be_written_is_found_at_once(
    make: Callable[..., MortalRun],
) -> None:
    """Workers that were told more would take the next one's orders for old ones."""
    run = make()
    written, successor = len(run.metrics.lines), run.successor

    def of_what_was_written() -> Coordinator:
        del run.metrics.lines[written:]
        return successor()

    run.successor = of_what_was_written  # type: ignore[method-assign]
    run.resize("tp=2,dp=2")
    assert run.record(0).outcome == "completed"
    run.die_at(0, before=False)
    run.cluster.train()
    run.until(lambda: run.result is not None, "the end of the run")
    assert run.result is not None
    assert "workers 0-1 were told more than the journal says" in run.result.reason


def test_what_nodes_were_warned_of_is_known_to_the_next_coordinator(
    make: Callable[..., MortalRun],
) -> None:
    """Else it might grow onto them; and what is not used goes back once more, after agents that
    are adopted have it used."""
    two = (Node("n1", "main", slots=1), Node("n2", "main", slots=1))
    run = make(nodes=two, layouts={1: {}, 2: {"dp": 2}})
    warning = run.cluster.pool.warn("n2", window_s=600.0)
    run.until(lambda: run.cluster.pool.given_back == ["n2"], "the node to be left")
    adopt, back = run.cluster.launcher.adopt, run.cluster.pool.given_back
    before: list[int] = []

    def adopting(*told: Any, **more: Any) -> Any:
        before.append(len(back))
        return adopt(*told, **more)

    run.cluster.launcher.adopt = adopting  # type: ignore[method-assign]
    run.kill()
    held = run.coordinator.core.elastic.nodes["n2"]
    assert (held.warning, held.given_back) == (warning, True)
    assert before
    assert {*before} == {1}
    assert back == ["n2"] * 2
    assert run.status()["layout"] == "tp1 pp1 dp1"


def test_the_agent_of_a_node_that_was_given_back_is_told_to_end_once_more(
    make: Callable[..., MortalRun],
) -> None:
    """The coordinator was killed before it could."""
    two = (Node("n1", "main", slots=1), Node("n2", "main", slots=1))
    run = make(nodes=two, layouts={1: {}, 2: {"dp": 2}})
    run.coordinator._agents.give_back = lambda node: None  # type: ignore[method-assign]
    run.cluster.pool.warn("n2", window_s=600.0)
    run.until(lambda: run.cluster.pool.given_back == ["n2"], "the node to be left")
    assert run.cluster.launcher.alive("a1")
    run.kill()
    run.until(lambda: not run.cluster.launcher.alive("a1"), "the end of its agent")
    assert run.cluster.launcher.alive("a0")


@pytest.mark.parametrize("what", ["rendezvous", "pool"])
def test_one_that_cannot_take_over_leaves_all_to_the_next_one(
    make: Callable[..., MortalRun], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training needs none of what fails."""
    run = make()
    service = getattr(run.cluster, what)
    start, fails = service.start, [MeetingError("waited 30 s for the acceptor")] * 2

    def starts(*arguments: Any) -> None:
        if fails:
            raise fails.pop()
        start(*arguments)

    monkeypatch.setattr(service, "start", starts)
    run.die_at(0, before=False)
    run.cluster.train()
    run.until(lambda: run.deaths == 3, "two that cannot")
    run.regained()
    run.cluster.train(2)
    reached(run, 3)
    assert steps(run) == [*range(3)]
    run.resize("tp=2,dp=2")
    assert run.record(0).outcome == "completed"


def test_a_worker_that_dies_while_there_is_no_coordinator_is_missed(
    make: Callable[..., MortalRun],
) -> None:
    run = make()
    go_on = run.kill_for_a_while()
    run.cluster.workers[1].channel.close()
    run.cluster.launcher.end(run.coordinator.core.agents.agent_of(1), 137)
    go_on.set()
    run.until(lambda: run.result is not None, "the end of the run")
    assert run.result is not None
    assert "lost: it has not called since this coordinator began" in run.result.reason


def test_an_agents_word_is_kept_until_it_is_in_the_journal(
    make: Callable[..., MortalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes nothing when a worker ends, and then the coordinator is gone."""
    monkeypatch.setattr("liver_hpc.coordinator.loop.LED_TO_S", 0.1)
    monkeypatch.setattr("liver_hpc.coordinator.loop.SHOWN_EVERY_S", 0.1)
    run = make()
    line, journal = run.cluster.agents["a0"].line, run.metrics.journal
    kept = line._conversations[ITSELF]._kept
    run.until(lambda: not kept, "what it said before to be safe")
    assert journal is not None
    journal._tell = lambda news: None
    written, successor = len(run.metrics.lines), run.successor
    run.cluster.workers[1].channel.close()
    line.forget(1)
    run.until(lambda: b"worker_gone" in b"".join(run.metrics.lines[written:]), "its end")
    time.sleep(0.5)
    assert [m.decode(data).type for _, data in kept] == ["worker_ended"]

    def of_what_was_written() -> Coordinator:
        del run.metrics.lines[written:]
        return successor()

    run.successor = of_what_was_written  # type: ignore[method-assign]
    began_s = time.monotonic()
    run.die_at(0, before=False)
    run.cluster.train()
    run.until(lambda: run.result is not None, "the end of the run")
    assert time.monotonic() - began_s < COORDINATOR_S / 4
    assert run.result is not None
    assert "worker 1 lost: signal 9; see worker 1's log" in run.result.reason


def test_what_a_worker_said_that_ended_while_there_was_no_coordinator_is_heard(
    make: Callable[..., MortalRun],
) -> None:
    """Else a step that was done, or a checkpoint that is whole on the disk, would not count."""
    run = make()
    reached_before = len(run.metrics.steps)
    go_on = run.kill_for_a_while()
    run.cluster.train(3)
    run.cluster.workers[0].channel.close()
    run.cluster.agents["a0"].line.forget(0)
    go_on.set()
    run.until(lambda: run.result is not None, "the end of the run")
    assert steps(run) == [*range(reached_before + 4)]
    assert run.result is not None
    assert "worker 0 lost: signal 9; see worker 0's log" in run.result.reason


def test_what_a_warning_means_is_asked_again_where_the_answer_may_not_have_come(
    make: Callable[..., MortalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.coordinator.loop.SHOWN_EVERY_S", 0.1)
    run = make(nodes=(Node("n1", "main", slots=2),))
    run.cluster.agents["a0"].say(m.Warned(agent="a0", signal="TERM", at_s=7.0))
    run.until(lambda: run.cluster.pool.signals, "the question")
    time.sleep(0.5)
    run.kill()
    run.until(lambda: run.cluster.pool.signals == [("n1", "SIGTERM")] * 2, "the same question")


def test_a_worker_without_which_its_agent_calls_is_not_waited_for(
    make: Callable[..., MortalRun],
) -> None:
    run = make()
    go_on = run.kill_for_a_while()
    del run.cluster.agents["a0"].line._conversations[1]
    run.cluster.train()
    began_s = time.monotonic()
    go_on.set()
    run.regained()
    assert time.monotonic() - began_s < COORDINATOR_S / 4
    assert b"worker 1 lost: its agent has called without it" in b"".join(run.metrics.lines)


def test_the_lost_coordinators_own_node_is_not_waited_for_to_the_end(
    make: Callable[..., MortalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is gone with it, most likely, and the others stand still meanwhile."""
    monkeypatch.setattr("liver_hpc.coordinator.loop.LOOK_S", 0.2)
    monkeypatch.setattr(Left, "lost_with", lambda left, here: {"a1"})
    two = (Node("n1", "main", slots=1), Node("n2", "main", slots=1))
    run = make(nodes=two, layouts={1: {}, 2: {"dp": 2}}, deadlines={"heartbeat_s": 3.0})
    run.cluster.agents["a1"].line._find = lambda: None  # type: ignore[method-assign]
    began_s = time.monotonic()
    run.kill()
    assert 3.2 < time.monotonic() - began_s < COORDINATOR_S / 2
    run.until(lambda: run.coordinator._performer.outcome is not None, "the run's end")
    assert time.monotonic() - began_s < 3.4 + 2.5  # and not after another silence
    assert run.coordinator._performer.outcome is not None
    assert "worker 1 lost: it has not called" in run.coordinator._performer.outcome.reason


def test_whose_host_was_lost_is_in_the_journal(make: Callable[..., MortalRun]) -> None:
    run = make()
    run.cluster.train()
    left = what_is_left(run.metrics.entries, lambda: new_core(run.config, run._services))
    assert left is not None
    assert left.host == run._services.attributes.get("host", "")
    left.host = "test"  # where the agent is
    assert left.lost_with("test") == set()
    assert left.lost_with("n2") == {"a0"}
    left.host = "n1"
    assert left.lost_with("n2") == set()
    run.kill()
    left = what_is_left(run.metrics.entries, lambda: new_core(run.config, run._services))
    assert left is not None
    assert left.host == socket.gethostname()


def test_nothing_is_launched_by_an_agent_that_has_not_called_for_long(
    make: Callable[..., MortalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make(deadlines={"heartbeat_s": 10.0})
    monkeypatch.setattr(run.coordinator._registry, "away_s", lambda peer: 11.0)
    run.cluster.pool.grant(Node("n2", "main", slots=0))
    run.until(lambda: "a1" in run.cluster.agents, "an agent there")
    run.until(lambda: "a1" in run.coordinator._registry, "it to call")
    line = run.cluster.agents["a1"].line
    run.until(lambda: line._channel is not None, "it to be answered")
    line._find = lambda: None  # type: ignore[method-assign]
    assert line._channel is not None
    line._channel.close()
    run.until(lambda: "a1" in run.coordinator._agents.silent, "it to be missed")


def test_an_older_coordinator_that_wakes_leaves_all_to_the_next_one(
    make: Callable[..., MortalRun],
) -> None:
    run = make()
    awake, journal = run.coordinator, run.metrics.journal
    claim_epoch(run.directory)  # as another one does
    run.until(lambda: run.deaths == 1, "it to notice")
    run.regained()
    assert run.coordinator is not awake
    assert journal is not None
    assert journal._closed
    assert run.cluster.launcher.alive("a0")
    run.cluster.train()
    reached(run, 1)


def test_a_run_goes_on_while_it_is_not_known_whether_there_is_another_coordinator(
    make: Callable[..., MortalRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = make(), list[Path]()

    def stale(directory: Path) -> int:
        asked.append(directory)
        raise OSError(116, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr("liver_hpc.run.epoch.newest_epoch", stale)
        run.until(lambda: asked, "the question")
        run.cluster.train()
        reached(run, 1)
    claim_epoch(run.directory)
    run.until(lambda: run.deaths == 1, "it to notice")


def test_a_core_that_decides_otherwise_takes_nothing_over(make: Callable[..., MortalRun]) -> None:
    run = make()
    run.cluster.train(2)
    reached(run, 2)
    entries = run.metrics.entries
    other = tiny_run(train={"steps": 3, "global_batch": 16})
    did_nothing = [entry._replace(actions=[]) for entry in entries]
    did_more = [entry._replace(actions=entry.actions or [{"type": "note"}]) for entry in entries]
    for written, config in ((did_nothing, other), (did_more, run.config)):
        with pytest.raises(ConfigError, match="wanted"):
            what_is_left(written, lambda config=config: new_core(config, run._services))


def test_a_start_that_has_ended_is_not_taken_over(
    make: Callable[..., MortalRun], tmp_path: Path
) -> None:
    run, journal = make(), tmp_path / "copy.jsonl"
    assert run.ask(m.StopRequest()).ok
    assert run.outcome().state == "stopped"
    journal.write_bytes(b"".join(run.metrics.lines))
    assert what_is_left(last_start(journal), lambda: new_core(run.config, run._services)) is None


@pytest.mark.parametrize(
    ("begun", "is_taken_over"),
    [
        ({}, True),  # by an earlier release
        ({"host": "n1", "job": "77, again"}, True),
        ({"job": "77"}, False),
        ({"job": "77, again", "boot": "2"}, False),
    ],
)
def test_a_start_of_another_job_or_of_before_a_reboot_is_not_taken_over(
    make: Callable[..., MortalRun], tmp_path: Path, begun: dict[str, str], is_taken_over: bool
) -> None:
    run, journal = make(), tmp_path / "copy.jsonl"
    first, *more = run.metrics.entries
    event = first.event | {"attributes": begun}
    lines = [encode(first.number, first.at_s, event, first.actions)]
    lines += [encode(each.number, each.at_s, each.event, each.actions, each.said) for each in more]
    journal.write_bytes(b"".join(lines))
    here = {"job": "77, again", "boot": "1"}
    core = partial(new_core, run.config, run._services)
    assert (main._left(core, here, journal) is not None) == is_taken_over


def test_a_journal_that_is_not_to_be_had_for_a_moment_is_taken_over_from(
    make: Callable[..., MortalRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, journal = make(), tmp_path / "copy.jsonl"
    journal.write_bytes(b"".join(run.metrics.lines))
    stale, opened = [OSError(116, "Stale file handle")] * 2, Path.open
    monkeypatch.setattr(main, "READ_AGAIN_S", 0.0)

    def once(path: Path, *arguments: Any, **more: Any) -> Any:
        if path == journal and stale:
            raise stale.pop()
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", once)
    core = partial(new_core, run.config, run._services)
    left = main._told(journal, partial(main._left, core, {}), LIMIT_S)
    assert left is not None
    assert left.core.world == run.coordinator.core.world
    assert not stale
