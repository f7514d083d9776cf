"""Where a worker's main thread stands: who holds the others up is not who waits for them."""

from __future__ import annotations

import sys
import threading
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from typing import NamedTuple

from liver_hpc.world.device import Device

_FRAMES = 3
_WAITS = (
    "/torch/distributed/",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/p2p_communication.py",
    "/megatron/core/tensor_parallel/",
    "/liver_hpc/handoff/",
    "/liver_hpc/transport/",
    "/liver_hpc/world/",
    "/liver_hpc/worker/",
)
"""Whose innermost function is there waits for other workers."""
_PARTNERS = "/liver_hpc/snapshot/"
"""Who waits there for a thread of its own, waits for its partner and its wards by that."""


class Standing(NamedTuple):
    """text: the innermost functions, the first first. waits: as far as stack and device show."""

    text: str
    waits: bool


def main_thread_stands(device: Device) -> Standing:
    """Of this process; from another thread.

    On a device that is late a collective's call returns at once: the others are waited for where
    the host next reads the device, or there is no place for a launch, be that wherever it is. So
    who has work there waits; the device of one that holds the others up is soon done.
    """
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = [each for each, _ in islice(walk_stack(frame), _FRAMES)] if frame else []
    text = " < ".join(
        f"{Path(each.f_code.co_filename).name}:{each.f_lineno} in {each.f_code.co_name}"
        for each in frames
    )
    files = [each.f_code.co_filename for each in frames]
    waits = any(place in file for file in files[:1] for place in _WAITS)
    of_thread = next((file for file in files if file != threading.__file__), "")
    return Standing(text, waits or _PARTNERS in of_thread or device.has_work())
