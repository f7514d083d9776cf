"""A coordinator in a thread, its scripted cluster, and an operator."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.loop import Coordinator
from liver_hpc.coordinator.performer import Services
from liver_hpc.coordinator.takeover import Left
from liver_hpc.errors import MeetingError
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.base import Identity
from liver_hpc.rendezvous.channel import Channel, connect
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.estimates import HandoffEstimator
from liver_hpc.run.events import CoordinatorStarted, Memory, Node
from liver_hpc.run.machine import Run
from liver_hpc.run.outcome import Outcome
from liver_hpc.run.records import ReconfigurationRecord
from tests.fakes import Fault, JournalRecords, tiny_recipe
from tests.scripted_cluster import ScriptedCluster
from tests.unit.run.replay import differences

SECRET = b"s" * 32
LIMIT_S = 10.0


class LiveRun:
    """A coordinator in a thread, its scripted cluster, and an operator.

    core_was_told_more: the test has put something into the core that its journal knows nothing of.
    """

    records: Callable[[], JournalRecords] = JournalRecords

    def __init__(self, directory: Path, config: RunConfig, nodes: Sequence[Node] = ()) -> None:
        self.directory = directory
        self.cluster = ScriptedCluster(SECRET, nodes or (Node("", "machine"),))
        self.metrics = self.records()
        self.core_was_told_more = False
        self._services = Services(
            clock=SystemClock(),
            recipe=tiny_recipe(config),
            launcher=self.cluster.launcher,
            rendezvous=self.cluster.rendezvous,
            pool=self.cluster.pool,
            open_journal=self.metrics.open,
        )
        self.control = Control()
        self.coordinator = self.new_coordinator(config, Memory())
        self.result: Outcome | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._operator: Channel | None = None

    def new_coordinator(self, config: RunConfig, before: Memory | Left) -> Coordinator:
        epoch = claim_epoch(self.directory)
        return Coordinator(config, epoch, SECRET, self._services, self.control, before)

    def start(self) -> None:
        """Returns once training has begun."""
        self.start_only()
        self.until(lambda: self.status()["state"] == "training", "training to begin")
        workers = self.status()["workers"]
        self.until(lambda: all(self.cluster.got(w, m.Begin) for w in workers), "Begin")

    def start_only(self) -> None:
        self._thread.start()
        where = self.directory / "coordinator.json"
        self.until(lambda: where.exists() or not self._thread.is_alive(), "the control server")

    def _run(self) -> None:
        self.result = self.coordinator.run()

    def until(self, condition: Callable[[], object], waits_for: str) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, waits_for)
        poll_until(lambda: bool(condition()), deadline, 0.002)

    def ask(self, request: m.FromOperator) -> m.Reply:
        if self._operator is None:
            where = json.loads((self.directory / "coordinator.json").read_text())
            address = (where["host"], where["port"])
            self._operator = connect(address, SECRET, LIMIT_S, "the coordinator")
        self._operator.send(request)
        reply = self._operator.receive(LIMIT_S)
        assert isinstance(reply, m.Reply)
        return reply

    def resize(self, layout: str) -> m.Reply:
        return self.ask(m.ResizeRequest(layout=layout))

    def status(self) -> dict[str, Any]:
        return self.ask(m.StatusRequest()).data

    def phase(self) -> str:
        handoff = self.status()["handoff"]
        return handoff["phase"] if handoff else "IDLE"

    def reach(self, phase: Phase) -> None:
        self.until(lambda: self.phase() == phase, f"phase {phase}")

    def silent(self, *workers: int) -> None:
        """Returns once the fault that keeps these workers silent has happened."""
        scripts = [self.cluster.workers[worker].script for worker in workers]
        self.until(lambda: all(script.mute for script in scripts), f"silence of {workers}")

    def record(self, number: int) -> ReconfigurationRecord:
        """The record of the number-th attempt, once it has ended."""
        self.until(lambda: len(self.metrics.reconfigurations) > number, f"attempt {number} to end")
        return self.metrics.reconfigurations[number]

    def outcome(self) -> Outcome:
        """How the run ended; checks that nothing of it is left."""
        self._thread.join(LIMIT_S)
        assert self.result is not None, "the coordinator still runs"
        self.cluster.join(LIMIT_S)
        assert self.metrics.journal is not None
        assert self.metrics.journal._closed
        with pytest.raises(MeetingError):
            self.cluster.rendezvous.meet(Identity(agent="late", host="h", workers=1), SECRET)
        return self.result

    def close(self) -> None:
        if self._operator is not None:
            self._operator.close()
        if self._thread.is_alive():
            for played in self.cluster.workers.values():
                played.channel.close()
            self._thread.join(LIMIT_S)
            assert not self._thread.is_alive(), "the coordinator still runs"
        for agent in self.cluster.agents.values():
            agent.line.close()
        self.cluster.join(LIMIT_S)

    def fail_leaves(self, number: int) -> None:
        """The run believes that so many handoffs away from nodes have failed."""
        self.coordinator.core.elastic.estimates.failed_leaves = number
        self.core_was_told_more = True

    def check_replay(self) -> None:
        """Another core decides the same, given nothing but the journal."""
        if self.core_was_told_more:
            return
        different = [*differences(self.metrics.entries, self._new_core)]
        assert not different, different[0]

    def _new_core(self, event: CoordinatorStarted) -> Run:
        played = self.coordinator.core
        recipe = tiny_recipe(played.config)
        core = Run(played.config, recipe.spec, recipe.check_layout)
        if not isinstance(played.elastic.estimates.handoffs, HandoffEstimator):
            core.elastic.estimates.handoffs = played.elastic.estimates.handoffs
        return core


Start = Callable[..., LiveRun]
"""Makes a run of `tiny_run(**sections)` and by default starts it."""


def held_in_prepare(make: Start, **sections: Any) -> LiveRun:
    run = make(**sections)
    run.cluster.faults.fail_at(2, Phase.PREPARE, Fault.SILENT)
    run.resize("tp=2,dp=2")
    run.reach(Phase.PREPARE)
    run.silent(2)
    return run


def let_go(run: LiveRun) -> None:
    held = run.cluster.workers[2]
    held.script.mute = False
    held.say([m.Prepared(worker=2, generation=1)])
