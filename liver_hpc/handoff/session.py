"""A worker's end of one handoff attempt: who takes part, and what the coordinator says."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError
from liver_hpc.host.process import all_at_once, quiet_thread
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.messages import (
    Abort,
    Arm,
    Boundary,
    Halt,
    Prepare,
    Resume,
    Verdict,
)
from liver_hpc.transport.stream import Prepared, Transport
from liver_hpc.transport.wire import Wire
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Device
from liver_hpc.world.groups import ENDS_S
from liver_hpc.world.store import ControlStore
from liver_hpc.world.world import World

MOVING_ENDS_S = 10.0
"""How long the thread that moves optimizer state may take to see that its transport is closed."""

SessionMessage = Arm | Boundary | Verdict | Abort | Resume | Halt


class HandoffAborted(LiverError):
    """The coordinator has called this attempt off."""

    def __init__(self, abort: Abort) -> None:
        super().__init__(f"generation {abort.generation} aborted: {abort.reason}")
        self.abort = abort


class WorldHalted(LiverError):
    """The coordinator wants the world that trains let go: a worker of it was lost."""


@dataclass
class Target:
    """What PREPARE made on this worker.

    world: None on a leaver. parts: this worker's moves, by the kinds of state that move together,
    in the order in which they do: parameters, then the optimizer's state, which in bounded memory
    moves kind by kind. moving: the thread that moves optimizer state, once it has been started.
    """

    world: World | None
    parts: dict[tuple[str, ...], Prepared]
    transport: Transport
    device: Device
    kept_groups: int
    timings_s: dict[str, float]
    moving: threading.Thread | None = None

    def drop(self) -> bool:
        """Frees everything, because the attempt is off. Takes up to MOVING_ENDS_S and, where the
        device still computes the target's first step, ABORTED_ENDS_S. False where something may
        still write to the state's memory, which is freed once that has ended."""
        self.transport.close()
        if self.moving is not None:
            self.moving.join(MOVING_ENDS_S)  # its stream ends at its next message
        moves = self.moving is not None and self.moving.is_alive()
        world, self.world = self.world, None
        if world is None:
            return not moves
        computes = not self.device.aborted_has_ended()
        if computes or moves:
            world.abandon(written_to=computes)
            return False
        world.close()
        return True


class Session:
    """The worker's end of one handoff attempt.

    The control thread puts messages in; the thread that runs the handoff takes them out.
    prepared: what PREPARE made, once it is done. preparing: on a source worker, its thread.
    shared_groups: see `Arm`. bounded, steps_s: see `Prepare`. limits: of waits in it. crosses:
    whether this worker has left the source world's steps.
    """

    def __init__(self, prepare: Prepare, context: WorkerContext) -> None:
        self.generation = prepare.generation
        self.source: RankMap = prepare.source.rank_map()
        self.target: RankMap = prepare.target.rank_map()
        self.bounded = prepare.bounded
        self.steps_s = prepare.steps_s
        self.limits = context.config.limits.beside_steps(prepare.steps_s)
        self.context = context
        self.store: ControlStore | None = None
        self.prepared: Target | None = None
        self.preparing: threading.Thread | None = None
        self.armed = threading.Event()
        self.shared_groups = False
        self.crosses = False
        self._ends: list[Callable[[bool], None]] = []
        self.aborted: Abort | None = None
        self.halted: Halt | None = None
        self._inbox: queue.Queue[SessionMessage] = queue.Queue()

    @property
    def is_source(self) -> bool:
        return self.context.worker in self.source.workers

    @property
    def is_target(self) -> bool:
        return self.context.worker in self.target.workers

    @property
    def is_hollow(self) -> bool:
        """Whether this worker's target world gets its memory only as the source's goes."""
        return self.bounded and self.is_source and self.is_target

    @property
    def members(self) -> tuple[int, ...]:
        """All workers that take part, sorted."""
        return tuple(sorted({*self.source.workers, *self.target.workers}))

    def open_store(self) -> ControlStore:
        """Opens this session's store client, which an Abort closes."""
        self.store = self.context.open_store()
        if self.aborted is not None or self.halted is not None:
            self.store.close()
        return self.store

    def call_at_end(self, end: Callable[[bool], None]) -> None:
        """Has `end_waits` call it, with its `shared`; at once where the attempt is off already."""
        self._ends.append(end)
        if self.aborted is not None or self.halted is not None:
            end(False)

    def close_at_end(self, opened: Wire | Transport) -> None:
        """Likewise has it close what this attempt alone has."""
        self.call_at_end(lambda _shared: opened.close())

    def end_waits(self, shared: bool) -> None:
        """Frees this worker from what it waits for in the transfer and in the target world, from
        any thread. shared: also in groups that the source world has, too, because that one will be
        built again. All at once: see `groups.end_all`."""
        all_at_once([partial(end, shared) for end in self._ends], "abort", ENDS_S)

    def deliver(self, message: SessionMessage) -> None:
        """Takes a message for this attempt; called by the control thread."""
        if isinstance(message, Abort | Halt):
            if isinstance(message, Abort):
                self.aborted = message
            else:
                self.halted = message
            self.armed.clear()
            if self.store is not None:
                self.store.close()
            shared = self.shared_groups and self.crosses
            # In a thread: a backend may take its time, and this one listens.
            quiet_thread(partial(self.end_waits, shared), "abort")
        elif isinstance(message, Arm) and self.aborted is None and self.halted is None:
            self.shared_groups = message.shared_groups
            self.armed.set()
        self._inbox.put(message)

    def check(self) -> None:
        """Raises HandoffAborted once the coordinator has called the attempt off, WorldHalted once
        it wants the source world let go, too."""
        if self.halted is not None:
            raise WorldHalted(self.halted.reason)
        if self.aborted is not None:
            raise HandoffAborted(self.aborted)

    def wait(self, wanted: type[Any], limit_s: float, waits_for: str) -> Any:
        """Waits for the next message of a type; raises HandoffAborted, WorldHalted, DeadlineError.

        Drops messages of other types that come before it. An Abort does not end a wait for Resume,
        which follows it.
        """
        deadline = Deadline.after(self.context.clock, limit_s, waits_for)
        while True:
            if self.halted is not None or wanted is not Resume:
                self.check()
            try:
                message = self._inbox.get(timeout=max(deadline.remaining_s(), 0.001))
            except queue.Empty:
                raise deadline.error() from None
            if isinstance(message, wanted) and self.halted is None:
                return message
