"""What is decided while the journal's disk is slow is performed later, in order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from liver_hpc.cluster.launcher import NotLaunched
from liver_hpc.coordinator.connections import Met
from liver_hpc.errors import MeetingError
from liver_hpc.rendezvous.base import Identity
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.entries import Event
from liver_hpc.run.journal import Written
from tests.fakes import MemoryJournal, tiny_run
from tests.unit.coordinator.live import LIMIT_S, LiveRun
from tests.unit.coordinator.nodes import MAIN, POLICY, burst

pytestmark = pytest.mark.timeout(60)


class SlowJournal(MemoryJournal):
    """From `hold` to `release` nothing gets onto its disk."""

    held = False

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        tell = self._tell
        if self.held:
            self._tell = lambda news: None
        try:
            return super().append(at_s, event, actions, said)
        finally:
            self._tell = tell

    def release(self) -> None:
        self.held = False
        self._tell(Written(len(self._lines) - 1))


def test_an_agent_is_killed_only_where_it_was_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launch waits for the disk, and so does the end of it; then it cannot be launched."""
    monkeypatch.setattr("tests.fakes.MemoryJournal", SlowJournal)
    run = LiveRun(tmp_path, tiny_run(policy=POLICY), MAIN)
    try:
        run.start()
        journal = run.metrics.journal
        assert isinstance(journal, SlowJournal)
        journal.held = True
        run.cluster.pool.grant(burst(3, 2))
        core = run.coordinator.core
        run.until(lambda: not core.handoffs.idle, "the run to grow")

        def fails(*launches: LaunchAgent) -> None:
            raise NotLaunched([each.agent for each in launches], "the node is away")

        monkeypatch.setattr(run.cluster.launcher, "launch", fails)
        run.cluster.pool.warn("burst3", window_s=20.0)
        run.until(lambda: "kill_agent" in str(journal.entries), "the agent to be given up")
        journal.release()
        run.until(lambda: "launch_failed" in str(journal.entries), "the launch to fail")
        assert run.status()["state"] == "training"
        run.until(lambda: not core.agents.ending(), "the agent to be forgotten")
        assert run.status()["state"] == "training"
    finally:
        run.close()
    run.check_replay()


def test_two_agents_of_one_name_that_wait_for_the_disk_are_both_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fakes.MemoryJournal", SlowJournal)
    run = LiveRun(tmp_path, tiny_run())
    try:
        run.start()
        journal = run.metrics.journal
        assert isinstance(journal, SlowJournal)
        journal.held = True
        both = [Met(Identity(agent="a9", host="h", workers=1)) for _ in range(2)]
        for met in both:
            run.coordinator._inbox.put(met)
        run.until(lambda: str(journal.entries).count("turn_away") == 2, "both to be judged")
        journal.release()
        for met in both:
            with pytest.raises(MeetingError, match="agent a9 is not expected"):
                met.answer.result(LIMIT_S)
        assert run.status()["state"] == "training"
    finally:
        run.close()
