"""The training loop of one worker, across worlds: steps, handoffs, and the ways back."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from liver_hpc.checkpoint.parts import restore
from liver_hpc.checkpoint.saving import YIELDS_S
from liver_hpc.clock import Deadline, poll_until
from liver_hpc.errors import DeadlineError, LiverError, NoRoom, told_of
from liver_hpc.handoff.beside import Beside
from liver_hpc.handoff.crossing import Crossed, Crossing
from liver_hpc.handoff.prepare import prepare, prepared_message
from liver_hpc.handoff.release import release
from liver_hpc.handoff.session import HandoffAborted, Session, Target, WorldHalted
from liver_hpc.host.process import quiet_thread
from liver_hpc.layout.coordinates import RankMap, ids_text
from liver_hpc.layout.memory import worker_bytes
from liver_hpc.layout.ramp import batch_of
from liver_hpc.protocol import messages as m
from liver_hpc.worker.holder import NO_WORLD, LeftWorld, WorldHolder
from liver_hpc.world.context import FAILURES, WorkerContext
from liver_hpc.world.state import WorldState
from liver_hpc.world.steps import StepResult
from liver_hpc.world.untouched import Kept
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

_LOOKS_S = 0.1
"""How often who waits for a world to stand looks whether the attempt has been called off."""


class Trainer(WorldHolder):
    """Trains the world of the moment, whichever that is.

    The main thread calls `begin`, `join` or `refill`, then `train`, and after a failure `let_go`;
    the control thread calls `open_session`, `ask_to_stop` and `halt`, and sets `proceed`.
    """

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self._stop = threading.Event()
        self._stop_saves_in: Path | None = None

    # ---- the ways in

    def begin(self, message: m.Begin) -> None:
        """Builds the first world and fills it from the seed, or from a checkpoint.

        Collective over its rank map. Raises LeftWorld when it cannot be filled.
        """
        world = self._build(message.rank_map.rank_map(), message.generation)
        if message.checkpoint is not None:
            self._restore(world, Path(message.checkpoint), message.weights)
            self._owes_evaluation = message.evaluate
        else:
            world.state.initialize(self._context.recipe.initial, self._context.config.train.seed)
            world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))
        self._saving.start()
        self._stand(world)

    def _restore(self, world: World, path: Path, weights: bool) -> None:
        """Fills a world from a checkpoint; returns once all its workers hold what was saved."""
        context, limits = self._context, self._limits
        try:
            restored = restore(world, path, weights)
        except FAILURES as error:
            log.exception("cannot go on from %s", path)
            worker, generation = context.worker, world.generation
            told = m.NotRestored(worker=worker, generation=generation, reason=str(error))
            context.send(told)
            raise LeftWorld(f"cannot go on from {path}: {error}", generation) from error
        self.step = restored.scalars.step
        context.send(restored)
        limit_s = limits.prepare_s + limits.checkpoint_s
        if not self.proceed.wait(limit_s):
            everybody = f"workers {ids_text(world.rank_map.workers)}"
            raise DeadlineError(f"waited {limit_s:g} s for {everybody} to restore from {path}")

    def join(self, session: Session) -> bool:
        """Takes a joiner in: PREPARE, then the crossing. False when called off: nothing of it is
        left here, and another attempt may come. Raises LiverError where something is."""
        self._tell_ranks(session.target)
        self._prepare(session)
        crossed = None
        try:
            limit_s = self._limits.prepare_s + self._limits.boundary_s
            session.wait(m.Arm, limit_s, f"workers {ids_text(session.members)} to be prepared")
            assert session.prepared is not None
            self._making = session.prepared.world
            crossed = Crossing(session, session.prepared, None, self._snapshots).run(None)
        except HandoffAborted as aborted:
            log.info("%s", aborted)
        if crossed is None:  # and no traceback holds what is let go now
            self._clear_up(session)
            return False
        self._arrive(session, crossed, None)
        self._save_if_due(crossed.scalars.step, saved=session.bounded)
        return True

    def _clear_up(self, session: Session) -> None:
        """Clears up on a joiner after an attempt that was called off."""
        self._forget(session)
        self._making = None
        prepared, session.prepared = session.prepared, None
        if prepared is not None and not prepared.drop():
            raise LiverError(f"generation {session.generation} still writes to its memory here")
        self._context.device.end_beside(session.generation)
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

    # ---- steps

    def train(self) -> None:
        """Trains until this start's last step, or until all agree to stop. Raises LeftWorld on a
        leaver.

        A step begins where what the thread did before it ended: what is late between two steps
        makes the second one longer, and is counted.
        """
        clock = self._context.clock
        if self._owes_evaluation:
            self._owes_evaluation = False
            self._evaluate_if_due()
        if self._owes_checkpoint:
            self._owes_checkpoint = False
            self._save_beside()
        while self.step < self._last:
            world = self._world
            assert world is not None, "train without a world"
            started_s = self._step_begins_s
            with self._verification(world):
                self._snapshots.begin(world, self.step)
                gradients = world.forward_backward(self.step)
            self._snapshots.taken()
            self._saving.taken()
            update = world.update(self.step)
            session = self.session
            ready = (
                session is not None
                and session.armed.is_set()
                and self._saving.lets_cross(session.generation)
            )
            flags = self._snapshots.flags(self.step + 1, clock.now_s() - started_s)
            flags = flags._replace(
                ready=ready, stop=self._stop.is_set(), checkpoint=self._saving.wants()
            )
            result = world.agree(gradients, update, flags)
            self._context.device.step_ended()
            ended_s = self._step_begins_s = clock.now_s()
            self.step += 1
            members, boundary = world.rank_map.layout.workers, self.step
            self._snapshots.agreed(result, members)
            self._report(world, result, started_s, ended_s)
            saved, wanted = False, result.raised.checkpoint == members
            if result.raised.stop == members:
                self._saving.finish(YIELDS_S)
                if self._stop_saves_in is not None:
                    self._save(self._stop_saves_in)
                elif self._is_due(range(boundary, boundary + 1), wanted):
                    self._save(self._context.checkpoints)
                if self.step == self._context.config.train.steps:
                    self._evaluate_if_due()
                break  # else an evaluation that is due here is done when the run goes on
            ended_s = self._evaluate_if_due() or ended_s
            if result.raised.ready == members and self.step < self._last:
                assert session is not None
                self._hand_off(session, world, ended_s)
                saved, wanted = session.bounded, False  # joiners do not know of it
            elif session is not None and session.aborted is not None:
                self._drop(session)
            self._save_if_due(boundary, saved, wanted)
        self._saving.finish(self._limits.boundary_s / 2)
        self._check_halt()  # a peer that is lost while it saves takes what is not saved with it
        self._context.send(m.Finished(worker=self._context.worker, step=self.step))

    @contextlib.contextmanager
    def _verification(self, world: World) -> Iterator[None]:
        """Encloses forward and backward: where it is due after the steps that are done, the state
        is digested meanwhile, and the coordinator told at the end, before it changes."""
        context, every = self._context, self._context.config.train.verify_every_steps
        if every is None or self.step == 0 or self.step % every:
            yield
            return
        world.settle()
        kinds, state = world.recipe.spec.kinds, world.state.standing()
        verifying = Beside("verification", lambda: state.digests(kinds), context.device)
        limit_s = context.config.deadlines.collective_s
        deadline = Deadline.after(context.clock, limit_s, "the digests of the state")
        try:
            yield
        except BaseException:
            verifying.join(deadline.remaining_s())  # the state's memory may be freed next
            raise
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
        self._tell(
            world,
            m.Evaluated(
                worker=context.worker,
                generation=world.generation,
                step=self.step,
                loss=loss,
                batches=len(batches),
                started_s=started_s,
                ended_s=ended_s,
            ),
        )
        return ended_s

    def _save_if_due(self, since: int, saved: bool = False, wanted: bool = False) -> None:
        """Saves where the run file wants a checkpoint at a boundary from `since` to now: beside the
        next step, where there is one. saved: whether `since` is saved already, as the way back of
        a handoff in bounded memory. wanted: by all workers, where they are to choose when.

        A handoff goes first, as it may have to hurry; so after one there are two boundaries to
        look at, that before it and that after the target's first step.
        """
        if not self._is_due(range(since + 1 if saved else since, self.step + 1), wanted):
            return
        if self.step < self._last:
            self._save_beside()
        else:
            self._saving.finish(self._limits.boundary_s / 2)
            self._save(self._context.checkpoints)

    def _is_due(self, unsaved: range, wanted: bool) -> bool:
        every = self._context.config.checkpoint.every_steps
        if every is None:
            return False
        if self._last in unsaved:  # whatever the interval: it is what the run was for
            return True
        return wanted if every == "auto" else any(step % every == 0 for step in unsaved)

    def _save_beside(self) -> None:
        assert self._world is not None
        self._saving.begin(self._world, self.step)
        self._step_begins_s = self._context.clock.now_s()

    def _save(self, directory: Path) -> None:
        assert self._world is not None
        self._saving.now(self._world, self.step, directory, self._check_halt)
        self._step_begins_s = self._context.clock.now_s()

    def _report(self, world: World, result: StepResult, started_s: float, ended_s: float) -> None:
        context = self._context
        self._tell(
            world,
            m.StepDone(
                worker=context.worker,
                generation=world.generation,
                step=self.step - 1,
                loss=result.loss,
                grad_norm=result.grad_norm,
                learning_rate=result.learning_rate,
                tokens=batch_of(context.config.train, self.step - 1) * context.recipe.tokens(),
                started_s=started_s,
                ended_s=ended_s,
                metrics=dict(result.metrics),
                snapshot=self._snapshots.newest_step(world.generation),
            ),
        )

    # ---- PREPARE, and dropping it before the boundary

    def _prepare(self, session: Session) -> None:
        """Runs PREPARE in the calling thread, and answers Prepared or Failed."""
        # The thread that has started this one takes none, nor would a compiler of this one's.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        self._context.device.enter()
        try:
            session.prepared = prepare(session, self._source_of(session))
        except (HandoffAborted, WorldHalted) as off:
            log.info("%s, while preparing", off)
        except FAILURES as error:
            if session.aborted is not None or session.halted is not None:
                log.info("generation %d ended while preparing: %s", session.generation, error)
                return
            no_room = isinstance(error, NoRoom)
            self._fail(session.generation, "PREPARE failed", told_of(error), no_room)
        else:
            self._context.send(prepared_message(session, session.prepared))

    def _source_of(self, session: Session) -> World | None:
        """Waits for the source world, which may still be built here, at the start or after an
        ABORT; where the target is to have memory beside it, also until a step of it has told how
        much there is, in half of PREPARE's time and that of steps. None on a joiner. Raises
        DeadlineError."""
        if not session.is_source:
            return None
        limit_s, clock = self._limits.prepare_s, self._context.clock
        deadline = Deadline.after(clock, limit_s, "the source world to stand")
        while not self._stands.wait(min(_LOOKS_S, deadline.remaining_s())):
            session.check()
            deadline.check()

        def has_told() -> bool:
            session.check()
            return not session.is_target or self._context.device.knows_a_step()

        what = "a step beside which no other world has memory"
        poll_until(has_told, Deadline.after(clock, limit_s / 2 + session.steps_s, what), _LOOKS_S)
        return self._world

    def _drop(self, session: Session) -> None:
        """Clears up, in a thread, after an attempt that was called off before its boundary."""
        self._forget(session)

        def clear_up() -> None:
            self._context.device.enter()
            try:
                if session.preparing is not None:
                    session.preparing.join(self._limits.prepare_s)
                if session.prepared is not None:
                    session.prepared.drop()
                self._context.device.end_beside(session.generation)
            except FAILURES as error:
                what = "what PREPARE made cannot be let go"
                self._fail(session.generation, what, told_of(error))
            else:
                worker, generation = self._context.worker, session.generation
                self._context.send(m.Aborted(worker=worker, generation=generation))

        quiet_thread(clear_up, "drop")

    # ---- the boundary

    def _hand_off(self, session: Session, source: World, ended_s: float) -> None:
        """Crosses to the target world at the agreed boundary, or goes back to this one."""
        assert session.prepared is not None
        if session.bounded:
            self._save(self._context.checkpoints)  # the way back
        else:
            try:
                source.settle()
                self._snapshots.begin(source, self.step, leaves=True)
            except FAILURES:
                abort = self._abort_of_a_peer(session)
                if abort is None:
                    raise
                log.info("the source's parameters were not gathered", exc_info=True)
                self._go_back(session, source, abort)
                return
        session.crosses = True  # until here an Abort leaves the source's groups alone
        boundary = m.AtBoundary(
            worker=self._context.worker,
            generation=session.generation,
            scalars=source.scalar_state(self.step),
            last_step_ended_s=ended_s,
        )
        self._tell_ranks(session.target)  # the target's first step is in the crossing
        try:
            crossed = Crossing(session, session.prepared, source, self._snapshots).run(boundary)
        except HandoffAborted as aborted:
            abort = aborted.abort
        else:
            self._arrive(session, crossed, source)
            return
        self._go_back(session, source, abort)

    def _abort_of_a_peer(self, session: Session) -> m.Abort | None:
        """What has ended a collective of the source's here: an Abort that has reached a peer first,
        which was through it, and has ended the groups that the target has, too."""
        limit_s = self._limits.control_s if session.shared_groups else 0.0
        with contextlib.suppress(DeadlineError):
            poll_until(
                lambda: session.aborted is not None or session.halted is not None,
                Deadline.after(self._context.clock, limit_s, "an Abort"),
            )
        return session.aborted

    def _arrive(self, session: Session, crossed: Crossed, source: World | None) -> None:
        """Makes the committed target world the one that trains, and evaluates where that is due
        after its first step. Raises LeftWorld on a leaver."""
        target = session.prepared
        assert target is not None
        self._world, self._making = target.world, None
        self._context.device.world_begins()
        self._stands.set()
        self._forget(session)
        self._step_begins_s = crossed.ended_s
        if self._world is not None:
            self._last = self._context.config.train.last_step(crossed.scalars.step)
            self.step = crossed.scalars.step + 1
            assert crossed.first_step is not None
            self._report(self._world, crossed.first_step, crossed.started_s, crossed.ended_s)
        self._context.device.drop_workspaces()  # RELEASE returns their memory
        quiet_thread(partial(self._release, session, target, source), "release")
        if self._world is None:
            raise LeftWorld(f"no seat in {session.target}", session.generation)
        self._evaluate_if_due()

    def _release(self, session: Session, target: Target, source: World | None) -> None:
        """Runs RELEASE in a thread of its own; the coordinator judges a failure."""
        try:
            release(session, target, source)
        except FAILURES as error:
            self._fail(session.generation, "RELEASE failed", told_of(error))

    def _fail(self, generation: int, what: str, reason: str, no_room: bool = False) -> None:
        """Logs the error of the moment and tells the coordinator."""
        log.exception("generation %d: %s", generation, what)
        worker = self._context.worker
        failed = m.Failed(worker=worker, generation=generation, reason=reason, no_room=no_room)
        self._context.send(failed)

    def _go_back(self, session: Session, source: World, abort: m.Abort) -> None:
        """Goes on with the source world after an attempt was called off at the boundary.

        The world is rebuilt where its groups may hold half a collective of the target's first step.
        """
        log.info("generation %d called off at the boundary: %s", session.generation, abort.reason)
        self._tell_ranks(session.source)
        assert session.prepared is not None
        held: WorldState | None = None
        scalars = source.scalar_state(self.step)
        if session.shared_groups:
            # Peers blocked in a shared group go on once nobody holds its connections.
            held = source.abandon()
            self._stands.clear()
            self._world, self._abandoned = None, source.generation
        session.end_waits(session.shared_groups)  # which a thread does that may be late
        is_idle = session.prepared.drop()
        session.prepared = None
        self._context.send(
            m.Aborted(
                worker=self._context.worker,
                generation=session.generation,
                rebuild=held is not None,
            )
        )
        limits = session.limits
        # In bounded memory others may write their parts of the checkpoint still.
        writes_s = limits.checkpoint_s if session.bounded else 0.0
        limit_s = limits.boundary_s + writes_s + limits.word_s
        everybody = f"workers {ids_text(session.members)}"
        resume: m.Resume = session.wait(m.Resume, limit_s, f"{everybody} to go back")
        if held is not None:
            assert resume.rebuild_generation is not None
            self._snapshots.taken()  # of what is held
            if is_idle:  # else what still reads it has it as long as it needs
                held = self._with_room_for(session.source, held)
            world = self._build(session.source, resume.rebuild_generation, Kept())
            self._fill(world, held, frees=is_idle)
            world.load_scalar_state(scalars)
            log.info("generation %d: rebuilt %s", world.generation, session.source)
            self._abandoned = NO_WORLD
            self._stand(world)
        self._step_begins_s = self._context.clock.now_s()
        self._forget(session)
        quiet_thread(partial(self._give_back, session.generation), "give back")

    def _give_back(self, generation: int) -> None:
        """What the target had, beside training."""
        self._context.device.enter()
        self._context.device.end_beside(generation)

    def _with_room_for(self, rank_map: RankMap, held: WorldState) -> WorldState:
        """What this worker holds, in host memory where its seat can't be built beside it."""
        context = self._context
        context.device.return_free_memory()
        free_bytes, at = context.device.free_bytes(), rank_map.coordinate_of(context.worker)
        assert at is not None
        wanted_bytes = sum(worker_bytes(context.recipe.spec, rank_map.layout, at).values())
        if free_bytes is None or wanted_bytes <= free_bytes:
            return held
        log.info("the state waits in host memory: %d bytes are free", free_bytes)
        return held.moved_to_host()

    def _fill(self, world: World, held: WorldState, frees: bool) -> None:
        """Gives a world built again what this worker holds. frees: kind of state by kind of state,
        so that memory need not have all of it twice."""
        limit_s, clock = self._limits.transfer_s, self._context.clock
        deadline = Deadline.after(clock, limit_s, "the state to be copied")
        for kind in reversed(held.model.kinds):
            for index, box in held.boxes(kind):
                world.state.view(kind, index, box).copy_(held.view(kind, index, box))
            self._context.device.finish(deadline)
            if frees:
                held.release(kinds=(kind,))
