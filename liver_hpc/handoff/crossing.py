"""TRANSFER and COMMIT: from the agreed step boundary to the first step of the target world.

Every worker of both worlds runs a `Crossing` at the same boundary. The source's state is frozen
meanwhile and stays whole until the coordinator's commit, so that every earlier failure leads back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError, ProtocolError
from liver_hpc.handoff.session import HandoffAborted, Session, Target
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol import messages as m
from liver_hpc.transport.stream import Prepared
from liver_hpc.world.device import Device
from liver_hpc.world.world import Flags, Gradients, StepResult, World

PROGRESS_INTERVAL_S = 0.1
"""At most one progress message in this time: they are sent inside the pause."""

FAILURES = (
    LiverError,
    RuntimeError,
    AssertionError,
    MemoryError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    OSError,
)
"""Errors of a stage that the worker survives: it votes no."""


@dataclass(frozen=True)
class Digests:
    """Digests of the state that one stage moved: as this worker held it, and as it holds it now."""

    source: tuple[m.ClassDigest, ...]
    target: tuple[m.ClassDigest, ...]


@dataclass(frozen=True)
class Crossed:
    """The target world's first step; `first_step` is None on a leaver."""

    scalars: m.ScalarState
    first_step: StepResult | None
    started_s: float
    ended_s: float


class _Moving(threading.Thread):
    """Work in a thread of its own, whose failure is raised at `outcome`.

    Not a Future: that one keeps the failure's traceback, and with it the group's connections; and
    the interpreter waits at its end for every thread of a pool, also for one that is stuck.
    """

    def __init__(self, work: Callable[[], Digests], device: Device) -> None:
        super().__init__(name="optimizer-transfer", daemon=True)
        self._work = work
        self._device = device
        self._digests: Digests | None = None
        self._failure = ""
        self.start()

    def run(self) -> None:
        self._device.enter()
        try:
            self._digests = self._work()
        except FAILURES as error:
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            del self._work  # and with it the worlds, which others close

    def outcome(self, deadline: Deadline) -> Digests:
        self.join(deadline.remaining_s())
        if self._failure:
            raise LiverError(self._failure)
        if self._digests is None:
            raise deadline.error()
        return self._digests


class Crossing:
    """One worker's way from the source world to the target world. `source` is None on a joiner."""

    def __init__(self, session: Session, target: Target, source: World | None) -> None:
        self._session = session
        self._target = target
        self._source = source
        self._limits = session.context.config.limits
        self._bytes_done = 0
        self._last_progress_s = -PROGRESS_INTERVAL_S

    def run(self, boundary: m.AtBoundary | None) -> Crossed:
        """Crosses, or raises HandoffAborted with the source world untouched.

        Collective over source and target workers. boundary: where the source world stopped, which
        the coordinator is told; None on a joiner.
        """
        session, context = self._session, self._session.context
        if boundary is not None:
            context.send(boundary)
        session.check()
        self._vote("parameters", self._move_parameters)
        forward = self._verdict("forward")
        started_s = context.clock.now_s()
        gradients: list[Gradients] = []
        self._vote("optimizer", lambda: self._first_gradients(forward.scalars, gradients))
        commit = self._verdict("commit")
        world = self._target.world
        if world is None:
            return Crossed(commit.scalars, None, started_s, context.clock.now_s())
        update = world.update(forward.scalars.step)
        first_step = world.agree(gradients[0], update, Flags())
        ended_s = context.clock.now_s()
        context.send(
            m.FirstStep(
                worker=context.worker,
                generation=session.generation,
                started_s=started_s,
                ended_s=ended_s,
            )
        )
        return Crossed(commit.scalars, first_step, started_s, ended_s)

    # ---- the two stages

    def _move_parameters(self) -> Digests:
        # A joiner waits from Arm on, and the source comes at its next boundary.
        waits_s = self._limits.boundary_s if self._source is None else 0.0
        return self._move((PARAMETER,), self._target.parameters, "parameters", waits_s)

    def _first_gradients(self, scalars: m.ScalarState, gradients: list[Gradients]) -> Digests:
        """Computes the target's first forward and backward while optimizer state moves."""
        kinds = self._session.context.recipe.spec.optimizer_kinds
        moving = self._target.moving = _Moving(
            lambda: self._move(kinds, self._target.optimizer, "optimizer state"),
            self._session.context.device,
        )
        deadline = self._deadline("the optimizer state to arrive")
        try:
            if self._target.world is not None:
                gradients.append(self._target.world.forward_backward(scalars.step))
        finally:
            digests = moving.outcome(deadline)
        if self._target.world is not None:
            self._target.world.load_scalar_state(scalars)
        return digests

    def _move(
        self, kinds: tuple[str, ...], half: Prepared, what: str, waits_s: float = 0.0
    ) -> Digests:
        source = self._source.state if self._source is not None else None
        target = self._target.world.state if self._target.world is not None else None
        self._target.transport.stream(
            half, source, target, self._progress, self._deadline(f"the bytes of {what}", waits_s)
        )
        return Digests(*(state.digests(kinds) if state else () for state in (source, target)))

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

    def _vote(self, stage: str, work: Callable[[], Digests]) -> None:
        context, generation = self._session.context, self._session.generation
        digests, reason = Digests((), ()), ""
        try:
            digests = work()
        except HandoffAborted:
            raise
        except FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            # Peers that wait for bytes from here must not wait until their deadline.
            self._target.drop_transfer()
        context.send(
            m.Vote(
                worker=context.worker,
                generation=generation,
                stage=stage,  # type: ignore[arg-type]
                ok=not reason,
                reason=reason,
                spec=context.recipe.spec.digest,
                source=digests.source,
                target=digests.target,
            )
        )

    def _verdict(self, stage: str) -> m.Verdict:
        limit_s = self._limits.transfer_s + self._limits.control_s
        verdict: m.Verdict = self._session.wait(
            m.Verdict, limit_s, f"the coordinator's verdict on {stage}"
        )
        if verdict.stage != stage:
            raise ProtocolError(f"wanted the verdict {stage!r}, got {verdict.stage!r}")
        return verdict

    def _deadline(self, waits_for: str, extra_s: float = 0.0) -> Deadline:
        limit_s = self._limits.transfer_s + extra_s
        return Deadline.after(self._session.context.clock, limit_s, waits_for)
