"""The world that a worker has, and how it is let go for another one when a peer is lost."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

from liver_hpc.checkpoint.saving import Saving
from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.handoff.prepare import connect_groups
from liver_hpc.handoff.session import Session, WorldHalted
from liver_hpc.host.process import all_at_once, quiet_thread
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.snapshot.keeping import Snapshots
from liver_hpc.worker.ranks import PLACE_VARIABLE, rank_environment
from liver_hpc.worker.refilling import Refilling
from liver_hpc.world import hollow
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.groups import ENDS_S
from liver_hpc.world.store import ControlStore
from liver_hpc.world.untouched import Kept, Untouched
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

_REMEMBERED = 1024
"""So many steps and evaluations, which rank 0 has told of, its world's other workers remember."""


class LeftWorld(LiverError):
    """This worker has no seat in the world of `generation`, which trains now or is about to."""

    def __init__(self, text: str, generation: int) -> None:
        super().__init__(text)
        self.generation = generation


NO_WORLD = -1
"""In the place of a generation."""


class WorldHolder:
    """A worker's world, from its being built to its end by a loss; what is done with it between is
    the trainer's.

    session: the handoff attempt in progress. proceed: set by the control thread once all workers of
    a world that was filled from outside hold what they should; each has its own. step: how many are
    done.
    """

    def __init__(self, context: WorkerContext) -> None:
        self.session: Session | None = None
        self.proceed = threading.Event()
        self.step = 0
        self._last = context.config.train.steps  # how many are done where this start ends
        self._context = context
        self._limits = context.config.limits
        self._snapshots = Snapshots(context)
        self._saving = Saving(context)
        self._world: World | None = None
        # Set while there is a world to hand off from: neither in `begin` nor in a rebuild.
        self._stands = threading.Event()
        self._making: World | None = None  # that is not connected, filled or committed yet
        self._store: ControlStore | None = None  # in which it meets the others
        self._abandoned = NO_WORLD  # the generation of one that is to be built again
        self._kept = Kept()  # memory of what was let go
        self._refilling: Refilling | None = None
        self._halting = NO_WORLD  # the newest generation that the coordinator wants let go
        self._told_to_halt = threading.Event()
        self._owes_evaluation = False
        self._owes_checkpoint = False
        self._done: deque[m.StepDone | m.Evaluated] = deque(maxlen=_REMEMBERED)
        self._step_begins_s = 0.0

    def forward_times(self) -> m.ForwardTimes | None:
        """Of the world that trains, from any thread; None where there is none."""
        world = self._world
        if world is None:
            return None
        passes, seconds = world.forward_times.total
        return m.ForwardTimes(generation=world.generation, passes=passes, seconds=seconds)

    def _tell_ranks(self, rank_map: RankMap) -> None:
        """In the environment, where a user's code reads them, of the world whose steps come next;
        a leaver has none there."""
        context, place = self._context, int(os.environ.get(PLACE_VARIABLE, "0"))
        if context.worker in rank_map.workers:
            slurm = context.config.cluster.kind == "slurm"
            os.environ.update(rank_environment(rank_map, context.worker, place, slurm))

    def _build(self, rank_map: RankMap, generation: int, kept: Kept | None = None) -> World:
        """A connected world. kept: has memory for one that is filled at once, in the place of
        another one; it is not rehearsed, as nothing trains that it could be rehearsed beside."""
        context = self._context
        self._tell_ranks(rank_map)
        seat = (rank_map, context.worker, generation)
        allocating = nullcontext if kept is None else partial(Untouched, kept)
        world = World(context.recipe, *seat, context.device, allocating=allocating)
        self._making = world
        if context.config.handoff.warm_up and kept is None:
            world.warm_up(again=context.config.handoff.warm_up_again)
        with self._meeting() as store:
            connect_groups(context, world, store, check=self._check_halt)
        self._check_halt()
        return world

    @contextmanager
    def _meeting(self) -> Iterator[ControlStore]:
        """A store to meet others in, which a Halt closes. Raises WorldHalted."""
        self._store = store = self._context.open_store()
        try:
            self._check_halt()
            yield store
        finally:
            self._store = None
            store.close()

    def _stand(self, world: World) -> None:
        """What was made is the world that trains next."""
        self._world, self._making = world, None
        self._context.device.world_begins()
        self._last = self._context.config.train.last_step(self.step)
        self._stands.set()
        self._step_begins_s = self._context.clock.now_s()

    def _tell(self, world: World, done: m.StepDone | m.Evaluated) -> None:
        """Rank 0 of the world tells the coordinator of what all of it have just done; the others
        remember it, as what rank 0 says may be lost with it."""
        self._done.append(done)
        if world.rank_map.workers[0] == self._context.worker:
            self._context.send(done)

    def _tell_again(self, message: m.Refill) -> None:
        """What the coordinator has not heard of; what is to be done again is forgotten."""
        stays = [done for done in self._done if done.step < message.scalars.step]
        self._done = deque(stays, maxlen=_REMEMBERED)
        if message.holders[0] == self._context.worker:
            for done in stays:
                if done.step >= message.known:
                    self._context.send(done)

    def _forget(self, session: Session) -> None:
        """Ends this attempt; the control thread may have opened the next one already."""
        if self.session is session:
            self.session = None

    # ---- a peer is lost

    def refill(self, message: m.Refill) -> None:
        """Builds and fills the world that takes the place of one that has lost a worker. Collective
        over all that have a seat in it, or give a snapshot. Raises LeftWorld where this one has no
        seat, once all have what it was to give; whatever else it raises calls for `let_go`."""
        context, generation = self._context, message.generation
        self._refilling = refilling = Refilling(context, message, self._meeting, self._check_halt)
        self.proceed = threading.Event()  # who frees another one, late, sets that one's
        self._check_halt()
        self._tell_again(message)
        rank_map, world = message.rank_map.rank_map(), None
        if context.worker not in (*rank_map.workers, *message.holders):
            raise LeftWorld(f"no seat in {rank_map}", generation)
        if context.worker in rank_map.workers:
            world = self._build(rank_map, generation, self._kept)
        self._kept = Kept()
        held = self._snapshots.state(
            context.recipe.spec,
            message.saved_generation,
            message.scalars,
            None if world is None else world.state,
        )
        context.send(refilling.run(world, held))
        limits = self._limits
        limit_s = limits.prepare_s + limits.transfer_s
        if not self.proceed.wait(limit_s):
            raise DeadlineError(f"waited {limit_s:g} s for all workers to fill {rank_map}")
        self._check_halt()
        refilling.close()
        self._refilling = None
        if world is None:
            raise LeftWorld(f"no seat in {rank_map}", generation)
        self.step = message.scalars.step
        self._owes_evaluation, self._owes_checkpoint = message.evaluate, message.save
        self._stand(world)

    def halt(self, message: m.Halt) -> None:
        """The coordinator wants a world let go, whatever the training thread does in it; from the
        control thread."""
        self._halting = max(self._halting, message.generation)
        if (session := self.session) is not None:
            session.deliver(message)
        self._told_to_halt.set()
        # A backend may take its time.
        quiet_thread(partial(self._break, message.generation), "halt")

    def _break(self, generation: int) -> None:
        """Frees the training thread from what it waits for in worlds up to `generation`: those that
        it has, or is making; all at once: see `groups.end_all`. What it begins to wait for after
        that begins with `_check_halt`."""
        proceed = self.proceed  # first: what comes after it may be of the next one
        making, refilling, store = self._making, self._refilling, self._store
        # In this order: what was being made may have become the world meanwhile.
        ends = [
            partial(world.book.abort, shared=True)
            for world in (making, self._world)
            if world is not None and world.generation <= generation
        ]
        opened = () if self._generation > generation else (store, refilling)
        closes = [each.close for each in opened if each is not None]
        all_at_once([*ends, *closes], "halt", ENDS_S)
        if self._generation > generation:
            return
        self._snapshots.interrupt(generation)
        self._saving.interrupt(generation)
        proceed.set()

    def _check_halt(self) -> None:
        """Raises WorldHalted where the world that is, or is being made, is to be let go."""
        if self._halting >= self._generation:
            raise WorldHalted("another worker was lost meanwhile")

    @property
    def _generation(self) -> int:
        """Of the world that trains, is to, or is to be built again."""
        known = (self._making, self._refilling, self._world)
        return max([self._abandoned, *(each.generation for each in known if each is not None)])

    @property
    def can_let_go(self) -> bool:
        """Whether a failure here may be that of a peer, after which the run goes on."""
        return (
            self._context.config.snapshots.every_steps is not None and self._generation != NO_WORLD
        )

    def let_go(self, why: str) -> None:
        """After a failure: waits to be told to halt, and lets the world go; snapshots stay.

        Raises DeadlineError where nobody says so.
        """
        context, generation = self._context, self._generation
        if self._halting < generation:
            context.send(m.Broken(worker=context.worker, generation=generation, reason=why))
        self._await_halt(generation, self._limits.word_s, f"the coordinator's word after {why}")
        self._break(self._halting)
        self._snapshots.halt()
        self._saving.halt()
        self._clear_all()
        self._tell_held()

    def linger(self, generation: int) -> bool:
        """On a worker that has no seat in the world of `generation`: stays for the snapshots that
        it has, until that world has some itself. True where it is let go instead, and the
        coordinator was told what is held here; False in a run without snapshots. An Exit ends the
        process.

        Raises DeadlineError where neither comes.
        """
        if self._context.config.snapshots.every_steps is None:
            return False
        self._refilling = None
        self._kept = Kept()
        limits = self._limits
        filling_s = limits.prepare_s + limits.transfer_s  # it may stay from its beginning
        limit_s = filling_s + limits.boundary_s + limits.word_s
        self._await_halt(generation, limit_s, f"generation {generation} to have snapshots")
        self._snapshots.halt()
        self._tell_held()
        return True

    def _await_halt(self, generation: int, limit_s: float, waits_for: str) -> None:
        deadline = Deadline.after(self._context.clock, limit_s, waits_for)
        while self._halting < generation:
            self._told_to_halt.clear()
            if self._halting < generation and not self._told_to_halt.wait(deadline.remaining_s()):
                raise deadline.error()

    def _tell_held(self) -> None:
        worker, held = self._context.worker, self._snapshots.held()
        self._context.send(m.Halted(worker=worker, generation=self._halting, held=held))

    def _clear_all(self) -> None:
        """Frees all that there was of worlds, but what a device may still write to; on a CPU the
        next one is to have the memory, on others torch has it."""
        session, self.session = self.session, None
        self._stands.clear()
        if session is not None:
            if (preparing := session.preparing) is not None:
                # Who meets one that is gone comes back at his own deadline, and is not waited for.
                preparing.join(min(self._limits.prepare_s, self._limits.heartbeat_s))
                if preparing.is_alive():
                    log.warning("PREPARE of generation %d has not ended yet", session.generation)
            if session.prepared is not None:
                session.end_waits(shared=True)  # which a thread does that may be late
                if self._making is session.prepared.world:
                    self._making = None
                session.prepared.drop()  # but what is still written to
        worlds = {id(world): world for world in (self._world, self._making) if world is not None}
        self._world = self._making = self._refilling = None
        self._abandoned = NO_WORLD
        device = self._context.device
        if not device.late:
            self._kept = hollow.let_go(worlds.values())
        elif device.aborted_has_ended():
            for world in worlds.values():
                world.close()
        else:
            for world in worlds.values():
                world.abandon(written_to=True)
        if session is None:
            device.return_free_memory()
        else:
            device.end_beside(session.generation)
