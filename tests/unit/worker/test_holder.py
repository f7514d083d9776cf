"""How a worker lets its world go."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.config.schema import DeadlineSection
from liver_hpc.worker.holder import WorldHolder


def test_who_meets_one_that_is_gone_is_not_waited_for() -> None:
    """The thread of PREPARE comes back at its own deadline, which may be minutes away."""
    told, over = [], threading.Event()
    preparing = threading.Thread(target=over.wait, args=(30.0,), daemon=True)
    preparing.start()
    holder: Any = object.__new__(WorldHolder)
    holder.session = SimpleNamespace(preparing=preparing, prepared=None, generation=4)
    holder._limits = SimpleNamespace(prepare_s=30.0, heartbeat_s=0.2)
    holder._stands = threading.Event()
    holder._world = holder._making = holder._refilling = None
    device = SimpleNamespace(late=False, end_beside=told.append)
    holder._context = SimpleNamespace(device=device)
    began_s = time.monotonic()
    holder._clear_all()
    assert time.monotonic() - began_s < 5.0
    assert preparing.is_alive()
    assert told == [4], "what the attempt had is given back"
    assert holder.session is None
    over.set()
    preparing.join(10.0)


def test_a_world_that_has_failed_is_held_for_as_long_as_agents_wait_for_a_coordinator() -> None:
    """One that begins may read what there is for `boot_s`, and has to be heard then."""
    holder: Any = object.__new__(WorldHolder)
    limits = holder._limits = DeadlineSection(boot_s=100.0, coordinator_s=20.0, control_s=3.0)
    holder._context, holder._halting = None, 4
    holder._making = holder._refilling = holder._world = None
    holder._abandoned = 4
    holder._await_halt = lambda *told: waits.extend(told) or 1 / 0
    waits: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        holder.let_go("a peer is gone")
    assert waits == [4, limits.successor_s + 3.0, "the coordinator's word after a peer is gone"]
    assert limits.successor_s == 120.0
