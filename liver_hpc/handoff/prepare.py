"""PREPARE: builds the target world beside the one that trains."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

from liver_hpc.handoff.session import Session, Target, WorkerContext
from liver_hpc.layout.memory import bytes_by_receiver, move_bytes
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import PARAMETER, Move, TransferPlan
from liver_hpc.protocol.messages import Prepared, Transports
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire
from liver_hpc.world.groups import Group, GroupBook
from liver_hpc.world.store import ControlStore
from liver_hpc.world.take_over import Taken, take_over
from liver_hpc.world.world import World


def _part(plan: TransferPlan, *, parameters: bool) -> TransferPlan:
    """One half of TRANSFER: the moves of parameters, or those of optimizer state."""

    def chosen(moves: tuple[Move, ...]) -> tuple[Move, ...]:
        return tuple(move for move in moves if (move.kind == PARAMETER) == parameters)

    return TransferPlan(plan.worker, chosen(plan.sends), chosen(plan.receives), chosen(plan.local))


def prepare(session: Session, source_world: World | None) -> Target:
    """Builds the target world, its groups, the plan and the staging buffers.

    On source workers it runs beside the training thread. A worker does all of it alone but the
    connection of groups, which is collective over the session's members. Raises LiverError or
    RuntimeError; HandoffAborted when the attempt is called off.
    """
    context, began_s = session.context, time.perf_counter()
    timings_s: dict[str, float] = {}
    worker, device, deadlines = context.worker, context.device, context.config.limits
    world, transfer_group, transport = None, None, None

    def lap(name: str) -> None:
        """Enters the time since the last lap under `name`."""
        timings_s[name] = time.perf_counter() - began_s - sum(timings_s.values())

    try:
        if session.is_target:
            world = World(context.recipe, session.target, worker, session.generation, device)
            lap("build")
            if context.config.handoff.warm_up:
                session.check()
                world.warm_up()
            lap("warm_up")
        session.check()
        taken = Taken()
        if world is not None and source_world is not None and context.config.handoff.take_over:
            taken = take_over(world, source_world)
        plan = transfer_plan(context.recipe.spec, session.source, session.target, worker)
        plan = replace(plan, local=tuple(move for move in plan.local if not taken.has(move)))
        lap("plan")
        store = session.open_store()
        kept = 0
        if world is not None:
            keeps = context.config.handoff.keep_groups
            previous = source_world.book if keeps and source_world is not None else None
            kept = connect_groups(context, world, store, previous)
        name = f"g{session.generation}/transfer"
        transfer_group = Group(name, session.members, worker, device)
        # A joiner waits in it from Arm on, for the source's boundary and then for the bytes.
        transfer_group.connect(context.network, store, deadlines.boundary_s + deadlines.transfer_s)
        lap("connect")
        ranks = {member: rank for rank, member in enumerate(session.members)}
        wire = group_wire(transfer_group.process_group, ranks, device.torch_device)
        transport = Transport(wire, context.recipe.spec, context.config.handoff)
        parameters = transport.prepare(_part(plan, parameters=True))
        optimizer = transport.prepare(_part(plan, parameters=False))
        lap("staging")
        session.check()
    except BaseException:
        for opened in (transport, transfer_group, world):
            if opened is not None:
                opened.close()
        raise
    finally:
        if session.store is not None:
            session.store.close()
    return Target(world, parameters, optimizer, transfer_group, transport, kept, timings_s)


def connect_groups(
    context: WorkerContext, world: World, store: ControlStore, previous: GroupBook | None = None
) -> int:
    """Makes a world's groups real, and tells the coordinator what they use; returns how many were
    taken over from `previous`. Collective over the world's rank map."""
    limit_s = context.config.deadlines.collective_s
    kept = world.book.connect(context.network, store, limit_s, previous)
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
    model, plans = session.context.recipe.spec, (target.parameters.plan, target.optimizer.plan)
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
