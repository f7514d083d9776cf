"""PREPARE: builds the target world beside the one that trains."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Collection
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torch import OutOfMemoryError
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from liver_hpc.clock import Deadline
from liver_hpc.errors import LiverError, NoRoom
from liver_hpc.handoff.session import Session, Target
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import RankMap, ids_text
from liver_hpc.layout.memory import GRADIENT, bytes_by_receiver, move_bytes, worker_bytes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Move, TransferPlan
from liver_hpc.protocol.messages import Prepared, Transports
from liver_hpc.transport.lane import Lane
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import Wire, group_wire
from liver_hpc.world import hollow, rehearsed
from liver_hpc.world.chunks import Allocating
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.memoryless import Memoryless
from liver_hpc.world.store import ControlStore
from liver_hpc.world.take_over import take_over
from liver_hpc.world.untouched import Kept, Untouched
from liver_hpc.world.world import World

GIB = 2**30

log = logging.getLogger(__name__)


def _part(plan: TransferPlan, kinds: Collection[str]) -> TransferPlan:
    """The moves of some kinds of state."""

    def chosen(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if move.kind in kinds)

    return TransferPlan(plan.worker, chosen(plan.sends), chosen(plan.receives), chosen(plan.local))


def prepare(session: Session, source_world: World | None) -> Target:
    """Builds the target world, its groups, the plan and the staging buffers.

    On source workers it runs beside the training thread, on a device in a lane of its own. A
    worker does all of it alone but the connection of groups and pairs, which is collective over
    the session's members. Raises LiverError or RuntimeError; `NoRoom` where bounded memory may do;
    HandoffAborted when the attempt is called off.
    """
    context = session.context
    lane = context.device.new_lane()
    try:
        with lane.entered():
            return _prepare(session, source_world, lane)
    except OutOfMemoryError as error:
        if session.bounded or source_world is None or not session.is_target:
            raise
        context.device.ran_out = True
        raise NoRoom(str(error)) from error


def _prepare(session: Session, source_world: World | None, lane: Lane) -> Target:
    context, began_s = session.context, time.perf_counter()
    handoff, limits = context.config.handoff, session.limits
    timings_s: dict[str, float] = {}
    worker, device = context.worker, context.device
    rehearses = _rehearses(session, source_world)
    world, wire, transport = None, None, None

    def lap(name: str) -> None:
        """Enters the time since the last lap under `name`, once the device is there, too."""
        limit = Deadline.after(context.clock, limits.prepare_s, f"PREPARE's {name}")
        lane.finish(limit, session.check)
        timings_s[name] = time.perf_counter() - began_s - sum(timings_s.values())

    spec = context.recipe.spec
    try:
        if session.is_target:
            allocating = _allocating(session, rehearses)
            rehearses = allocating is nullcontext
        device.begin_beside(session.generation)
        if session.is_target:
            seat = (session.target, worker, session.generation)
            world = World(context.recipe, *seat, device, allocating=allocating)
            session.call_at_end(world.book.abort)
            lap("build")
            if rehearses:
                session.check()
                world.warm_up(again=handoff.warm_up_again)
            world.accumulate_in_training_lane()
            lap("warm_up")
        session.check()
        taken: set[tuple[str, int]] = set()  # kinds of state with the index of their tensor
        if world is not None and source_world is not None and handoff.take_over:
            taken = take_over(world, source_world)
        if world is not None and not rehearses:
            hollow.hollow(world)
            if session.is_hollow:
                device.return_free_memory()
            else:
                hollow.allocate(world, (GRADIENT, *spec.kinds))
        lap("memory")
        plan = transfer_plan(spec, session.source, session.target, worker)
        local = (move for move in plan.local if (move.kind, move.tensor_index) not in taken)
        plan = replace(plan, local=tuple(local))
        lap("plan")
        store = session.open_store()
        kept_groups = 0
        if world is not None:
            keeps = handoff.keep_groups and source_world is not None
            previous = source_world.book if keeps and source_world is not None else None
            kept_groups = connect_groups(context, world, store, previous, session.check)
        wire = _open_wire(session, store, lane)
        session.close_at_end(wire)
        lap("connect")
        transport = Transport(wire, spec, handoff)
        session.close_at_end(transport)
        together: list[tuple[str, ...]] = [(kind,) for kind in spec.kinds]
        if not session.bounded:
            together = [(PARAMETER,), spec.optimizer_kinds]
        ends = (None, None) if session.is_hollow else (source_world, world)
        source, target = (None if each is None else each.state for each in ends)
        parts = {kinds: transport.prepare(_part(plan, kinds), source, target) for kinds in together}
        pairs = {pair for part in parts.values() for pair in part.messages}
        peers = {member for pair in pairs for member in pair} - {worker}
        limit_s = context.config.deadlines.collective_s
        meeting = Deadline.after(context.clock, limit_s, f"workers {ids_text(peers)} to connect")
        wire.meet(peers, meeting)
        lap("staging")
        session.check()
    except BaseException:
        for opened in (transport, wire, world):
            if opened is not None:
                opened.close()
        raise
    finally:
        if session.store is not None:
            session.store.close()
    return Target(world, parts, transport, device, kept_groups, timings_s)


def _rehearses(session: Session, source_world: World | None) -> bool:
    """Whether this worker's seat is to be rehearsed, and may be."""
    context, target = session.context, session.target
    handoff, device = context.config.handoff, context.device.torch_device
    at = target.coordinate_of(context.worker)
    if at is None or session.is_hollow or not rehearsed.wanted(handoff, device):
        return False
    if source_world is not None and not source_world.allows_rehearsal_beside:
        return False
    micro_batch = context.config.train.micro_batch
    seat = rehearsed.shapes_of(context.recipe.spec, micro_batch, target.layout, at)
    return handoff.warm_up_again or not rehearsed.known(seat, device)


def _allocating(session: Session, rehearses: bool) -> Allocating:
    """What the target world's state is made in.

    `nullcontext` where the world is rehearsed, as wanted; a rehearsal may take as much again as
    training takes for a step, and is left out where there is no room for that. `Untouched` where
    values come later. `Memoryless` where memory does, too: of a worker that stays in bounded
    memory, on a CPU always, on a GPU where the world does not fit beside training, or did not
    when that was tried.

    Raises LiverError where training would run out of memory beside it, or bounded memory at the
    boundary; `NoRoom` where bounded memory would do.
    """
    context, worker = session.context, session.context.worker
    room, untouched = context.device.room(), partial(Untouched, Kept())
    if room is None:
        return nullcontext if rehearses else Memoryless if session.is_hollow else untouched
    spec, staging_bytes = context.recipe.spec, context.config.handoff.staging_bytes

    def held_bytes(rank_map: RankMap) -> int:
        at = rank_map.coordinate_of(worker)
        return 0 if at is None else sum(worker_bytes(spec, rank_map.layout, at).values())

    wanted_bytes, free_bytes = held_bytes(session.target) + staging_bytes, room.free_bytes
    fits, when = wanted_bytes <= free_bytes, "beside the world that trains"
    fits = fits and not (session.bounded and context.device.ran_out)
    if not fits and session.is_source:
        in_full = f"{wanted_bytes / GIB:.2f} GiB {when}, the device has {free_bytes / GIB:.2f} GiB"
        wanted_bytes, when = staging_bytes, f"for staging {when}"
        if staging_bytes <= free_bytes:
            layouts = session.source.layout, session.target.layout
            wanted_bytes = Budget(context.config, spec).bounded_bytes(*layouts)
            free_bytes, when = room.free_bytes + room.peak_bytes, "at the boundary"
        if wanted_bytes <= free_bytes:
            if session.bounded:
                return Memoryless
            raise NoRoom(f"worker {worker}: its seat in {session.target} wants {in_full}")
    if not fits:
        raise LiverError(
            f"worker {worker}: its seat in {session.target} wants {wanted_bytes / GIB:.2f} GiB "
            f"{when}, the device has {free_bytes / GIB:.2f} GiB; "
            "wanted a layout of smaller seats, a smaller handoff.staging_bytes or micro-batch"
        )
    rehearses_beside = session.is_source and rehearses
    step_bytes = max(0, room.peak_bytes - held_bytes(session.source)) if rehearses_beside else 0
    if wanted_bytes + step_bytes > room.free_bytes:
        log.info("not rehearsed: %d bytes are free beside training's peak", room.free_bytes)
        return untouched
    return nullcontext if rehearses else untouched


def _open_wire(session: Session, store: ControlStore, lane: Lane) -> Wire:
    """Connects all members for TRANSFER, apart from every world's groups. Collective over them."""
    context, members = session.context, session.members
    limits = session.limits
    backend = context.network.open_backend(
        PrefixStore(f"g{session.generation}/transfer", store),
        members.index(context.worker),
        len(members),
        # A joiner waits in it from Arm on, for the source's boundary and then for the bytes.
        limits.boundary_s + limits.transfer_s,
        f"workers {ids_text(members)}",
        session.check,
    )
    ranks = {member: rank for rank, member in enumerate(members)}
    return group_wire(backend, ranks, context.device.torch_device, lane)


def connect_groups(
    context: WorkerContext,
    world: World,
    store: ControlStore,
    previous: GroupBook | None = None,
    check: Callable[[], None] = lambda: None,
) -> int:
    """Makes a world's groups real, and tells the coordinator what they use; returns how many were
    taken over from `previous`. Collective over the world's rank map. check: called while the device
    connects; it may raise."""
    limit_s = context.config.deadlines.collective_s
    kept = world.book.connect(context.network, store, limit_s, previous, check)
    chosen = context.network.transports(world.book.backends())
    context.send(
        Transports(
            worker=context.worker,
            generation=world.generation,
            workers=world.rank_map.layout.workers,
            host=socket.gethostname(),
            kinds=chosen.kinds,
            detail=chosen.detail,
        )
    )
    return kept


def prepared_message(session: Session, target: Target) -> Prepared:
    """Tells the coordinator that PREPARE is done here, and what is going to move."""
    model, plans = session.context.recipe.spec, [part.plan for part in target.parts.values()]
    sends = tuple(move for plan in plans for move in plan.sends)
    return Prepared(
        worker=session.context.worker,
        generation=session.generation,
        timings_s=target.timings_s,
        bytes_out=move_bytes(model, sends),
        bytes_in=sum(move_bytes(model, plan.receives) for plan in plans),
        bytes_local=sum(move_bytes(model, plan.local) for plan in plans),
        bytes_to=bytes_by_receiver(model, sends),
        kept_groups=target.kept_groups,
    )
