"""RELEASE: the source world leaves this process, beside the training thread."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

from liver_hpc.handoff.session import Session, Target
from liver_hpc.protocol.messages import Released
from liver_hpc.world.world import World

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def file_descriptors() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def return_free_memory() -> None:
    """Gives freed heap pages back to the system (glibc keeps them otherwise)."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another libc: nothing to trim


def release(session: Session, target: Target, source: World | None) -> None:
    """Frees the source world and the transfer's buffers, then tells the coordinator."""
    session.context.device.enter()
    target.drop_transfer()
    if source is not None:
        source.close()
    return_free_memory()
    context = session.context
    context.send(
        Released(
            worker=context.worker,
            generation=session.generation,
            file_descriptors=file_descriptors(),
            resident_bytes=resident_bytes(),
            released_s=context.clock.now_s(),
        )
    )
