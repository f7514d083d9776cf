"""What becomes of a run that has lost a worker: all that are left let the world go, and another one
is filled from the snapshots that they hold.

    HALTING: everybody lets go, and says what it holds
    REFILLING: those with a seat build the next world, those with a snapshot give it

A worker that is lost meanwhile, or does not answer, has it begin anew without that one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.events import WorldRef
from liver_hpc.run import actions as a
from liver_hpc.run.elastic import ElasticPolicy
from liver_hpc.run.event_clock import EventClock
from liver_hpc.run.records import RecoveryRecord
from liver_hpc.run.salvage import Salvage, difference, newest

MOST_ROUNDS = 8
"""So many beginnings without a world that trains are the last, and so many recoveries in a row
without a step that had not been done before: there is more wrong than a lost worker."""


@dataclass
class _Recovery:
    """One in progress.

    source: the world that was lost. halting: the world that is let go, it or one that was to take
    its place. lingering: who has left, and has snapshots. lost: who is. awaited: who has still to
    say what is left, or that it is filled. held: what is left, by worker. target, salvage,
    refilled: of REFILLING. involved: who has a seat in the target, or gives a snapshot. unseated:
    who has let go, but has no seat in the target.
    """

    source: WorldRef
    halting: WorldRef
    reason: str
    noticed_s: float
    lingering: frozenset[int]
    lost: list[int] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    held: dict[int, tuple[m.HeldSnapshot, ...]] = field(default_factory=dict)
    halted_s: float = math.nan
    target: WorldRef | None = None
    salvage: Salvage | None = None
    involved: frozenset[int] = frozenset()
    unseated: tuple[int, ...] = ()
    refilled: dict[int, m.Refilled] = field(default_factory=dict)
    rounds: int = 0


class Recoveries:
    """The recovery in progress, if there is one.

    possible: whether a loss may be made good. owes_evaluation: whether an evaluation is due at the
    boundary after so many steps that was not done. ended: called with the world that trains again,
    or with the reason why none does; and with those that have no seat in it, and snapshots.
    """

    def __init__(
        self,
        config: RunConfig,
        clock: EventClock,
        elastic: ElasticPolicy,
        out: list[a.Action],
        owes_evaluation: Callable[[int], bool],
        ended: Callable[[WorldRef | str, tuple[int, ...]], None],
    ) -> None:
        self.deadline: Deadline | None = None
        self.possible = config.snapshots.every_steps is not None
        self._config = config
        self._clock = clock
        self._elastic = elastic
        self._handoffs = elastic.handoffs
        self._recorder = elastic.handoffs.recorder
        self._agents = elastic.nodes.agents
        self._out = out
        self._owes_evaluation = owes_evaluation
        self._ended = ended
        self._now: _Recovery | None = None
        self._unseated: tuple[int, ...] = ()  # of the last one
        self._caught_up = 0, -math.inf  # when so many steps are done, or at that time
        self._furthest = -1  # the most steps that were done when one began
        self._in_vain = 0  # how many have begun since without a further one
        self._newest = -1, 0  # snapshot: its generation and step
        self._checkpointed = 0  # the step of the newest checkpoint

    def describe(self) -> str:
        """What holds up every request now; empty when there is none."""
        return "" if self._now is None else f"recovery: {self._now.reason}"

    def note_snapshot(self, generation: int, step: int) -> None:
        """The snapshot of the boundary after `step` steps is complete on all workers."""
        self._newest = generation, step

    def note_checkpoint(self, step: int) -> None:
        """There is a checkpoint of the boundary after `step` steps."""
        self._checkpointed = max(self._checkpointed, step)

    def redone_steps(self, world: WorldRef, step: int) -> float:
        """How many steps would be done again if a worker of `world` were lost now, `step` being
        done and the next one under way; infinite where it has no snapshot."""
        generation, kept = self._newest
        return step + 1 - kept if generation == world.generation else math.inf

    def catching_up(self, step: int) -> bool:
        """Whether the steps that a loss took, and the one that was under way, are still to be done
        again, `step` steps being done. Others join when that is made good, as they slow it; where
        it takes longer than `policy.retry_s`, they do not wait for it."""
        until_step, until_s = self._caught_up
        return step < until_step and self._clock.now_s() < until_s

    # ---- HALTING

    def begin(self, world: WorldRef, reason: str) -> None:
        """`world` has lost a worker, or some of it have lost each other."""
        back = self._agents.rejoin(self._unseated)
        lingering = frozenset(self._agents.lingering)
        self._now = now = _Recovery(world, world, reason, self._clock.now_s(), lingering)
        self._out.append(a.Note(f"recovery: {reason}"))
        done = self._recorder.steps_done
        self._in_vain = 0 if done > self._furthest else self._in_vain + 1
        self._furthest = max(self._furthest, done)
        if self._in_vain >= MOST_ROUNDS:
            self._give_up(now, f"{MOST_ROUNDS} recoveries have come no further than step {done}")
            return
        wanted = [*world.rank_map.workers, *sorted(back), *sorted(lingering)]
        stay = {*wanted, *self._agents.spare(clearing=True)}
        here = filter(self._agents.agent_of, self._agents.present())
        others = [worker for worker in here if worker not in stay]
        self._agents.send(others, m.Exit(reason=f"no seat in {world}"))
        self._halt(now, wanted)

    def _halt(self, now: _Recovery, workers: Iterable[int]) -> None:
        now.rounds += 1
        wanted = [*workers]
        here = tuple(filter(self._agents.agent_of, wanted))  # without those that were told to go
        now.held, now.awaited = dict.fromkeys(here, ()), {*here}
        now.lost += [w for w in wanted if w not in now.held and w not in now.lingering]
        now.target = now.salvage = None
        if now.rounds > MOST_ROUNDS:
            self._give_up(now, f"it has begun {MOST_ROUNDS} times")
            return
        halt = m.Halt(generation=now.halting.generation, reason=now.reason)
        self._agents.send(here, halt)
        limits = self._config.limits
        # A worker that computes answers once it comes to a collective. Who lingers stays for that,
        # and for what comes of it.
        self._wait(limits.boundary_s)
        stay_s = limits.boundary_s + limits.prepare_s + limits.transfer_s
        self._elastic.nodes.linger(now.lingering, stay_s, self._clock.now_s())
        self._refill_if_told(now)

    def halted(self, message: m.Halted) -> None:
        now = self._now
        if now is None or now.target is not None or message.generation != now.halting.generation:
            return
        if message.worker in now.held:  # else it was struck off before it said so
            now.held[message.worker] = message.held
            now.awaited.discard(message.worker)
            self._refill_if_told(now)

    # ---- REFILLING

    def _refill_if_told(self, now: _Recovery) -> None:
        if now.awaited:
            return
        now.halted_s = self._clock.now_s()
        held = now.held
        salvage = newest(held)
        if salvage is None:
            kept = ", ".join(f"{w}: {_told(each)}" for w, each in sorted(held.items())) or "nobody"
            self._give_up(now, f"no boundary is left whole in memory ({kept})")
            return
        if older := self._older_than_disk(now.source.rank_map, salvage.scalars.step):
            self._give_up(now, older)
            return
        able = [*(worker for worker in sorted(held) if worker not in now.lingering)]
        able += (spares := self._elastic.nodes.kept())
        layout = self._layout(now.source.rank_map.layout, len(able))
        if layout is None:
            self._give_up(now, f"layouts has none for {len(able)} workers")
            return
        now.salvage = salvage
        try:
            rank_map = self._placed(now.source.rank_map, layout, able)
        except LiverError as error:
            self._give_up(now, str(error))
            return
        self._handoffs.generation += 1
        now.target = WorldRef(self._handoffs.generation, rank_map)
        now.refilled = {}
        now.involved = frozenset((*rank_map.workers, *salvage.holders))
        now.awaited = {*now.involved}
        self._agents.take(worker for worker in spares if worker in rank_map)
        refill = m.Refill(
            generation=now.target.generation,
            rank_map=m.WireRankMap.of(rank_map),
            saved_generation=salvage.generation,
            saved=str(salvage.layout),
            holders=salvage.holders,
            scalars=salvage.scalars,
            known=self._recorder.steps_done,
            evaluate=self._owes_evaluation(salvage.scalars.step),
            save=self._owes_checkpoint(salvage.scalars.step),
        )
        step, found = salvage.scalars.step, f"{salvage.layout} of generation {salvage.generation}"
        self._out.append(a.Note(f"back to step {step}, from {found}: {now.target}"))
        now.unseated = tuple(worker for worker in held if worker not in rank_map)
        # Who does not give anything, either, stays for what it has: this may come to nothing.
        self._agents.send(sorted({*now.involved, *now.unseated}), refill)
        limits = self._config.limits
        self._wait(limits.prepare_s + limits.transfer_s)

    def _owes_checkpoint(self, step: int) -> bool:
        every = self._config.checkpoint.every_steps
        return isinstance(every, int) and step % every == 0 and self._checkpointed < step

    def _older_than_disk(self, source: RankMap, step: int) -> str:
        """Why a start from the newest checkpoint trains on sooner than the boundary in memory after
        `step` steps, whose steps since would be done again; empty where it does not."""
        newer, handoffs = self._checkpointed, self._elastic.estimates.handoffs
        again_s = (newer - step) * handoffs.usual_step_s()
        if again_s <= handoffs.restart_s(source):
            return ""
        return f"memory has the boundary after step {step}, there is a checkpoint of step {newer}"

    def _layout(self, before: Layout, workers: int) -> Layout | None:
        """The same shape where there are workers enough, else the best for those there are."""
        if workers >= before.workers:
            return before
        elastic = self._elastic
        return elastic.estimates.policy.best(min(workers, elastic.queue.ceiling))

    def _placed(self, source: RankMap, layout: Layout, available: list[int]) -> RankMap:
        estimates = self._elastic.estimates
        nodes = self._agents.nodes_of((*source.workers, *available))
        return estimates.place(estimates.spec, source, layout, available, nodes)

    def refilled(self, message: m.Refilled) -> None:
        now = self._now
        if now is None or now.target is None or message.generation != now.target.generation:
            return
        if message.worker not in now.involved:
            return
        now.refilled[message.worker] = message
        now.awaited.discard(message.worker)
        if now.awaited:
            return
        assert now.salvage is not None
        rank_map, target = now.target.rank_map, now.target
        if found := difference(now.salvage, rank_map, now.refilled):
            self._give_up(now, f"the world is not what the snapshots were: {found}")
            return
        self._agents.send(sorted(now.involved), m.Proceed(generation=target.generation))
        known, step = self._recorder.steps_done, now.salvage.scalars.step
        if known < step:
            self._out.append(a.Note(f"nobody has told of steps {known} to {step - 1}"))
        self._out.append(a.Record(self._record(now, target, now.salvage)))
        for generation in range(now.source.generation, target.generation):
            self._out.append(a.ForgetGeneration(generation))
        retry_s = self._config.policy.retry_s
        self._caught_up = max(known, step) + 1, self._clock.now_s() + retry_s
        self._now = self.deadline = None
        self._unseated = tuple(worker for worker in now.unseated if worker not in now.lingering)
        self._ended(target, now.unseated)

    def _record(self, now: _Recovery, target: WorldRef, salvage: Salvage) -> RecoveryRecord:
        step = salvage.scalars.step
        return RecoveryRecord(
            generation=target.generation,
            source_generation=now.source.generation,
            source=str(now.source.rank_map.layout),
            target=str(target.rank_map.layout),
            lost=",".join(map(str, sorted(set(now.lost)))),
            reason=now.reason,
            step=step,
            steps_redone=max(0, self._recorder.steps_done - step),
            rounds=now.rounds,
            noticed_s=now.noticed_s,
            halted_s=now.halted_s,
            refilled_s=self._clock.now_s(),
        )

    # ---- what goes wrong meanwhile

    def involves(self, worker: int) -> bool:
        """Whether something is waited for of this worker, or it is to train."""
        now = self._now
        return now is not None and worker in (now.held if now.target is None else now.involved)

    def lost(self, worker: int, reason: str) -> None:
        """One that is involved is lost, too."""
        now = self._now
        assert now is not None
        if worker not in now.lingering:
            now.lost.append(worker)
        now.reason = f"{now.reason}; worker {worker} lost: {reason}"
        if now.target is None:
            now.held.pop(worker, None)
            now.awaited.discard(worker)
            self._refill_if_told(now)
        else:
            self._again(now, now.target)

    def broken(self, message: m.Broken) -> None:
        """A worker could not build or fill the world that is to train."""
        now = self._now
        if now is not None and now.target and message.generation == now.target.generation:
            now.reason = f"{now.reason}; worker {message.worker}: {message.reason}"
            self._again(now, now.target)

    def _again(self, now: _Recovery, target: WorldRef) -> None:
        now.halting, here = target, sorted({*now.involved, *now.unseated})
        self._halt(now, (worker for worker in here if worker not in now.lost))

    def tick(self) -> None:
        """Whoever has not answered in time is given up, too."""
        now = self._now
        if now is None or self.deadline is None or not self.deadline.expired():
            return
        late, limit_s = sorted(now.awaited), self.deadline.limit_s
        self._agents.send(late, m.Exit(reason=f"did not answer for {limit_s:g} s"))
        for worker in late:
            if self.involves(worker):
                self.lost(worker, f"did not answer for {limit_s:g} s")

    def _give_up(self, now: _Recovery, why: str) -> None:
        self._now = self.deadline = None
        self._ended(f"{now.reason}; {why}", ())

    def _wait(self, limit_s: float) -> None:
        self.deadline = Deadline.after(self._clock.present, limit_s, "a recovery")


def _told(held: Iterable[m.HeldSnapshot]) -> str:
    """What a worker holds: "step 4 rank 0 of tp2 pp1 dp1"."""
    return " and ".join(f"step {s.scalars.step} rank {s.rank} of {s.layout}" for s in held) or "-"
