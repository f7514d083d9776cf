"""What one worker holds of snapshots, and how they are taken beside training.

The state stands still from a step boundary to the next update: in that time it is copied into host
memory. Digests and the way to the partner need no more of training than the CPU. A snapshot is
complete once every worker of the world holds what it should, which all learn by the reduction at a
step's end; only then does the one before go, so that there is a complete one at any moment. Its
memory is that of the next one, also in another world, whose shares have another size.

Where it fails on one of them, all learn that in the same way, and open another exchange at a later
boundary: the first time at the next one that is due, and after each failure in twice as many steps.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError, TransferError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol.messages import HeldSnapshot, ScalarState, Unprotected
from liver_hpc.snapshot.exchange import Exchange
from liver_hpc.snapshot.memory import Snapshot, SnapshotState
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.host_memory import MemoryPool
from liver_hpc.world.state import WorldState
from liver_hpc.world.steps import Flags, StepResult
from liver_hpc.world.store import ControlStore
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

_ENDS_S = 10.0
"""How long the copy of a world's state may take once nobody wants it."""


class _Failures(NamedTuple):
    """Since the newest snapshot of a world; the same on all its workers. again: the boundary from
    which on another one is taken."""

    generation: int
    times: int
    again: int


_NO_FAILURES = _Failures(generation=-1, times=0, again=0)


class Snapshots:
    """All snapshots that this worker holds, whatever the world; used by the training thread."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._wanted = context.config.snapshots.every_steps
        self._every = 1 if self._wanted == "auto" else self._wanted
        self._said_every = 0
        self._complete: list[Snapshot] = []
        self._taking: _Taking | None = None
        self._failures = _NO_FAILURES
        self._memory = MemoryPool(context.device.host_memory)

    def begin(self, world: World, step: int, leaves: bool = False) -> None:
        """At the boundary after `step` steps: begins to take a snapshot, where one is due. Not
        collective; whether it is due is the same on all workers of the world.

        leaves: whether another world does the next step, if all goes well. Then `taken` and
        `keep_pace` are called in that one.
        """
        if self._every is None:
            return
        if world.rank_map.layout.workers == 1 and not leaves:
            self._end_taking()
            self._complete.clear()  # nobody could lose anything but all
            return
        if step < self._failures_of(world.generation).again:
            return
        taking = self._taking
        if taking is None or taking.generation != world.generation:
            self.halt()
            taking = self._taking = _Taking(self._context, self._memory, world, step)
        taking.is_last = leaves
        taking.tell_problem()
        newest = self.newest_step(world.generation)
        if taking.pending or (newest is not None and step - newest < self._every):
            return
        world.renew_untrained()
        # Buffers may change with the next forward, the rest with the update, which waits.
        taking.begin(world.state.standing(), world.scalar_state(step))

    def newest_step(self, generation: int) -> int | None:
        """The newest boundary of a world that is complete on all its workers."""
        own = self._complete[0] if self._complete else None
        if own is None or own.generation != generation or own.scalars is None:
            return None
        return own.scalars.step

    def taken(self) -> None:
        """Returns once the state may change again. Raises DeadlineError."""
        if self._taking is not None:
            self._taking.wait(self._taking.taken, "the state to be copied into host memory")

    def flags(self, step: int, step_s: float) -> Flags:
        """For the end of a step after which `step` are done, and which took `step_s` so far.

        Where the run file wants snapshots every so many steps, and the next one is due, this waits
        for the last one.
        """
        taking = self._taking
        if taking is None or not taking.pending:
            return Flags()
        if self._waits(taking, step):
            taking.wait(taking.done, f"the snapshot of step {taking.step} to be complete")
        if not taking.done.is_set():
            return Flags()
        if taking.failed:
            return Flags(snapshot_failed=bool(taking.problem))
        return Flags(snapshot=True, snapshot_steps=taking.cpu_s / max(step_s, 1e-6))

    def keep_pace(self, step: int) -> None:
        """At the end of the step of another world with which `step` are done: waits where `flags`
        would, so that this step alone can be lost, but not for longer than it takes to find that a
        peer is lost: one that has left is nobody's concern."""
        taking = self._taking
        if taking is not None and taking.pending and self._waits(taking, step):
            taking.done.wait(self._context.config.deadlines.heartbeat_s)

    def _waits(self, taking: _Taking, step: int) -> bool:
        """Whether the next snapshot is due while one is pending, in a run that says how often; not
        for a way to the partner that has failed, and that nothing has crossed since."""
        assert self._every is not None
        due = self._wanted != "auto" and step - taking.step >= self._every
        return due and not self._failures_of(taking.generation).times

    def _failures_of(self, generation: int) -> _Failures:
        return self._failures if self._failures.generation == generation else _NO_FAILURES

    def agreed(self, result: StepResult, members: int) -> None:
        """What all workers know now; the same on all of them."""
        taking = self._taking
        if taking is None or not taking.pending:
            return
        if result.raised.snapshot_failed:
            self._end_taking()  # what it has written may be written still, by a peer that is late
            times = self._failures_of(taking.generation).times + 1
            # Who has just joined knows nothing of how often "auto" has had them taken.
            every = 1 if self._wanted in (None, "auto") else self._wanted
            again = taking.step + every * 2 ** (times - 1)
            self._failures = _Failures(taking.generation, times, again)
            return
        if result.raised.snapshot != members:
            return
        self._failures = _NO_FAILURES
        if self._wanted == "auto":
            took_steps = result.raised.snapshot_steps / members
            self._every = max(1, math.ceil(took_steps / self._context.config.snapshots.cost))
            if self._every != self._said_every:
                log.info("snapshots every %d steps: one takes %.3g", self._every, took_steps)
            self._said_every = self._every
        before, self._complete = self._complete, taking.pending
        taking.pending = []
        if before and before[0].generation == taking.generation:
            taking.spare = before
            self._memory.clear()  # this world has what it needs
        else:
            self._give_back(before)

    def halt(self) -> None:
        """Takes no more in the world that trained; what is complete stays, also if only here."""
        # Others may know already that it is complete, and have let go of the one before.
        self._complete = [*self._end_taking(), *self._complete]

    def _end_taking(self) -> list[Snapshot]:
        """Takes no more in the world that trained; what is complete here, and not known to be so
        everywhere."""
        taking, self._taking = self._taking, None
        if taking is None:
            return []
        taking.close()
        if taking.done.is_set() and not taking.failed:
            self._give_back(taking.spare)
            return taking.pending
        # A peer's bytes may still come into what is a ward's.
        taken = taking.taken.is_set() and not taking.late
        self._give_back(taking.spare + (taking.pending[:1] if taken else []))
        return []

    def _give_back(self, snapshots: Sequence[Snapshot]) -> None:
        for each in snapshots:
            self._memory.give_back(each.chunks_so_far)

    def interrupt(self, generation: int) -> None:
        """From any thread, which may be late, where worlds up to `generation` are about to be let
        go: whoever waits for a snapshot goes on, and nobody is told that it has failed."""
        if (taking := self._taking) is not None and taking.generation <= generation:
            taking.interrupt()

    def held(self) -> tuple[HeldSnapshot, ...]:
        """What the coordinator is to know."""
        return tuple(each.told() for each in self._complete)

    def state(
        self, model: ModelSpec, generation: int, scalars: ScalarState, target: WorldState | None
    ) -> SnapshotState:
        """The state of a world at a boundary, as far as it is held here."""
        found = [
            each
            for each in self._complete
            if each.generation == generation and each.scalars == scalars
        ]
        return SnapshotState(model, found, self._context.device.torch_device, target)


class _Taking(threading.Thread):
    """Takes the snapshots of one world, in a thread and a lane of its own.

    pending: the one that is not known to be complete everywhere, this worker's own first; [] for
    none. spare: memory to be written next. cpu_s: what the last one took, of this thread and of
    those that send and receive. taken, done: events of the pending one, set too where it failed.
    problem: how it did, unless it was to be ended. late: the device may still copy into its memory.
    is_last: whether the world is about to be left: then it matters to nobody that it fails, unless
    the world trains on after all.
    """

    def __init__(self, context: WorkerContext, memory: MemoryPool, world: World, step: int) -> None:
        super().__init__(name="snapshots", daemon=True)
        self.generation = world.generation
        self.pending: list[Snapshot] = []
        self.spare: list[Snapshot] = []
        self.cpu_s = 0.0
        self.failed = self.late = False
        self.problem = ""
        self.is_last = False
        self.taken, self.done = threading.Event(), threading.Event()
        self.taken.set()
        self._context = context
        self._memory = memory
        self._layout = world.rank_map.layout
        self._exchange = Exchange(world.rank_map, context.worker, world.generation, step)
        self._lane = context.device.new_lane()
        self._states: queue.Queue[tuple[WorldState, ScalarState] | None] = queue.Queue()
        self._closed = False
        self._told = False
        self._store: ControlStore | None = None
        self.start()

    @property
    def step(self) -> int:
        """That of the pending one."""
        scalars = self.pending[0].scalars
        assert scalars is not None
        return scalars.step

    def begin(self, state: WorldState, scalars: ScalarState) -> None:
        """Not while one is pending."""
        self.pending, self.spare = self.spare or self._new(), []
        self.pending[0].scalars = scalars
        self.taken.clear()
        self.done.clear()
        self._lane.follow()
        self._states.put((state, scalars))

    def _new(self) -> list[Snapshot]:
        model, layout, take = self._context.recipe.spec, self._layout, self._memory.take
        ranks = (self._exchange.rank, *self._exchange.wards)
        return [Snapshot(model, layout, rank, self.generation, take) for rank in ranks]

    def wait(self, event: threading.Event, waits_for: str) -> None:
        """Raises DeadlineError."""
        deadline = self._deadline(waits_for)
        if not event.wait(deadline.remaining_s()):
            raise deadline.error()

    def _deadline(self, waits_for: str) -> Deadline:
        limit_s = self._context.config.deadlines.collective_s
        return Deadline.after(self._context.clock, limit_s, waits_for)

    def interrupt(self) -> None:
        """Ends what is under way with the peers."""
        self._closed = True
        self._exchange.close()
        if (store := self._store) is not None:
            store.close()

    def close(self) -> None:
        """Ends the thread, whatever it waits for; returns once it reads no world any more. What it
        still gets from a peer goes into memory that nobody else has."""
        self.interrupt()
        self._states.put(None)
        self.taken.wait(_ENDS_S)

    def run(self) -> None:
        self._context.device.enter()
        try:
            while (job := self._states.get()) is not None:
                began_s = self._used_s()
                self._take(*job)
                del job  # and with it the world
                self._send()
                self.cpu_s = self._used_s() - began_s
                self.done.set()
        except Exception as error:  # else nobody would learn that it has failed
            self.failed = True
            if not self._closed:
                level = logging.INFO if self.is_last else logging.ERROR
                where = f"step {self.step} in generation {self.generation}"
                log.log(level, "the snapshot of %s has failed", where, exc_info=True)
                self.problem = f"{type(error).__name__}: {error}"
                self.tell_problem()
                self._exchange.close()  # so that no peer waits for this end
        finally:
            self.taken.set()
            self.done.set()

    def _used_s(self) -> float:
        """Its CPU seconds so far."""
        return time.thread_time() + self._exchange.cpu_s()

    def _take(self, state: WorldState, scalars: ScalarState) -> None:
        for each in self.pending:
            _ = each.chunks  # now, not while the state is read
        if self._closed:
            raise TransferError("nobody wants the snapshot any more")
        with self._lane.entered():
            self.pending[0].take(state, scalars)
        try:
            self._lane.finish(self._deadline("the device to copy the state into host memory"))
        except DeadlineError:
            self.late = True
            self._context.device.park(self.pending[0], self._lane)
            raise
        self.taken.set()

    def _send(self) -> None:
        own, *wards = self.pending
        own.digests = own.digest()
        if not self._exchange.connected:
            store = self._store = self._context.open_store()
            try:
                if self._closed:
                    raise TransferError("the exchange of snapshots is closed")
                # Training may wait for it, and whoever is to be met has the same boundary.
                limit_s = self._context.config.deadlines.heartbeat_s
                self._exchange.connect(self._context.network, store, limit_s)
            finally:
                store.close()
        partner = self._exchange.partner
        self._exchange.swap(own, wards, self._deadline(f"worker {partner} to hold the snapshot"))

    def tell_problem(self) -> None:
        """Tells the coordinator, once, how the snapshot has failed, if that matters."""
        if self.problem and not self.is_last and not self._told:
            self._told = True
            worker, generation, step = self._context.worker, self.generation, self.step
            told = Unprotected(worker=worker, generation=generation, step=step, reason=self.problem)
            self._context.send(told)
