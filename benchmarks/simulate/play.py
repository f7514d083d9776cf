"""One handoff in simulated time: the real state machine, and workers that answer after a while.

The coordinator is one server: it takes one message at a time, and each takes the CPU time that
decoding it, the machine, and encoding the answers really took here, and time on its link.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.simulate.timings import Timings, Work
from liver_hpc.clock import FakeClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.tensors import PARAMETER, ModelSpec
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Action, Ended, LaunchJoiners, Send
from liver_hpc.protocol.events import Event, Requested, WorkerLost, WorldRef
from liver_hpc.protocol.machine import HandoffMachine

GENERATION = 2
SMALL_STATE = m.ScalarState(
    step=1000, consumed_samples=1_000_000, optimizer_step=1000, loss_scale=1.0, seed=1234
)


@dataclass(frozen=True)
class ControlLink:
    """Between the coordinator and its workers. send_s: a system call and a thread's wake-up."""

    latency_s: float = 50e-6
    bytes_per_s: float = 12.5e9
    send_s: float = 10e-6


@dataclass(frozen=True)
class Change:
    """A handoff to simulate, and what it asks of workers."""

    model: ModelSpec
    source: RankMap
    target: RankMap
    work: Work
    timings: Timings

    @property
    def joiners(self) -> list[int]:
        known = self.source.coordinate_of
        return [worker for worker in self.target.workers if known(worker) is None]


@dataclass
class Outcome:
    """What came of it. Times in seconds since the notice; control traffic of the coordinator.

    busy_s: CPU of the event loop; longest_s: of its longest single turn.
    """

    completed: bool = False
    detail: str = ""
    last_step_ended_s: float = 0.0
    first_step_started_s: float = 0.0
    first_step_ended_s: float = 0.0
    messages: int = 0
    num_bytes: int = 0
    busy_s: float = 0.0
    longest_s: float = 0.0

    @property
    def pause_s(self) -> float:
        return self.first_step_started_s - self.last_step_ended_s


def play(change: Change, deadlines: DeadlineSection, link: ControlLink) -> Outcome:
    """Simulates one handoff to its end. Raises LiverError when nobody has anything to say."""
    return _Play(change, deadlines, link).run()


class _Play:
    def __init__(self, change: Change, deadlines: DeadlineSection, link: ControlLink) -> None:
        self._change = change
        self._link = link
        self._clock = FakeClock(0.0)
        self._machine = HandoffMachine(deadlines, self._clock)
        self._mail: list[tuple[float, int, Event]] = []
        self._order = itertools.count()
        self._outcome = Outcome()
        self._over = False
        self._free_s = 0.0
        self._answers = _Workers(change)

    def run(self) -> Outcome:
        change = self._change
        world = WorldRef(GENERATION - 1, change.source)
        self._post(0.0, Requested(GENERATION, world, change.target, "simulated"))
        while not self._over:
            if not self._mail:
                raise LiverError(f"nobody has anything to say in {self._machine.phase}")
            arrived_s, _, event = heapq.heappop(self._mail)
            self._take(event, max(arrived_s, self._free_s))
        return self._outcome

    def _post(self, at_s: float, event: Event) -> None:
        heapq.heappush(self._mail, (at_s, next(self._order), event))

    # ---- the coordinator

    def _take(self, event: Event, now_s: float) -> None:
        """One turn of the event loop; it begins when both the event and the loop are there."""
        self._clock.advance(now_s - self._clock.now_s())
        deadline = self._machine.deadline
        if deadline is not None and deadline.expired():
            # What comes after the ABORT is of no interest here.
            self._outcome.detail = f"{self._machine.phase}: {deadline.error()}"
            self._over = True
            return
        data = b""
        if isinstance(event, m.Message):
            data = event.model_dump_json().encode()
            self._outcome.messages += 1
            self._outcome.num_bytes += len(data)
        began_s = time.process_time()
        arrived = m.decode(data) if data else event
        sends: list[tuple[Send, int]] = []
        for action in self._machine.handle(arrived):  # type: ignore[arg-type]  # a worker's
            self._perform(action, now_s, sends)
        cpu_s = time.process_time() - began_s
        self._send(sends, now_s, cpu_s)

    def _perform(self, action: Action, now_s: float, sends: list[tuple[Send, int]]) -> None:
        match action:
            case LaunchJoiners():
                for number, worker in enumerate(self._change.joiners):
                    self._post(now_s + self._change.timings.boot_s, _hello(worker, number))
            case Send():
                sends.append((action, len(m.encode(action.message))))
            case Ended():
                self._over = True
                self._outcome.completed = action.outcome == "completed"
                self._outcome.detail = action.detail or self._outcome.detail

    def _send(self, sends: list[tuple[Send, int]], now_s: float, cpu_s: float) -> None:
        """Messages leave one behind the other; the next turn begins after the last one."""
        link, outcome = self._link, self._outcome
        at_s = now_s + cpu_s
        for send, num_bytes in sends:
            each_s = link.send_s + num_bytes / link.bytes_per_s
            outcome.messages += len(send.workers)
            outcome.num_bytes += num_bytes * len(send.workers)
            last_s = at_s + len(send.workers) * each_s + link.latency_s
            self._note(send.message, last_s)
            for number, worker in enumerate(send.workers, 1):
                arrives_s = at_s + number * each_s + link.latency_s
                for answered_s, answer in self._answers.to(send.message, worker, arrives_s, last_s):
                    self._post(answered_s + link.latency_s, answer)
            at_s += len(send.workers) * each_s
        self._free_s = at_s
        outcome.busy_s += at_s - now_s
        outcome.longest_s = max(outcome.longest_s, at_s - now_s)

    def _note(self, message: m.ToWorker, last_s: float) -> None:
        if isinstance(message, m.Arm):
            self._outcome.last_step_ended_s = self._answers.boundary_s(last_s)
            self._outcome.first_step_started_s = self._answers.arrived_s(last_s)
        elif isinstance(message, m.Verdict):
            self._outcome.first_step_ended_s = last_s


class _Workers:
    """What a worker answers to a message, and when."""

    def __init__(self, change: Change) -> None:
        self._change = change
        receivers = change.target.workers
        peers = [*change.work.traffic.bytes_to.values()][: len(receivers)]
        self._to: dict[int, dict[int, int]] = {}
        self._from: dict[int, list[int]] = defaultdict(list)
        for number, sender in enumerate(change.source.workers):
            chosen = (receivers[(number + 1 + k) % len(receivers)] for k in range(len(peers)))
            self._to[sender] = {
                w: each for w, each in zip(chosen, peers, strict=True) if w != sender
            }
            for receiver in self._to[sender]:
                self._from[receiver].append(sender)
        self._kinds = (PARAMETER, *change.model.optimizer_kinds)

    def boundary_s(self, armed_s: float) -> float:
        """The end of the source's last step, which all reach together, after the last is armed."""
        timings, work = self._change.timings, self._change.work
        return armed_s + timings.boundary_steps * work.source_step_s

    def arrived_s(self, armed_s: float) -> float:
        """When all parameters are there, and the target's first step begins."""
        timings, work = self._change.timings, self._change.work
        return self.boundary_s(armed_s) + timings.cross_s + timings.transfer_s(work)

    def to(
        self, message: m.ToWorker, worker: int, at_s: float, last_s: float
    ) -> list[tuple[float, Event]]:
        """`last_s`: when the last worker gets the same message."""
        timings, work = self._change.timings, self._change.work
        generation = GENERATION
        match message:
            case m.Prepare():
                prepared = m.Prepared(
                    worker=worker, generation=generation, bytes_to=self._to.get(worker, {})
                )
                return [(at_s + timings.prepare_s, prepared)]
            case m.Arm():
                boundary_s = self.boundary_s(last_s)
                # A collective step: none ends before the last has begun.
                voted_s = self.arrived_s(last_s) + timings.first_s(work)
                answers: list[tuple[float, Event]] = [(voted_s, self._vote(worker))]
                if self._change.source.coordinate_of(worker) is not None:
                    stands = m.AtBoundary(
                        worker=worker,
                        generation=generation,
                        scalars=SMALL_STATE,
                        last_step_ended_s=boundary_s,
                    )
                    answers.append((boundary_s, stands))
                return answers
            case m.Verdict() if self._change.target.coordinate_of(worker) is not None:
                return self._done(worker, last_s)
            case m.Exit():
                return [(at_s, WorkerLost(worker, "left"))]
        return []

    def _vote(self, worker: int) -> m.Vote:
        def told(peers: Iterable[int]) -> tuple[m.PairDigests, ...]:
            of = tuple(peers)
            values = "0" * 16 * len(of) * len(self._kinds)
            return (m.PairDigests(kinds=tuple(self._kinds), peers=of, values=values),)

        return m.Vote(
            worker=worker,
            generation=GENERATION,
            ok=True,
            sent=told(self._to.get(worker, ())),
            received=told(self._from.get(worker, ())),
        )

    def _done(self, worker: int, at_s: float) -> list[tuple[float, Event]]:
        stepped = m.FirstStep(worker=worker, generation=GENERATION, started_s=at_s, ended_s=at_s)
        released = m.Released(
            worker=worker,
            generation=GENERATION,
            file_descriptors=100,
            resident_bytes=0,
            released_s=at_s,
        )
        return [(at_s, stepped), (at_s, released)]


def _hello(worker: int, number: int) -> m.Hello:
    return m.Hello(worker=worker, pid=number, host=f"node{number // 8}", booted_s=0.0)
