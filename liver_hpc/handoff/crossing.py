"""TRANSFER and COMMIT: from the agreed step boundary to the first step of the target world.

Every worker of both worlds runs a `Crossing` at the same boundary. The source's state is frozen
meanwhile and stays whole until the coordinator's verdict, so that every earlier failure leads back.
The target's first forward and backward wait for nobody's word, only for their parameters; the
first update waits for the verdict, which proves all that arrived.

In bounded memory it stays whole until a checkpoint of the boundary stands, which then is the way
back, and goes as the target's comes to be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from liver_hpc.clock import Deadline
from liver_hpc.errors import told_of
from liver_hpc.handoff.beside import Beside
from liver_hpc.handoff.session import (
    MOVING_ENDS_S,
    HandoffAborted,
    Session,
    Target,
    WorldHalted,
)
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.layout.memory import GRADIENT
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol import messages as m
from liver_hpc.transport.moved import Moved
from liver_hpc.world import hollow
from liver_hpc.world.context import FAILURES
from liver_hpc.world.steps import Flags, Gradients, StepResult
from liver_hpc.world.world import World

PROGRESS_INTERVAL_S = 0.1
"""At most one progress message in this time: they are sent inside the pause."""


@dataclass(frozen=True)
class Part:
    """What came of the part of TRANSFER in which these kinds of state move. source, target: digests
    of all that this worker held and holds, where the run wants the whole compared. buffers: else
    those of the persistent buffers that it held, of which each copy moves by itself."""

    kinds: tuple[str, ...]
    moved: Moved
    source: tuple[m.ClassDigest, ...] = ()
    target: tuple[m.ClassDigest, ...] = ()
    buffers: tuple[m.ClassDigest, ...] = ()


@dataclass(frozen=True)
class Crossed:
    """The target world's first step; `first_step` is None on a leaver."""

    scalars: m.ScalarState
    first_step: StepResult | None
    started_s: float
    ended_s: float


class Copying(Protocol):
    """What copies the source's state at its last boundary, for the case that a worker is lost
    (`snapshot.keeping.Snapshots`), while the target's first step is computed."""

    def taken(self) -> None:
        """Returns once that state may change. Raises DeadlineError."""

    def keep_pace(self, step: int) -> None:
        """At the end of that step, with which `step` are done: waits where the run file has it."""


class Crossing:
    """One worker's way from the source world to the target world. `source` is None on a joiner."""

    def __init__(
        self, session: Session, target: Target, source: World | None, copying: Copying
    ) -> None:
        self._session = session
        self._target = target
        self._source = source
        self._copying = copying
        self._limits = session.limits
        self._clock = session.context.clock
        self._bytes_done = 0
        self._last_progress_s = -PROGRESS_INTERVAL_S

    def run(self, boundary: m.AtBoundary | None) -> Crossed:
        """Crosses, or raises HandoffAborted with the source world untouched, WorldHalted where that
        is to be let go, or DeadlineError.

        Collective over source and target workers. boundary: where the source world stopped, which
        the coordinator is told; None on a joiner, which is told by the coordinator.
        """
        session, context = self._session, self._session.context
        if boundary is not None:
            context.send(boundary)
        session.check()
        gradients: list[Gradients] = []
        vote = self._cross(None if boundary is None else boundary.scalars, gradients)
        voted_s = self._clock.now_s()
        context.send(vote)
        if not vote.ok:
            # Peers that wait for bytes from here must not wait until their deadline; but the
            # coordinator should hear the cause before what they say of that.
            self._target.transport.close()
        verdict = self._verdict()  # COMMIT: from here on the target's state changes
        begun_s = self._clock.now_s()
        started_s, world = vote.started_s or voted_s, self._target.world
        self._copying.taken()
        if world is None:
            return Crossed(verdict.scalars, None, started_s, begun_s)
        update = world.update(verdict.scalars.step)
        self._copying.keep_pace(verdict.scalars.step + 1)
        first_step = world.agree(gradients[0], update, Flags())
        ended_s = self._clock.now_s()
        context.send(
            m.FirstStep(
                worker=context.worker,
                generation=session.generation,
                started_s=started_s,
                ended_s=ended_s,
                timings_s={"verdict": begun_s - voted_s, "update": ended_s - begun_s},
            )
        )
        return Crossed(verdict.scalars, first_step, started_s, ended_s)

    # ---- up to the vote

    def _cross(self, scalars: m.ScalarState | None, gradients: list[Gradients]) -> m.Vote:
        """Moves everything and computes the first gradients; says how that went."""
        context = self._session.context
        vote = m.Vote(
            worker=context.worker,
            generation=self._session.generation,
            ok=True,
            spec=context.recipe.spec.digest,
        )
        try:
            told = self._work(scalars, gradients)
            for world in (self._source, self._target.world):
                if world is not None:
                    world.book.check()  # of which the device has done all that was moved
            return vote.model_copy(update=told)
        except (HandoffAborted, WorldHalted):
            raise
        except FAILURES as error:
            return vote.model_copy(update={"ok": False, "reason": told_of(error)})

    def _work(self, scalars: m.ScalarState | None, gradients: list[Gradients]) -> dict[str, object]:
        """What the vote tells. Optimizer state moves while the target's first forward and backward
        run, or after them (`handoff.overlap`)."""
        if self._session.bounded:
            return self._work_bounded(gradients)
        context, target = self._session.context, self._target
        first, second = target.parts
        # A joiner waits from Arm on, and the source comes at its next boundary.
        waits_s = self._limits.boundary_s if self._source is None else 0.0
        parameters = self._move(first, waits_s)
        # Not before that of the thread that moves it, which says from whom.
        deadline = self._deadline("the optimizer state to arrive", MOVING_ENDS_S)
        moving: Beside[Part] | None = None
        if self._overlaps():
            moving = Beside("optimizer-transfer", lambda: self._move(second), context.device)
            target.moving = moving
        started_s = computed_s = self._clock.now_s()
        try:
            if target.world is not None:
                scalars = scalars or self._boundary(self._limits.word_s)
                started_s = self._clock.now_s()
                gradients.append(target.world.forward_backward(scalars.step, gathered=True))
                computed_s = self._clock.now_s()
        finally:
            optimizer = None if moving is None else moving.outcome(deadline)
        if target.world is not None:
            assert scalars is not None
            self._computed(target.world, scalars)
        if optimizer is None:
            # Who has no first step comes here at once, and waits for those who have one.
            waits_s = self._limits.boundary_s if target.world is None else 0.0
            optimizer = self._move(second, waits_s)
        spent_s = {
            "forward_backward": computed_s - started_s,
            "optimizer_after": self._clock.now_s() - computed_s,
        }
        return _told([parameters, optimizer], started_s, spent_s)

    def _overlaps(self) -> bool:
        """On a device, what moves and what the first step sends each other would share hardware
        queues where there are too few, and then wait for each other on the device."""
        overlap = self._session.context.config.handoff.overlap
        return overlap == "always" or (overlap == "auto" and not self._session.context.device.late)

    def _work_bounded(self, gradients: list[Gradients]) -> dict[str, object]:
        """The same with the memory of one world: gradients are dead at the boundary, and in their
        room one kind of state after the other changes over. Then the target's come to be."""
        target, limits = self._target, self._limits
        waits_s = limits.boundary_s + limits.checkpoint_s + limits.transfer_s + limits.word_s
        scalars = self._boundary(waits_s)  # from here on the way back is the checkpoint
        self._free(GRADIENT)
        parts = []
        for kinds in target.parts:
            if target.world is not None:
                hollow.allocate(target.world, kinds)
            parts.append(self._move(kinds))
            self._free(*kinds)
        started_s = self._clock.now_s()
        if target.world is not None:
            hollow.allocate(target.world, [GRADIENT])
            gradients.append(target.world.forward_backward(scalars.step, gathered=True))
            self._computed(target.world, scalars)
        return _told(parts, started_s, {"forward_backward": self._clock.now_s() - started_s})

    def _free(self, *kinds: str) -> None:
        """Gives the source's memory of some kinds back, but what the target has taken over."""
        if self._source is not None:
            world = self._target.world
            hollow.free(self._source, kinds, frozenset() if world is None else world.taken)
            self._session.context.device.return_free_memory()

    def _computed(self, world: World, scalars: m.ScalarState) -> None:
        """Ends the target's first backward: the host has launched it; whether it can be computed,
        the device tells."""
        world.load_scalar_state(scalars)
        workers = ids_text(self._session.target.workers)
        deadline = self._deadline(f"the first gradients of workers {workers}")
        self._session.context.device.finish(deadline)

    def _move(self, kinds: tuple[str, ...], waits_s: float = 0.0) -> Part:
        """Moves one part. In bounded memory it ends once all receivers have acknowledged it."""
        source = self._source.state if self._source is not None else None
        target = self._target.world.state if self._target.world is not None else None
        whole = self._session.context.config.handoff.digests == "whole"
        transport, part = self._target.transport, self._target.parts[kinds]
        bounded = self._session.bounded
        deadline = self._deadline(f"the bytes of {', '.join(kinds)}", waits_s)
        moved = transport.stream(
            part, source, target, self._progress, deadline, digest=bounded or not whole
        )
        if bounded:
            transport.acknowledge(part, moved, deadline)
        if not whole:
            # The source's alone: the target's change with its first forward.
            buffers = source.digests(kinds, role="buffer") if source else ()
            return Part(kinds, moved, buffers=buffers)
        return Part(
            kinds, moved, *(state.digests(kinds) if state else () for state in (source, target))
        )

    # ---- talking to the coordinator

    def _progress(self, num_bytes: int) -> None:
        context = self._session.context
        self._bytes_done += num_bytes
        now_s = context.clock.now_s()
        if now_s - self._last_progress_s < PROGRESS_INTERVAL_S:
            return
        self._last_progress_s = now_s
        context.send(
            m.Progress(
                worker=context.worker,
                generation=self._session.generation,
                bytes_done=self._bytes_done,
            )
        )

    def _boundary(self, limit_s: float) -> m.ScalarState:
        """Where the source stands, which the coordinator says to joiners; in bounded memory to all,
        once the checkpoint of that boundary stands."""
        boundary: m.Boundary = self._session.wait(
            m.Boundary, limit_s, "the coordinator to say where the source stands"
        )
        return boundary.scalars

    def _verdict(self) -> m.Verdict:
        limit_s = self._limits.transfer_s + self._limits.word_s
        verdict: m.Verdict = self._session.wait(
            m.Verdict, limit_s, "the coordinator's verdict on the handoff"
        )
        return verdict

    def _deadline(self, waits_for: str, extra_s: float = 0.0) -> Deadline:
        limit_s = self._limits.transfer_s + extra_s
        return Deadline.after(self._session.context.clock, limit_s, waits_for)


def _told(
    parts: Sequence[Part], started_s: float, spent_s: Mapping[str, float]
) -> dict[str, object]:
    """What a vote tells of all that was moved, and of the time that it took. spent_s: beside it."""
    timings_s = defaultdict[str, float](float, spent_s)
    for part in parts:
        half = "parameters" if part.kinds == (PARAMETER,) else "optimizer"
        for work, part_s in part.moved.timings_s.items():
            timings_s[f"{half}/{work}"] += part_s
    return {
        "sent": _pair_digests(part.moved.sent for part in parts),
        "received": _pair_digests(part.moved.received for part in parts),
        "source": tuple(digest for part in parts for digest in part.source),
        "target": tuple(digest for part in parts for digest in part.target),
        "buffers": tuple(digest for part in parts for digest in part.buffers),
        "started_s": started_s,
        "timings_s": dict(timings_s),
    }


def _pair_digests(digests: Iterable[Mapping[tuple[int, str], int]]) -> tuple[m.PairDigests, ...]:
    """The digests of all parts, as a vote tells them: of kinds with the same peers together."""
    of_kinds: dict[str, dict[int, int]] = defaultdict(dict)
    for each in digests:
        for (peer, kind), value in sorted(each.items()):
            of_kinds[kind][peer] = value
    alike: dict[tuple[int, ...], dict[str, str]] = defaultdict(dict)
    for kind, told in of_kinds.items():
        alike[tuple(told)][kind] = "".join(f"{value:016x}" for value in told.values())
    return tuple(
        m.PairDigests(kinds=tuple(values), peers=peers, values="".join(values.values()))
        for peers, values in alike.items()
    )
