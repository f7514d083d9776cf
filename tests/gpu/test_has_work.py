"""Whether the device has work is answered while a launch waits for a place in its queue."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from liver_hpc.world.device import ANSWERS_S, Device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(300),
]

CYCLES = 6_000_000_000
"""Some seconds."""
LAUNCHES = 20_000
"""More than a queue takes."""


def test_a_full_queue_is_work_and_holds_nobody_up() -> None:
    device = Device(torch.device("cuda", 0))
    values = torch.ones(8, device=device.torch_device)
    torch.cuda.synchronize()
    assert not device.has_work()
    full, answers = threading.Event(), list[tuple[bool, float]]()

    def ask() -> None:
        full.wait(10.0)
        time.sleep(0.5)
        began_s = time.monotonic()
        answers.append((device.has_work(), time.monotonic() - began_s))

    asking = threading.Thread(target=ask)
    asking.start()
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    full.set()
    for _ in range(LAUNCHES):
        values.add_(1.0)
    torch.cuda.synchronize()
    asking.join()
    (has_work, took_s), *_ = answers
    assert has_work
    assert took_s < 2 * ANSWERS_S
    assert not device.has_work()
