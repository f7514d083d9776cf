"""The training loop of one worker, across worlds: steps, handoffs, and the ways back."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path

from liver_hpc.checkpoint.parts import restore, save
from liver_hpc.clock import Deadline
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.handoff.beside import Beside
from liver_hpc.handoff.crossing import Crossed, Crossing
from liver_hpc.handoff.prepare import connect_groups, prepare, prepared_message
from liver_hpc.handoff.release import release
from liver_hpc.handoff.session import DEVICE_ENDS_S, HandoffAborted, Session, Target, WorldHalted
from liver_hpc.host.process import quiet_thread
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.snapshot.keeping import Snapshots
from liver_hpc.worker.refilling import Refilling
from liver_hpc.world.context import FAILURES, WorkerContext
from liver_hpc.world.state import WorldState
from liver_hpc.world.world import Flags, StepResult, World

log = logging.getLogger(__name__)


class LeftWorld(LiverError):
    """This worker has no seat in the world that trains now, and has to wait for its Exit."""


class Trainer:
    """Trains the world of the moment, whichever that is.

    The main thread calls `begin` or `join`, then `train`; the control thread calls `open_session`
    and `ask_to_stop`, and sets `proceed`.
    """

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._limits = context.config.limits
        self._world: World | None = None
        # Set while there is a world to hand off from: neither in `begin` nor in a rebuild.
        self._stands = threading.Event()
        self.session: Session | None = None
        self.proceed = threading.Event()
        self._snapshots = Snapshots(context)
        self._halting = -1  # the newest generation that the coordinator wants let go
        self._told_to_halt = threading.Event()
        self._making: World | None = None  # that is not connected, or not filled yet
        self._refilling: Refilling | None = None
        self._stop = threading.Event()
        self._stop_saves_in: Path | None = None
        self._owes_evaluation = False
        self._step_begins_s = 0.0
        self.step = 0

    # ---- the ways in

    def begin(self, message: m.Begin) -> None:
        """Builds the first world and fills it from the seed, or from a checkpoint.

        Collective over its rank map. Raises LeftWorld when it cannot be filled.
        """
        world = self._build(message.rank_map.rank_map(), message.generation)
        if message.checkpoint is not None:
            self._restore(world, Path(message.checkpoint))
            self._owes_evaluation = message.evaluate
        else:
            world.state.initialize(self._context.recipe.initial, self._context.config.train.seed)
            world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))
        self._world, self._making = world, None
        self._stands.set()
        self._step_begins_s = self._context.clock.now_s()

    def _restore(self, world: World, path: Path) -> None:
        """Fills a world from a checkpoint; returns once all its workers hold what was saved."""
        context, limits = self._context, self._limits
        try:
            restored = restore(world, path)
        except FAILURES as error:
            self._fail(world.generation, f"cannot go on from {path}", str(error))
            raise LeftWorld(f"cannot go on from {path}: {error}") from error
        self.step = restored.scalars.step
        context.send(restored)
        limit_s = limits.prepare_s + limits.transfer_s
        if not self.proceed.wait(limit_s):
            raise DeadlineError(f"waited {limit_s:g} s for all workers to restore from {path}")

    def join(self, session: Session) -> bool:
        """Takes a joiner in: PREPARE, then the crossing. False when called off: nothing of it is
        left here, and another attempt may come. Raises LiverError where something is."""
        self._prepare(session)
        crossed = None
        try:
            limit_s = self._limits.prepare_s + self._limits.boundary_s
            session.wait(m.Arm, limit_s, "all workers to be prepared")
            assert session.prepared is not None
            crossed = Crossing(session, session.prepared, None).run(None)
        except HandoffAborted as aborted:
            log.info("%s", aborted)
        if crossed is None:  # and no traceback holds what is let go now
            self._let_go(session)
            return False
        self._arrive(session, crossed, None)
        self._save_if_due(crossed.scalars.step, saved=session.bounded)
        return True

    def _let_go(self, session: Session) -> None:
        """Clears up on a joiner after an attempt that was called off."""
        self._forget(session)
        prepared, session.prepared = session.prepared, None
        if prepared is not None and not prepared.drop():
            raise LiverError(f"generation {session.generation} still writes to its memory here")
        self._context.device.return_free_memory()
        worker, generation = self._context.worker, session.generation
        self._context.send(m.Aborted(worker=worker, generation=generation))

    def ask_to_stop(self, message: m.Stop) -> None:
        """Stops at the next boundary that all workers agree on; saves there if told to."""
        self._stop_saves_in = Path(message.checkpoint) if message.checkpoint else None
        self._stop.set()

    def open_session(self, message: m.Prepare) -> Session:
        """Opens a handoff attempt; a source worker starts PREPARE beside its training thread."""
        session = self.session = Session(message, self._context)
        if session.is_source:
            session.preparing = threading.Thread(  # which may start compilers
                target=self._prepare, args=(session,), name="prepare", daemon=True
            )
            session.preparing.start()
        return session

    def _build(self, rank_map: RankMap, generation: int) -> World:
        context = self._context
        world = World(context.recipe, rank_map, context.worker, generation, context.device)
        self._making = world
        if context.config.handoff.warm_up:
            world.warm_up(again=context.config.handoff.warm_up_again)
        store = context.open_store()
        try:
            connect_groups(context, world, store)
        finally:
            store.close()
        return world

    # ---- a worker is lost

    def refill(self, message: m.Refill) -> None:
        """Builds and fills the world that takes the place of one that has lost a worker. Collective
        over all that have a seat in it, or give a snapshot. Raises LeftWorld where this one has no
        seat, once it has given; whatever else it raises calls for `let_go`."""
        context, generation = self._context, message.generation
        self._refilling = refilling = Refilling(context, message)
        self.proceed.clear()
        self._check_halt()
        rank_map, world = message.rank_map.rank_map(), None
        if context.worker in rank_map.workers:
            world = self._build(rank_map, generation)
        held = self._snapshots.state(
            context.recipe.spec,
            message.saved_generation,
            message.scalars,
            None if world is None else world.state,
        )
        context.send(refilling.run(world, held))
        if world is None:
            raise LeftWorld(f"no seat in {rank_map}")
        limits = self._limits
        limit_s = limits.prepare_s + limits.transfer_s
        if not self.proceed.wait(limit_s):
            raise DeadlineError(f"waited {limit_s:g} s for all workers to fill {rank_map}")
        self._check_halt()
        self.step = message.scalars.step
        self._owes_evaluation = message.evaluate
        self._world, self._making, self._refilling = world, None, None
        self._stands.set()
        self._step_begins_s = context.clock.now_s()

    def halt(self, message: m.Halt) -> None:
        """The coordinator wants a world let go, whatever the training thread does in it; from the
        control thread."""
        self._halting = max(self._halting, message.generation)
        self._told_to_halt.set()
        if self.session is not None:
            self.session.deliver(message)
        quiet_thread(self._break, "halt")  # a backend may take its time

    def _break(self) -> None:
        """Frees the training thread from what it waits for."""
        for world in (self._world, self._making):
            if world is not None:
                world.book.abort(shared=True)
        if self._refilling is not None:
            self._refilling.close()
        self._snapshots.interrupt()
        self.proceed.set()

    def _check_halt(self) -> None:
        if self._refilling is not None and self._halting >= self._refilling.generation:
            raise WorldHalted("another worker was lost meanwhile")

    @property
    def _generation(self) -> int:
        """Of the world that trains, or is to."""
        known = [each.generation for each in (self._world, self._making) if each is not None]
        if self._refilling is not None:
            known.append(self._refilling.generation)
        return max(known, default=-1)

    @property
    def can_let_go(self) -> bool:
        """Whether a failure here may be that of a peer, after which the run goes on."""
        return self._context.config.snapshots.every_steps is not None and self._generation >= 0

    def let_go(self, why: str) -> None:
        """After a failure: waits to be told to halt, and lets the world go; snapshots stay.

        Raises DeadlineError where nobody says so.
        """
        context, generation = self._context, self._generation
        if self._halting < generation:
            context.send(m.Broken(worker=context.worker, generation=generation, reason=why))
        deadline = Deadline.after(context.clock, self._limits.control_s, f"word after {why}")
        while self._halting < generation:
            self._told_to_halt.clear()
            if self._halting < generation and not self._told_to_halt.wait(deadline.remaining_s()):
                raise deadline.error()
        self._break()
        self._snapshots.halt()
        self._clear_all()
        context.send(
            m.Halted(worker=context.worker, generation=generation, held=self._snapshots.held())
        )

    def _clear_all(self) -> None:
        """Frees all that there was of worlds, but what a device may still write to."""
        session, self.session = self.session, None
        self._stands.clear()
        if session is not None:
            if session.preparing is not None:
                session.preparing.join(self._limits.prepare_s)
            if session.prepared is not None:
                session.prepared.drop()
        worlds = {id(world): world for world in (self._world, self._making) if world is not None}
        self._world = self._making = self._refilling = None
        ended = Deadline.after(self._context.clock, DEVICE_ENDS_S, "what was aborted")
        still = False
        try:
            self._context.device.finish(ended)
        except DeadlineError:
            still = True
        except RuntimeError:
            pass  # it failed, and so it has ended
        for world in worlds.values():
            if still:
                world.abandon()
            else:
                world.close()
        self._context.device.return_free_memory()

    # ---- steps

    def train(self) -> None:
        """Trains until the last step, or until all agree to stop. Raises LeftWorld on a leaver.

        A step begins where what the thread did before it ended: what is late between two steps
        makes the second one longer, and is counted.
        """
        clock = self._context.clock
        if self._owes_evaluation:
            self._owes_evaluation = False
            self._evaluate_if_due()
        while self.step < self._context.config.train.steps:
            world = self._world
            assert world is not None, "train without a world"
            started_s = self._step_begins_s
            verifying = self._verify_if_due(world)
            self._snapshots.begin(world, self.step)
            gradients = world.forward_backward(self.step)
            self._verified(world, verifying)
            self._snapshots.taken()
            update = world.update(self.step)
            session = self.session
            ready = session is not None and session.armed.is_set()
            snapshot = self._snapshots.flag(self.step + 1, clock.now_s() - started_s)
            flags = Flags(ready, self._stop.is_set(), *snapshot)
            result = world.agree(gradients, update, flags)
            ended_s = self._step_begins_s = clock.now_s()
            self.step += 1
            self._report(world, result, started_s, ended_s)
            members, boundary = world.rank_map.layout.workers, self.step
            self._snapshots.agreed(result, members)
            saved = False
            if result.stop == members:
                if self._stop_saves_in is not None:
                    self._save(self._stop_saves_in)
                else:
                    self._save_if_due(boundary)
                break  # an evaluation that is due here is done when the run goes on
            ended_s = self._evaluate_if_due() or ended_s
            if result.ready == members and self.step < self._context.config.train.steps:
                assert session is not None
                self._hand_off(session, world, ended_s)
                saved = session.bounded
            elif session is not None and session.aborted is not None:
                self._drop(session)
            self._save_if_due(boundary, saved)
        self._context.send(m.Finished(worker=self._context.worker, step=self.step))

    def _verify_if_due(self, world: World) -> Beside[tuple[m.ClassDigest, ...]] | None:
        """Begins to digest the state where it is due after the steps that are done. Until the next
        update the state stands still."""
        every = self._context.config.train.verify_every_steps
        if every is None or self.step == 0 or self.step % every:
            return None
        world.settle()
        kinds, state = world.recipe.spec.kinds, world.state
        return Beside(
            "verification", lambda: state.digests(kinds, buffers=False), self._context.device
        )

    def _verified(self, world: World, verifying: Beside[tuple[m.ClassDigest, ...]] | None) -> None:
        """Tells the coordinator the digests, before the state changes."""
        if verifying is None:
            return
        context = self._context
        limit_s = context.config.deadlines.collective_s
        deadline = Deadline.after(context.clock, limit_s, "the digests of the state")
        context.send(
            m.Verified(
                worker=context.worker,
                generation=world.generation,
                step=self.step,
                digests=verifying.outcome(deadline),
            )
        )

    def _evaluate_if_due(self) -> float | None:
        """The validation loss of the world that trains, where it is due after the steps that are
        done; returns when that ended, which is when training stands at the boundary."""
        context, world = self._context, self._world
        assert world is not None
        validation = context.config.eval
        batches = range(0) if validation is None else validation.batches_after(self.step)
        if not batches:
            return None
        started_s = context.clock.now_s()
        loss = world.evaluate(batches)
        ended_s = self._step_begins_s = context.clock.now_s()
        if world.rank_map.workers[0] == context.worker:
            context.send(
                m.Evaluated(
                    worker=context.worker,
                    generation=world.generation,
                    step=self.step,
                    loss=loss,
                    batches=len(batches),
                    started_s=started_s,
                    ended_s=ended_s,
                )
            )
        return ended_s

    def _save_if_due(self, since: int, saved: bool = False) -> None:
        """Saves where the run file wants a checkpoint at a boundary from `since` to now. saved:
        whether `since` is saved already, as the way back of a handoff in bounded memory.

        A handoff goes first, as it may have to hurry; so after one there are two boundaries to
        look at, that before it and that after the target's first step.
        """
        every = self._context.config.checkpoint.every_steps
        unsaved = range(since + 1 if saved else since, self.step + 1)
        if every is not None and any(step % every == 0 for step in unsaved):
            self._save(self._context.checkpoints)

    def _save(self, directory: Path) -> None:
        assert self._world is not None
        self._world.settle()
        self._context.send(save(self._world, self.step, directory, self._context.clock))
        self._step_begins_s = self._context.clock.now_s()

    def _report(self, world: World, result: StepResult, started_s: float, ended_s: float) -> None:
        """Rank 0 of the world tells the coordinator of the step just done."""
        context = self._context
        if world.rank_map.workers[0] != context.worker:
            return
        context.send(
            m.StepDone(
                worker=context.worker,
                generation=world.generation,
                step=self.step - 1,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens=context.config.train.global_batch * context.recipe.tokens(),
                started_s=started_s,
                ended_s=ended_s,
            )
        )

    # ---- PREPARE, and dropping it before the boundary

    def _prepare(self, session: Session) -> None:
        """Runs PREPARE in the calling thread, and answers Prepared or Failed."""
        self._context.device.enter()
        try:
            session.prepared = prepare(session, self._source_of(session))
        except (HandoffAborted, WorldHalted) as off:
            log.info("%s, while preparing", off)
        except FAILURES as error:
            if session.aborted is not None or session.halted is not None:
                log.info("generation %d ended while preparing: %s", session.generation, error)
                return
            self._fail(session.generation, "PREPARE failed", f"{type(error).__name__}: {error}")
        else:
            self._context.send(prepared_message(session, session.prepared))

    def _source_of(self, session: Session) -> World | None:
        """Waits for the source world, which may still be built here, at the start or after an
        ABORT. None on a joiner."""
        if not session.is_source:
            return None
        limit_s = self._limits.prepare_s
        if not self._stands.wait(limit_s):
            raise DeadlineError(f"waited {limit_s:g} s for the source world to stand")
        return self._world

    def _drop(self, session: Session) -> None:
        """Clears up, in a thread, after an attempt that was called off before its boundary."""
        self._forget(session)

        def clear_up() -> None:
            self._context.device.enter()
            if session.preparing is not None:
                session.preparing.join(self._limits.prepare_s)
            if session.prepared is not None:
                session.prepared.drop()
            self._context.send(
                m.Aborted(worker=self._context.worker, generation=session.generation)
            )

        quiet_thread(clear_up, "drop")

    def _forget(self, session: Session) -> None:
        """Ends this attempt; the control thread may have opened the next one already."""
        if self.session is session:
            self.session = None

    # ---- the boundary

    def _hand_off(self, session: Session, source: World, ended_s: float) -> None:
        """Crosses to the target world at the agreed boundary, or goes back to this one."""
        assert session.prepared is not None
        session.crosses = True
        if session.bounded:
            self._save(self._context.checkpoints)  # the way back
        else:
            source.settle()
        boundary = m.AtBoundary(
            worker=self._context.worker,
            generation=session.generation,
            scalars=source.scalar_state(self.step),
            last_step_ended_s=ended_s,
        )
        try:
            crossed = Crossing(session, session.prepared, source).run(boundary)
        except HandoffAborted as aborted:
            abort = aborted.abort
        else:
            self._arrive(session, crossed, source)
            return
        self._go_back(session, source, abort)

    def _arrive(self, session: Session, crossed: Crossed, source: World | None) -> None:
        """Makes the committed target world the one that trains, and evaluates where that is due
        after its first step. Raises LeftWorld on a leaver."""
        target = session.prepared
        assert target is not None
        self._world = target.world
        self._stands.set()
        self._forget(session)
        self._step_begins_s = crossed.ended_s
        if self._world is not None:
            self.step = crossed.scalars.step + 1
            assert crossed.first_step is not None
            self._report(self._world, crossed.first_step, crossed.started_s, crossed.ended_s)
        quiet_thread(partial(self._release, session, target, source), "release")
        if self._world is None:
            raise LeftWorld(f"no seat in {session.target}")
        self._evaluate_if_due()

    def _release(self, session: Session, target: Target, source: World | None) -> None:
        """Runs RELEASE in a thread of its own; the coordinator judges a failure."""
        try:
            release(session, target, source)
        except FAILURES as error:
            self._fail(session.generation, "RELEASE failed", f"{type(error).__name__}: {error}")

    def _fail(self, generation: int, what: str, reason: str) -> None:
        """Logs the error of the moment and tells the coordinator."""
        log.exception("generation %d: %s", generation, what)
        worker = self._context.worker
        self._context.send(m.Failed(worker=worker, generation=generation, reason=reason))

    def _go_back(self, session: Session, source: World, abort: m.Abort) -> None:
        """Goes on with the source world after an attempt was called off at the boundary.

        The world is rebuilt where its groups may hold half a collective of the target's first step.
        """
        log.info("generation %d called off at the boundary: %s", session.generation, abort.reason)
        assert session.prepared is not None
        held: WorldState | None = None
        scalars = source.scalar_state(self.step)
        if session.shared_groups:
            # Peers blocked in a shared group go on once nobody holds its connections.
            held = source.abandon()
            self._stands.clear()
            self._world = None
        session.prepared.drop()
        session.prepared = None
        self._context.send(
            m.Aborted(
                worker=self._context.worker,
                generation=session.generation,
                rebuild=held is not None,
            )
        )
        resume: m.Resume = session.wait(
            m.Resume, self._limits.boundary_s + self._limits.control_s, "all workers to go back"
        )
        if held is not None:
            assert resume.rebuild_generation is not None
            self._rebuild(session.source, resume.rebuild_generation, held, scalars)
        self._step_begins_s = self._context.clock.now_s()
        self._forget(session)

    def _rebuild(
        self, rank_map: RankMap, generation: int, held: WorldState, scalars: m.ScalarState
    ) -> None:
        """Builds the source layout again on fresh groups, filled from what this worker holds."""
        world = self._build(rank_map, generation)
        for kind in world.recipe.spec.kinds:
            for index, box in held.boxes(kind):
                world.state.view(kind, index, box).copy_(held.view(kind, index, box))
        log.info("generation %d: rebuilt %s", generation, rank_map)
        world.load_scalar_state(scalars)
        limit_s, clock = self._limits.transfer_s, self._context.clock
        self._context.device.finish(Deadline.after(clock, limit_s, "the state to be copied"))
        held.release()
        self._world, self._making = world, None
        self._stands.set()
