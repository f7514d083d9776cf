"""The outside of a run, in memory: nodes, agents and workers that do what a run asks of them.

Workers of one world train in step: a boundary, a stop and the end come to all of them with the
same step, as they do where the flags ride on a reduction.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.snapshots import partners
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.run.events import Node, Seat
from tests.fakes import Fault, WorkerScript

KILLED = 137


class PlannedFaults:
    """Faults to come, each to the first worker that reaches its phase."""

    def __init__(self) -> None:
        self.planned: list[tuple[Phase, Fault]] = []

    def take(self, worker: int, phase: Phase) -> Fault | None:
        for planned in self.planned:
            if planned[0] is phase:
                self.planned.remove(planned)
                return planned[1]
        return None


@dataclass(frozen=True)
class Saved:
    """A worker's word to the shell that its part of a checkpoint is written, or is not."""

    worker: int
    generation: int
    step: int


@dataclass(frozen=True)
class Closed:
    """The end of a worker's channel."""

    worker: int
    reason: str


@dataclass
class PlayedWorker(WorkerScript):
    """A scripted worker that trains.

    doing: "nothing", "restoring", "training", "crossing" (at the boundary), "going back",
    "halted", "refilling", "finished" or "leaving". held: the snapshots that it has. remembered: the
    steps and evaluations of its worlds.
    """

    doing: str = "nothing"
    resumed_step: int = 0
    fails_to_restore: bool = False
    preparing: bool = False
    armed: bool = False
    aborted: bool = False
    stop: m.Stop | None = None
    held: tuple[m.HeldSnapshot, ...] = ()
    remembered: Any = field(default_factory=lambda: deque(maxlen=64))
    received: Any = field(default_factory=lambda: deque(maxlen=4))

    def _answer(self, message: m.ToWorker) -> list[m.FromWorker]:
        match message:
            case m.Begin():
                super()._answer(message)
                return self._begun(message)
            case m.Proceed() if self.doing != "leaving":
                self.doing = "training"
            case m.Halt():
                return self._halted(message)
            case m.Refill():
                return self._refilled(message)
            case m.Prepare():
                super()._answer(message)
                self.preparing, self.armed, self.aborted = True, False, False
            case m.Arm() if message.generation == self.generation:
                self.armed, self.shared_groups = True, message.shared_groups
            case m.Boundary():
                return super()._answer(message)
            case m.Verdict():
                return self._committed(message)
            case m.Abort() if message.generation == self.generation:
                return self._called_off()
            case m.Resume() if message.generation == self.generation:
                if self.doing == "going back":
                    super()._answer(message)
                    self.doing, self.armed, self.aborted = "training", False, False
                    if message.rebuild_generation is not None and self.world is not None:
                        return self._connected(self.world_generation, len(self.world.workers))
            case m.Stop():
                self.stop = message
        return []

    def _begun(self, message: m.Begin) -> list[m.FromWorker]:
        said = self._connected(message.generation, len(message.rank_map.workers))
        if message.checkpoint is None:
            self.doing = "training"
            return said
        if self.fails_to_restore:
            reason = "the file is damaged"
            failed = m.Failed(worker=self.worker, generation=message.generation, reason=reason)
            return [*said, failed]
        self.doing, self.step = "restoring", self.resumed_step
        scalars = _scalars(self.step)
        restored = m.Restored(
            worker=self.worker, generation=message.generation, scalars=scalars, digests=()
        )
        return [*said, restored]

    def _halted(self, message: m.Halt) -> list[m.FromWorker]:
        """Of whatever it does, but not once all is trained; and not of a world before its own."""
        if self.doing == "finished" or message.generation < self.world_generation:
            return []
        self.doing, self.armed, self.preparing, self.aborted = "halted", False, False, True
        held, generation = self.held, message.generation
        return [m.Halted(worker=self.worker, generation=generation, held=held)]

    def _refilled(self, message: m.Refill) -> list[m.FromWorker]:
        faulty = self._fault(Phase.PREPARE)
        if faulty is not None:
            failed = [m.Broken(worker=self.worker, generation=message.generation, reason="told to")]
            return [*failed] if faulty else []
        rank_map, generation = message.rank_map.rank_map(), message.generation
        if self.worker not in (*rank_map.workers, *message.holders):
            self.doing = "leaving"
            return []
        refilled = m.Refilled(worker=self.worker, generation=generation, scalars=message.scalars)
        tells = self.remembered if message.holders[0] == self.worker else ()
        again = [done for done in tells if message.known <= done.step < message.scalars.step]
        if self.worker not in rank_map.workers:
            self.doing = "leaving"
            return [*again, refilled]
        self.world, self.world_generation, self.step = rank_map, generation, message.scalars.step
        self.doing, self.aborted = "refilling", False
        digests = (
            m.ClassDigest(kind="parameter", tp_replicated=True, multi_stage=True, value="f"),
        )
        shares = share_of_state(rank_map.layout.rank(rank_map.coordinate_of(self.worker)))  # type: ignore[arg-type]
        refilled = refilled.model_copy(update={"digests": digests, "shares": shares})
        return [*again, *self._connected(generation, len(rank_map.workers)), refilled]

    def _connected(self, generation: int, workers: int) -> list[m.FromWorker]:
        """The groups of a world stand."""
        kinds = ("gloo tcp",) if workers > 1 else ()
        transports = m.Transports(
            worker=self.worker,
            generation=generation,
            workers=workers,
            host="h",
            kinds=kinds,
            detail="lo/127.0.0.1",
        )
        return [transports]

    @property
    def joins(self) -> bool:
        return self.source is not None and self.worker not in self.source.workers

    def prepare(self) -> list[m.FromWorker]:
        """PREPARE is over; says nothing where it was called off meanwhile."""
        self.preparing = False
        if self.aborted or self.dead or self.mute:
            return []
        said = self._prepared()
        if self.target is None or self.worker not in self.target.workers or not said:
            return said
        return [*self._connected(self.generation, len(self.target.workers)), *said]

    def cross(self) -> list[m.FromWorker]:
        """At the boundary that all have agreed on; a joiner, once that was reached."""
        self.doing = "crossing"
        said = self._stopped_at_boundary()
        return said if not self.aborted else [*said, *self._called_off()]

    def _called_off(self) -> list[m.FromWorker]:
        self.aborted = True
        if self.joins:  # it waits for another attempt
            self.doing, self.armed, self.preparing = "nothing", False, False
            return [self.aborted_message(self.generation)]
        if self.doing != "crossing":
            return []  # said at the next boundary
        self.doing = "going back"
        return [self.aborted_message(self.generation)]

    def drop(self) -> list[m.FromWorker]:
        """At a boundary that the handoff did not reach: called off, and clear of it."""
        self.aborted, self.armed, self.preparing = False, False, False
        return [self.aborted_message(self.generation)]

    def _committed(self, message: m.Verdict) -> list[m.FromWorker]:
        self.step = message.scalars.step
        if self.source is not None and not (self.joins or self.bounded):
            held = snapshots_held(self.source, self.world_generation, self.step)
            self.held = (*held[self.worker], *self.held)
        said = self.first_step()
        self.armed = False
        if self.dead or self.mute or not any(isinstance(each, m.FirstStep) for each in said):
            self.doing = "leaving"
            return said
        self.doing, self.step = "training", self.step + 1
        return said[:1] + self.report() + said[1:]

    def report(self) -> list[m.FromWorker]:
        """StepDone, and Evaluated now and then, from rank 0 alone; the others remember it."""
        done = self._done()
        self.remembered.extend(done)
        return done if self.world is not None and self.world.workers[0] == self.worker else []

    def _done(self) -> list[m.StepDone | m.Evaluated]:
        done = m.StepDone(
            worker=self.worker,
            generation=self.world_generation,
            step=self.step - 1,
            loss=float("nan") if self.step % 7 == 0 else 1.0,
            grad_norm=1.0,
            learning_rate=0.1,
            tokens=64,
            started_s=float(self.step),
            ended_s=self.step + 0.5,
            snapshot=self._newest_snapshot(),
        )
        if self.step % 5:
            return [done]
        evaluated = m.Evaluated(
            worker=self.worker,
            generation=self.world_generation,
            step=self.step,
            loss=1.0,
            batches=2,
            started_s=done.ended_s,
            ended_s=done.ended_s + 0.1,
        )
        return [done, evaluated]

    def _newest_snapshot(self) -> int | None:
        held = (h.scalars.step for h in self.held if h.generation == self.world_generation)
        return max(held, default=None)

    def finish(self) -> list[m.FromWorker]:
        self.doing = "finished"
        return [m.Finished(worker=self.worker, step=self.step)]


def _scalars(step: int) -> m.ScalarState:
    return m.ScalarState(
        step=step, consumed_samples=8 * step, optimizer_step=step, loss_scale=1.0, seed=1234
    )


def share_of_state(rank: int) -> dict[str, str]:
    """The digest of the state is that of the first rank's share; the others have nothing."""
    return {"parameter": f"{0 if rank else 7:016x}"}


def snapshots_held(world: RankMap, generation: int, step: int) -> dict[int, tuple[Any, ...]]:
    """By worker, what each holds of a boundary once all snapshots are complete."""
    found: dict[int, list[m.HeldSnapshot]] = {worker: [] for worker in world.workers}
    for rank, partner in enumerate(partners(world)):
        share = m.HeldSnapshot(
            generation=generation,
            layout=str(world.layout),
            rank=rank,
            scalars=_scalars(step),
            digests=share_of_state(rank),
        )
        for holder in {world.workers[rank], partner} - {None}:
            found[holder].append(share)  # type: ignore[index]
    return {worker: tuple(held) for worker, held in found.items()}


@dataclass
class PlayedAgent:
    """An agent: what it will say next, and its workers once it has met."""

    name: str
    seat: Seat
    says: deque[str] = field(default_factory=lambda: deque(["meets"]))
    workers: list[PlayedWorker] = field(default_factory=list)
    listens: bool = False
    ended: bool = False
    code: int = 0

    def end(self, code: int) -> None:
        """The agent and all its workers end."""
        if not self.ended:
            self.ended, self.code = True, code
            for worker in self.workers:
                worker.dead = True
            self.says.clear()
            self.says.append("ends")

    def look(self) -> None:
        """An agent ends with the last of its workers."""
        if self.workers and all(worker.dead for worker in self.workers):
            self.end(0)


@dataclass
class PlayedNode:
    """A node that the run holds. deadline_s: when the cluster takes it."""

    node: Node
    deadline_s: float | None = None
    returning: bool = False


@dataclass
class TrainingWorld:
    """The workers that train, all of them able to."""

    rank_map: RankMap
    generation: int
    members: list[PlayedWorker]

    def step(self, last: int) -> dict[int, list[m.FromWorker | Saved]]:
        """One step of all, and what they say then, by worker."""
        said: dict[int, list[m.FromWorker | Saved]] = {}
        members = self.members
        held = snapshots_held(self.rank_map, self.generation, members[0].step)
        for member in members:
            if len(members) > 1:
                member.held = held[member.worker]
            member.step += 1
            said[member.worker] = [*member.report()]
        step = members[0].step
        stops = all(member.stop is not None for member in members)
        armed = step < last and all(member.armed for member in members)
        for member in members:
            words = said[member.worker]
            if stops:
                assert member.stop is not None
                if member.stop.checkpoint is not None:
                    words.append(Saved(member.worker, self.generation, step))
                words += member.finish()
            elif armed:
                if member.bounded:
                    words.append(Saved(member.worker, self.generation, step))
                words += member.cross()
            elif member.aborted:
                words += member.drop()
            if not stops and step >= last:
                words.append(Saved(member.worker, self.generation, step))
                words += member.finish()
        return said


def training_world(workers: dict[int, PlayedWorker]) -> TrainingWorld | None:
    """The world that can do a step now; None where somebody is missing or busy."""
    able = [w for w in workers.values() if w.doing == "training" and not w.dead]
    if not able:
        return None
    generation = max(worker.world_generation for worker in able)
    world = next(w.world for w in able if w.world_generation == generation)
    assert world is not None
    members = [workers[worker] for worker in world.workers]
    ready = all(
        each.doing == "training"
        and each.world_generation == generation
        and not each.dead
        and not each.mute
        for each in members
    )
    return TrainingWorld(world, generation, members) if ready else None
