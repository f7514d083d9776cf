"""A handoff machine, scripted workers, and the mail between them, delivered in a drawn order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from hypothesis import strategies as st

from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Action, Ended, Keep, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Phase
from liver_hpc.protocol.events import (
    DeadlinePassed,
    Event,
    Requested,
    StateSaved,
    WorkerLost,
    WorldRef,
)
from liver_hpc.protocol.machine import HandoffMachine
from tests.fakes import Fault, FaultInjector, WorkerScript

DISK = -1
"""Whose mail tells what became of checkpoints."""
DP2, TP2, PP2, TP2_DP2 = Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1), Layout(2, 1, 2)


def check(machine: HandoffMachine) -> None:
    """What must hold between any two events."""
    now, story = machine.attempt, machine._story()
    assert (machine.phase is Phase.IDLE) == (now is None) == (machine.deadline is None), story
    if now is not None:
        assert {*now.waiting_workers} <= {*now.participants, *now.joiners}, story
        assert (machine.phase is Phase.BOOT) == (now.target is None), story
        assert machine.phase is Phase.BOOT or now.awaited, f"waits for no one; {story}"


@dataclass(frozen=True)
class Change:
    """One kind of handoff: from, to, and the joiners that it needs."""

    source: RankMap
    target: RankMap

    @property
    def joiners(self) -> tuple[int, ...]:
        return tuple(w for w in self.target.workers if w not in self.source.workers)

    @property
    def everybody(self) -> tuple[int, ...]:
        return tuple(sorted({*self.source.workers, *self.target.workers}))


CHANGES = {
    "grow": Change(RankMap(DP2, (0, 1)), RankMap(TP2_DP2, (0, 1, 2, 3))),
    "shrink": Change(RankMap(TP2_DP2, (0, 1, 2, 3)), RankMap(TP2, (0, 2))),
    "same workers": Change(RankMap(DP2, (0, 1)), RankMap(PP2, (1, 0))),
    "replace": Change(RankMap(DP2, (0, 1)), RankMap(DP2, (0, 7))),
    "all new": Change(RankMap(TP2, (0, 1)), RankMap(TP2, (4, 5))),
}
WORKER_PHASES = [Phase.BOOT, Phase.PREPARE, Phase.ARMED, Phase.TRANSFER]

changes = st.sampled_from(sorted(CHANGES)).map(CHANGES.__getitem__)
orders = st.integers(0, 2**32).map(random.Random)


@st.composite
def faults(draw: st.DrawFn, change: Change) -> tuple[int, Phase, Fault]:
    """What goes wrong with a worker, and in which phase."""
    worker = draw(st.sampled_from(change.everybody))
    phase = draw(st.sampled_from([*WORKER_PHASES, Phase.RELEASE]))
    kinds = [Fault.DIE, Fault.FAIL, Fault.SILENT]
    if phase is Phase.TRANSFER:
        kinds += [Fault.VOTE_NO, Fault.WRONG_DIGEST]
    return worker, phase, draw(st.sampled_from(kinds))


@dataclass
class Play:
    """A machine, its scripted workers, and the events that are on their way to it.

    Events of one worker arrive in order; which worker comes next is for the caller to draw.
    bounded: in bounded memory; the checkpoint of the boundary comes from `DISK`, or why there is
    none, which is `disk`. lingers: leavers stay. steps_s: what steps within it may take.
    """

    change: Change
    faults: FaultInjector = field(default_factory=FaultInjector)
    clock: FakeClock = field(default_factory=FakeClock)
    outcome: Ended | None = None
    failed: str = ""
    sent: list[tuple[int, m.ToWorker]] = field(default_factory=list)
    bounded: bool = False
    lingers: bool = False
    steps_s: float = 0.0
    disk: str = ""
    kept: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.machine = HandoffMachine(DeadlineSection(), self.clock)
        self.scripts = {w: WorkerScript(w, self.faults) for w in self.change.everybody}
        self.mail: dict[int, list[Event]] = {w: [] for w in (DISK, *self.change.everybody)}

    def begin(self) -> None:
        source = WorldRef(3, self.change.source)
        target, lingers = self.change.target, self.lingers
        asked = Requested(4, source, target, "test", self.bounded, (), lingers, self.steps_s)
        self.feed(asked)

    def feed(self, event: Event) -> None:
        for action in self.machine.handle(event):
            self._perform(action)
            if isinstance(action, Keep) and isinstance(event, m.Failed | m.Vote):
                assert event.worker not in action.joiners, "kept, and had it called off"
        check(self.machine)

    def _perform(self, action: Action) -> None:
        match action:
            case LaunchJoiners(count=count):
                assert count == len(self.change.joiners)
                for worker in self.change.joiners:
                    self._boot(worker)
            case Send(workers=workers, message=message):
                for worker in workers:
                    self._deliver(worker, message)
            case Keep():
                assert not self.kept
                self.kept = action.joiners
                assert action.aborting == any(self.got(w, m.Abort) for w in self.kept)
            case Ended():
                assert self.outcome is None
                self.outcome = action
                if action.outcome == "failed":
                    self.failed = action.detail

    def _boot(self, worker: int) -> None:
        fault = self.faults.take(worker, Phase.BOOT)
        if fault is None:
            hello = m.Hello(worker=worker, pid=worker, host="h", booted_s=self.clock.now_s())
            self.mail[worker].append(hello)
        elif fault is Fault.DIE:
            self.mail[worker].append(WorkerLost(worker, "killed"))

    def _deliver(self, worker: int, message: m.ToWorker) -> None:
        self.sent.append((worker, message))
        script = self.scripts[worker]
        was_dead = script.dead
        self.mail[worker] += script.receive(message)
        if script.dead and not was_dead:
            self.mail[worker].append(WorkerLost(worker, "its process ended"))
        source = [self.scripts[each] for each in self.change.source.workers]
        if isinstance(message, m.Arm) and all(script.at_boundary for script in source):
            self.mail[DISK] = [StateSaved(source[0].step, self.disk)]

    def pending(self) -> list[int]:
        return [worker for worker, events in self.mail.items() if events]

    def step(self, worker: int) -> None:
        """Delivers a worker's next event, as the coordinator would: nothing of ended attempts."""
        event = self.mail[worker].pop(0)
        waits_for_disk = self.bounded and self.machine.phase in (Phase.ARMED, Phase.TRANSFER)
        if self.outcome is None and (worker != DISK or waits_for_disk):
            self.feed(event)

    def over(self) -> bool:
        return bool(self.failed) or (self.outcome is not None and not self.pending())

    def run(self, rng: random.Random) -> None:
        """To the end, in a drawn order; when nobody has anything to say, time passes."""
        while not self.over():
            waiting = self.pending()
            if waiting:
                self.step(rng.choice(waiting))
            else:
                assert self.machine.deadline is not None
                self.clock.advance(self.machine.deadline.remaining_s())
                self.feed(DeadlinePassed())

    def got(self, worker: int, kind: type[m.Message], **fields: object) -> bool:
        return any(
            to == worker
            and isinstance(message, kind)
            and all(getattr(message, name) == value for name, value in fields.items())
            for to, message in self.sent
        )

    def assert_never_a_mix(self) -> None:
        """Whatever happened, the messages leave one world, and the same for everybody."""
        committed = {w for w in self.change.everybody if self.got(w, m.Verdict)}
        aborted = {w for w in self.change.everybody if self.got(w, m.Abort)}
        assert not committed & aborted
        decisions = [to for to, message in self.sent if isinstance(message, m.Abort)]
        assert len({*decisions}) == len(decisions), "told twice to abort"
        assert committed in (set(), set(self.change.everybody))
        if self.bounded:
            freed = {w for w in self.change.everybody if self.got(w, m.Boundary)}
            assert freed in (set(), set(self.change.everybody))
            assert not freed & aborted, "gone back without the memory of the source"
            assert committed <= freed
            assert not (freed and self.disk), "freed without a way back"
        if self.outcome is None or self.outcome.outcome == "failed":
            assert self.failed
            return
        if self.outcome.outcome == "completed":
            assert committed == set(self.change.everybody)
            assert self.outcome.world == WorldRef(4, self.change.target)
            leavers = set(self.change.source.workers) - set(self.change.target.workers)
            told = {w for w in self.change.everybody if self.got(w, m.Exit)}
            assert told == (set() if self.lingers else leavers)
            assert not self.kept
            return
        assert not committed
        assert self.outcome.world.rank_map == self.change.source
        left = {w for w in self.change.everybody if self.got(w, m.Exit)}
        assert left | {*self.kept} <= set(self.change.joiners)
        assert not left & {*self.kept}
        if aborted:
            assert all(self.got(w, m.Resume) for w in self.change.source.workers)
        else:
            assert not any(self.got(w, m.Prepare) for w in self.change.everybody)
