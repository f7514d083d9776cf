"""RELEASE: frees the source world, beside the training thread."""

from __future__ import annotations

import psutil

from liver_hpc.handoff.session import Session, Target
from liver_hpc.protocol.messages import Released
from liver_hpc.world.world import World


def release(session: Session, target: Target, source: World | None) -> None:
    """Frees the source world and the transfer's buffers, then tells the coordinator."""
    session.context.device.enter()
    target.transport.close()
    if source is not None:
        if target.world is None:
            source.close()
        else:
            source.close(spared=target.world.taken)
            target.world.taken = frozenset()
    session.context.device.end_beside(session.generation)
    context, process = session.context, psutil.Process()
    context.send(
        Released(
            worker=context.worker,
            generation=session.generation,
            file_descriptors=process.num_fds(),
            resident_bytes=process.memory_info().rss,
            released_s=context.clock.now_s(),
        )
    )
