"""The handoff as a state machine: an event goes in, actions come out; no I/O.

    IDLE -> BOOT -> PREPARE -> ARMED -> TRANSFER -> RELEASE -> IDLE
              |        |          |         |
              +--------+----------+---------+-> ABORT -> IDLE

COMMIT, the verdict on entering RELEASE, is the point of no return: before it any failure leads
back to the source world, after it only forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal

from liver_hpc.clock import Clock, Deadline
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import ProtocolError
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.actions import Action, Ended, Keep, LaunchJoiners, Send
from liver_hpc.protocol.attempt import Attempt, Awaited, Phase
from liver_hpc.protocol.events import (
    Cancelled,
    DeadlinePassed,
    Event,
    FromParticipant,
    Requested,
    StateSaved,
    WorkerLost,
    WorldRef,
)
from liver_hpc.protocol.votes import Side, disagreements, mismatches

HISTORY_EVENTS = 40
EVENT_TEXT_LENGTH = 200
BEFORE_COMMIT = (Phase.BOOT, Phase.PREPARE, Phase.ARMED, Phase.TRANSFER)


class HandoffMachine:
    """Runs one handoff attempt at a time.

    `handle` returns the actions to perform, in order, before the next event is handled. The
    caller sees to it that messages of an attempt that has ended do not come here.

    nodes_of: the numbers of the nodes of those of some workers of which they are known.
    """

    def __init__(
        self,
        deadlines: DeadlineSection,
        clock: Clock,
        nodes_of: Callable[[Iterable[int]], Mapping[int, int]] = lambda workers: {},
    ) -> None:
        self.phase = Phase.IDLE
        self.attempt: Attempt | None = None
        self.deadline: Deadline | None = None
        self._deadlines = deadlines
        self._clock = clock
        self._nodes_of = nodes_of
        self._history: deque[tuple[Phase, Event]] = deque(maxlen=HISTORY_EVENTS)

    def handle(self, event: Event) -> list[Action]:
        """The answer to one event; ProtocolError when the present phase does not allow it."""
        self._history.append((self.phase, event))
        handler = _TABLE.get((self.phase, type(event)))
        if handler is None:
            raise self._unexpected(f"{type(event).__name__} in phase {self.phase}")
        return handler(self, event)

    # ---- BOOT, PREPARE

    def _requested(self, event: Requested) -> list[Action]:
        self.attempt = Attempt(event, joiners=[*event.here])
        self._enter(Phase.BOOT, self._deadlines.boot_s + self._deadlines.meet_s, ())
        missing = len(event.joiners) - len(event.here)
        if not missing:
            return self._prepare()
        return [LaunchJoiners(event.generation, missing, event.target.layout)]

    def _hello(self, event: m.Hello) -> list[Action]:
        now = self._now
        if event.worker in now.joiners or now.trains_in_source(event.worker):
            raise self._unexpected(f"a second Hello of worker {event.worker}")
        now.joiners.append(event.worker)
        return [] if len(now.joiners) < len(now.request.joiners) else self._prepare()

    def _prepare(self) -> list[Action]:
        """Once all joiners have come."""
        now = self._now
        now.target = now.request.target_with(now.joiners, self._nodes_of(now.joiners))
        everybody = now.participants
        # On a device it waits for a step that tells how much room there is.
        limit_s = self._deadlines.prepare_s + now.request.steps_s
        self._enter(Phase.PREPARE, limit_s, ((w, m.Prepared) for w in everybody))
        prepare = m.Prepare(
            generation=now.generation,
            source=m.WireRankMap.of(now.request.source.rank_map),
            source_generation=now.request.source.generation,
            target=m.WireRankMap.of(now.target),
            bounded=now.request.bounded,
            steps_s=now.request.steps_s,
        )
        return [Send(everybody, prepare)]

    def _prepared(self, event: m.Prepared) -> list[Action]:
        now = self._now
        self._take(event)
        now.kept_groups += event.kept_groups
        now.planned[event.worker] = tuple(event.bytes_to)
        if now.awaited:
            return []
        everybody = now.participants
        awaited: list[Awaited] = [(w, m.AtBoundary) for w in now.source_workers]
        awaited += [(w, m.Vote) for w in everybody]
        boundary_s = self._limits_of(now.request).boundary_s
        self._enter(Phase.ARMED, boundary_s + self._writes_s, awaited)
        # In bounded memory the target computes nothing before the point of no return.
        shared = now.kept_groups > 0 and not now.request.bounded
        return [Send(everybody, m.Arm(generation=now.generation, shared_groups=shared))]

    # ---- ARMED, TRANSFER, and the verdict

    def _limits_of(self, request: Requested) -> DeadlineSection:
        return self._deadlines.beside_steps(request.steps_s)

    @property
    def _writes_s(self) -> float:
        """How long a worker of the source may write its part of the way back, at the boundary."""
        return self._deadlines.checkpoint_s if self._now.request.bounded else 0.0

    def _transfer_begins(self, event: m.AtBoundary | m.Vote) -> list[Action]:
        """The first sign that the source stands at the boundary; in bounded memory others may have
        a larger part of the checkpoint to write.

        A Vote may overtake the others' AtBoundary: they come over different connections.
        """
        now = self._now
        transfer_s = self._limits_of(now.request).transfer_s
        self._enter(Phase.TRANSFER, transfer_s + self._writes_s, now.awaited)
        return self._at_boundary(event) if isinstance(event, m.AtBoundary) else self._vote(event)

    def _at_boundary(self, event: m.AtBoundary) -> list[Action]:
        now = self._now
        self._take(event)
        now.scalars[event.worker] = event.scalars
        first = next(iter(now.scalars))
        if now.scalars[first] != event.scalars:
            return self._abort(
                f"workers {first} and {event.worker} stand at different boundaries: "
                f"{now.scalars[first]}, {event.scalars}"
            )
        return self._source_stands()  # its own Vote is still to come

    def _saved(self, event: StateSaved) -> list[Action]:
        """In bounded memory alone; it may come before the first AtBoundary."""
        self._now.saved = event
        return self._source_stands()

    def _source_stands(self) -> list[Action]:
        """Once all of the source stand at the boundary, tells those who have to know where; in
        bounded memory everybody, and not before the checkpoint of that boundary stands, too."""
        now, bounded = self._now, self._now.request.bounded
        scalars = next(iter(now.scalars.values()), None)
        if scalars is None or now.freed:
            return []
        saved = now.saved if now.saved is not None and now.saved.step == scalars.step else None
        if saved is not None and saved.problem:
            return self._abort(f"the way back cannot be written: {saved.problem}")
        if len(now.scalars) < len(now.source_workers) or (bounded and saved is None):
            return []
        told = now.participants if bounded else now.new_workers
        if not told:
            return []
        if bounded:
            now.freed = True
            self._enter(Phase.TRANSFER, self._limits_of(now.request).transfer_s, now.awaited)
        return [Send(told, m.Boundary(generation=now.generation, scalars=scalars))]

    def _vote(self, event: m.Vote) -> list[Action]:
        self._take(event)
        if not event.ok:
            return self._abort(f"worker {event.worker} voted no: {event.reason}", [event.worker])
        self._now.votes[event.worker] = event
        return self._tally()

    def _tally(self) -> list[Action]:
        """Once all have voted: the verdict, or ABORT where any two digests differ."""
        now = self._now
        if now.awaited or now.target is None:
            return []
        specs = {vote.spec: worker for worker, vote in now.votes.items()}
        if len(specs) > 1:
            different = f"workers have different specs of the model: {specs}"
            return self._abort(different, now.joiners)
        if any(vote.source or vote.target for vote in now.votes.values()):
            source, target = now.request.source.rank_map, now.target
            found = disagreements(
                Side("source", source, {w: v.source for w, v in now.votes.items()}),
                Side("target", target, {w: v.target for w, v in now.votes.items()}),
            )
        else:
            found = [*mismatches(now.votes, now.planned)]
            if any(vote.buffers for vote in now.votes.values()):
                held = {w: v.buffers for w, v in now.votes.items()}
                differ = disagreements(Side("source", now.request.source.rank_map, held))
                found += [f"persistent buffers: {each}" for each in differ]
        if found:
            return self._abort("; ".join(["digests differ", *found]), now.joiners)
        return self._commit(next(iter(now.scalars.values())))

    def _commit(self, scalars: m.ScalarState) -> list[Action]:
        now = self._now
        awaited: list[Awaited] = [(w, m.FirstStep) for w in now.target_workers]
        awaited += [(w, m.Released) for w in now.target_workers]
        exiting = () if now.request.lingers else now.leavers
        awaited += [(w, WorkerLost) for w in exiting]
        self._enter(Phase.RELEASE, self._deadlines.release_s, awaited)
        verdict = m.Verdict(generation=now.generation, scalars=scalars)
        actions: list[Action] = [Send(now.participants, verdict)]
        if exiting:
            reason = f"left the run at generation {now.generation}"
            actions.append(Send(exiting, m.Exit(reason=reason)))
        return actions

    # ---- RELEASE

    def _stepped_or_released(self, event: m.FirstStep | m.Released) -> list[Action]:
        """A leaver may say Released on its way out; its end is what may be waited for. Of a worker
        that has finished nothing is waited for any more."""
        now = self._now
        if not now.leaves(event.worker) and event.worker not in now.finished:
            self._take(event)
        return self._complete()

    def _finished_in_release(self, event: m.Finished) -> list[Action]:
        """The first step was the run's last: this process is about to end as a whole."""
        now = self._now
        now.finished.add(event.worker)
        now.awaited = {entry for entry in now.awaited if entry[0] != event.worker}
        return self._complete()

    def _lost_in_release(self, event: WorkerLost) -> list[Action]:
        """After the commit the target is the world, whoever is lost of it."""
        now = self._now
        if not now.leaves(event.worker):
            return self._fatal(f"worker {event.worker} lost after the commit: {event.reason}")
        now.awaited.discard((event.worker, WorkerLost))
        return self._complete()

    def _failed_in_release(self, event: m.Failed) -> list[Action]:
        if self._now.leaves(event.worker):
            return []
        return self._fatal(f"worker {event.worker} failed after the commit: {event.reason}")

    def _complete(self) -> list[Action]:
        now = self._now
        if now.awaited or now.target is None:
            return []
        return self._end("completed", "", WorldRef(now.generation, now.target))

    # ---- failures, and ABORT

    def _failed(self, event: m.Failed) -> list[Action]:
        return self._abort(f"worker {event.worker}: {event.reason}", [event.worker])

    def _cancelled(self, event: Cancelled) -> list[Action]:
        return self._abort(event.reason)

    def _too_late(self, event: DeadlinePassed) -> list[Action]:
        assert self.deadline is not None
        now, limit_s = self._now, self.deadline.limit_s
        # In ARMED they wait for the source's boundary, as we do.
        late = () if self.phase is Phase.ARMED else now.waiting_workers
        return self._abort(f"waited {limit_s:g} s for {now.waits_for()}", late)

    def _too_late_for_good(self, event: DeadlinePassed) -> list[Action]:
        assert self.deadline is not None
        why = f": {self._now.reason}" if self.phase is Phase.ABORT else ""
        return self._fatal(f"waited {self.deadline.limit_s:g} s for {self._now.waits_for()}{why}")

    def _lost(self, event: WorkerLost) -> list[Action]:
        now = self._now
        now.lost.add(event.worker)
        if event.worker in now.source_workers:
            lost = f"worker {event.worker} lost: {event.reason}"
            off = self.phase is Phase.ABORT or now.freed
            return ([] if off else self._drop_target(lost)) + self._fatal(lost)
        if self.phase is Phase.ABORT:
            return []
        return self._abort(f"joiner {event.worker} lost: {event.reason}")

    def _abort(self, reason: str, faulty: Collection[int] = ()) -> list[Action]:
        """Everybody drops the target world; nobody but the source workers is waited for. faulty:
        workers with whom the reason may lie.

        Once the source's memory is given back, the way back is the checkpoint of the boundary.
        """
        now = self._now
        if now.freed:
            return self._fatal(reason)
        actions = self._drop_target(reason, faulty)
        if now.target is None:  # still in BOOT: the source workers were told nothing
            return actions + self._end("aborted", now.reason, now.request.source)
        # A worker that trains answers at its next step boundary, one that writes once it has.
        awaited = ((w, m.Aborted) for w in now.source_workers)
        writes_s = 0.0 if self.phase is Phase.PREPARE else self._writes_s
        boundary_s = self._limits_of(now.request).boundary_s
        self._enter(Phase.ABORT, boundary_s + writes_s, awaited)
        return actions

    def _drop_target(self, reason: str, leave: Collection[int] = ()) -> list[Action]:
        """Abort to all who were told to PREPARE, Exit to the joiners of `leave`; but not to lost
        ones. The other joiners are kept."""
        now = self._now
        now.reason = f"{self.phase}: {reason}"
        actions: list[Action] = []
        told = tuple(w for w in now.participants if w not in now.lost)
        if told:
            abort = m.Abort(generation=now.generation, reason=now.reason)
            actions.append(Send(told, abort))
        joiners = [w for w in now.joiners if w not in now.lost]
        if left := tuple(w for w in joiners if w in leave):
            actions.append(Send(left, m.Exit(reason=now.reason)))
        if kept := tuple(w for w in joiners if w not in leave):
            actions.append(Keep(kept, aborting=bool(told)))
        return actions

    def _aborted(self, event: m.Aborted) -> list[Action]:
        """All source workers stand at the boundary, or none does: all rebuild, or none."""
        now = self._now
        now.rebuild |= event.rebuild
        if now.trains_in_source(event.worker) and event.worker not in now.finished:
            self._take(event)
        return self._resume()

    def _finished_in_abort(self, event: m.Finished) -> list[Action]:
        """It was not at the boundary when the ABORT came, and has reached its last step since."""
        now = self._now
        now.finished.add(event.worker)
        now.awaited.discard((event.worker, m.Aborted))
        return self._resume()

    def _resume(self) -> list[Action]:
        """Once all source workers have let the target go: back to the boundary, or on from it."""
        now = self._now
        if now.awaited:
            return []
        world, rebuild_generation = now.request.source, None
        if now.rebuild:
            rebuild_generation = now.generation + 1
            world = WorldRef(rebuild_generation, world.rank_map)
        resume = m.Resume(generation=now.generation, rebuild_generation=rebuild_generation)
        waiting = tuple(w for w in now.source_workers if w not in now.finished)
        actions: list[Action] = [Send(waiting, resume)] if waiting else []
        return actions + self._end("aborted", now.reason, world)

    def _finished(self, event: m.Finished) -> list[Action]:
        """The source trained its last step before the target stood: nobody has to resume."""
        now = self._now
        actions = self._drop_target("the run reached its end", now.joiners)
        return actions + self._end("aborted", now.reason, now.request.source)

    def _fatal(self, reason: str) -> list[Action]:
        """With the world that everybody is in: after the commit that is the target."""
        now, world = self._now, self._now.request.source
        if self.phase is Phase.RELEASE and now.target is not None:
            world = WorldRef(now.generation, now.target)
        return self._end("failed", f"{self.phase}: {reason}", world)

    def _ignored(self, event: Event) -> list[Action]:
        """Too late to matter, or sent before its sender had heard of the ABORT."""
        return []

    # ---- bookkeeping

    @property
    def _now(self) -> Attempt:
        assert self.attempt is not None
        return self.attempt

    def _enter(self, phase: Phase, limit_s: float, awaited: Iterable[Awaited]) -> None:
        self.phase = phase
        self.deadline = Deadline.after(self._clock, limit_s, f"the end of {phase}")
        self._now.awaited = set(awaited)

    def _take(self, event: FromParticipant) -> None:
        """Checks a message off; ProtocolError when it is not the one that is waited for."""
        now = self._now
        generation = getattr(event, "generation", now.generation)
        if generation != now.generation:
            raise self._unexpected(f"a message of generation {generation}")
        entry = (event.worker, type(event))
        if entry not in now.awaited:
            name = type(event).__name__
            raise self._unexpected(f"{name} of worker {event.worker}, wanted {now.waits_for()}")
        now.awaited.discard(entry)

    def _end(
        self, outcome: Literal["completed", "aborted", "failed"], detail: str, world: WorldRef
    ) -> list[Action]:
        generation = self._now.generation
        self.phase, self.attempt, self.deadline = Phase.IDLE, None, None
        return [Ended(generation, outcome, detail, world)]

    def _unexpected(self, what: str) -> ProtocolError:
        return ProtocolError(f"handoff: unexpected {what}; {self._story()}")

    def _story(self) -> str:
        told = (f"{phase}: {str(event)[:EVENT_TEXT_LENGTH]!r}" for phase, event in self._history)
        return "events so far: " + " | ".join(told)


Handler = Callable[[HandoffMachine, Any], list[Action]]

_H = HandoffMachine
_TABLE: dict[tuple[Phase, type], Handler] = {
    (Phase.IDLE, Requested): _H._requested,
    (Phase.IDLE, m.Finished): _H._ignored,
    (Phase.BOOT, m.Hello): _H._hello,
    (Phase.BOOT, m.Finished): _H._finished,
    (Phase.PREPARE, m.Prepared): _H._prepared,
    (Phase.PREPARE, m.Finished): _H._finished,
    (Phase.ARMED, m.AtBoundary): _H._transfer_begins,
    (Phase.ARMED, m.Vote): _H._transfer_begins,
    (Phase.ARMED, m.Finished): _H._finished,
    (Phase.ARMED, StateSaved): _H._saved,
    (Phase.TRANSFER, StateSaved): _H._saved,
    (Phase.TRANSFER, m.AtBoundary): _H._at_boundary,
    (Phase.TRANSFER, m.Vote): _H._vote,
    (Phase.RELEASE, m.FirstStep): _H._stepped_or_released,
    (Phase.RELEASE, m.Released): _H._stepped_or_released,
    (Phase.RELEASE, m.Finished): _H._finished_in_release,
    (Phase.RELEASE, m.Failed): _H._failed_in_release,
    (Phase.RELEASE, WorkerLost): _H._lost_in_release,
    (Phase.RELEASE, Cancelled): _H._ignored,
    (Phase.RELEASE, DeadlinePassed): _H._too_late_for_good,
    (Phase.ABORT, m.Aborted): _H._aborted,
    (Phase.ABORT, m.Prepared): _H._ignored,
    (Phase.ABORT, m.AtBoundary): _H._ignored,
    (Phase.ABORT, m.Vote): _H._ignored,
    (Phase.ABORT, m.Failed): _H._ignored,
    (Phase.ABORT, m.Finished): _H._finished_in_abort,
    (Phase.ABORT, WorkerLost): _H._lost,
    (Phase.ABORT, Cancelled): _H._ignored,
    (Phase.ABORT, DeadlinePassed): _H._too_late_for_good,
    **{(phase, m.Failed): _H._failed for phase in BEFORE_COMMIT},
    **{(phase, WorkerLost): _H._lost for phase in BEFORE_COMMIT},
    **{(phase, Cancelled): _H._cancelled for phase in BEFORE_COMMIT},
    **{(phase, DeadlinePassed): _H._too_late for phase in BEFORE_COMMIT},
}
