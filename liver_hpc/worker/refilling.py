"""Fills a world from snapshots that its workers, and others, hold in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from liver_hpc.clock import Deadline
from liver_hpc.layout.coordinates import Layout, ids_text
from liver_hpc.layout.snapshots import Refill
from liver_hpc.protocol import messages as m
from liver_hpc.snapshot.memory import SnapshotState, by_kind, share_digests
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.groups import end
from liver_hpc.world.store import ControlStore
from liver_hpc.world.world import World


class Refilling:
    """One worker's part in it. To be closed once all workers have filled the world, not before:
    NCCL's last bytes may still be here when the device has done its part."""

    def __init__(
        self,
        context: WorkerContext,
        message: m.Refill,
        meeting: Callable[[], AbstractContextManager[ControlStore]],
        check: Callable[[], None],
    ) -> None:
        """meeting: a store to meet the others in. check: raises where this is to end; what `close`
        has not seen is closed then."""
        self.generation = message.generation
        self._context = context
        self._message = message
        self._meeting = meeting
        self._check = check
        self._backend: Any = None
        self._transport: Transport | None = None

    def run(self, world: World | None, held: SnapshotState) -> m.Refilled:
        """Streams, and says what the world holds now. world: this worker's seat, if it has one; its
        groups are connected. Collective over all that have a seat or give a snapshot.

        Raises TransferError, DeadlineError, or PlanError where a snapshot is not what was said.
        """
        try:
            return self._run(world, held)
        except BaseException:
            self.close()  # so that no peer waits for this end
            raise

    def _run(self, world: World | None, held: SnapshotState) -> m.Refilled:
        context, message = self._context, self._message
        spec, device = context.recipe.spec, context.device
        rank_map = message.rank_map.rank_map()
        refill = Refill(spec, Layout.parse(message.saved), message.holders, rank_map)
        members = sorted({*rank_map.workers, *message.holders})
        limits = context.config.limits
        with self._meeting() as store:
            self._backend = context.network.open_backend(
                PrefixStore(f"g{self.generation}/refill", store),
                members.index(context.worker),
                len(members),
                limits.prepare_s + limits.transfer_s,  # those with a seat build first
                f"workers {ids_text(members)}",
                self._check,
            )
        ranks = {member: rank for rank, member in enumerate(members)}
        wire = group_wire(self._backend, ranks, device.torch_device)
        # The digest of all shares speaks for what crosses, but for parameters that are cast.
        cast = not spec.main_is_parameter
        # A copy that crossed as it lies would stay until all have crossed; staging bounds them.
        copied = cast or device.late
        handoff = context.config.handoff
        handoff = handoff.model_copy(update={"direct": handoff.direct and not copied})
        transport = self._transport = Transport(wire, spec, handoff)
        self._check()
        deadline = Deadline.after(context.clock, limits.transfer_s, "the bytes of snapshots")
        state = None if world is None else world.state
        plan = refill.plan(context.worker)
        prepared = transport.prepare(plan, None if cast else held, state)
        moved = transport.stream(prepared, held, state, lambda _bytes: None, deadline, digest=cast)
        if cast:
            transport.acknowledge(prepared, moved, deadline)
        worker, scalars = context.worker, message.scalars
        if world is None:
            return m.Refilled(worker=worker, generation=self.generation, scalars=scalars)
        world.load_scalar_state(scalars)
        shares = share_digests(world.state)
        return m.Refilled(
            worker=worker,
            generation=self.generation,
            scalars=world.scalar_state(scalars.step),
            digests=world.state.digests(spec.kinds, known=shares),
            shares={kind: f"{value:016x}" for kind, value in by_kind(shares).items()},
        )

    def close(self) -> None:
        """Ends what is under way with the others, from any thread, and frees staging."""
        if self._backend is not None:
            end(self._backend)
        if self._transport is not None:
            self._transport.close()
