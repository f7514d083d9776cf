"""Where the main thread stands is read from its stack, and whether it waits for others there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.coordinator.progress import Progress
from liver_hpc.protocol import messages as m
from liver_hpc.run.lifecycle import TRAINING
from liver_hpc.snapshot import keeping
from liver_hpc.worker.standing import Standing, main_thread_stands
from liver_hpc.world.device import Device
from tests.late_device import LateDevice, Machines

CPU = Device(torch.device("cpu"))
Hold = Callable[[], object]


def where_it_is(stand: Callable[[Hold], None], name: str, device: Device = CPU) -> Standing:
    """What another thread sees while the main thread is held in `stand`, in a function `name`."""
    lock, seen = threading.Lock(), list[Standing]()
    lock.acquire()

    def look() -> None:
        while not (seen and seen[-1].text.split(" < ")[0].endswith(f" in {name}")):
            seen.append(main_thread_stands(device))
        lock.release()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    stand(lock.acquire)
    thread.join()
    return seen[-1]


def reads_data(hold: Hold) -> None:
    hold()


def in_file(path: str, name: str) -> Callable[[Hold], None]:
    """A function of that name, as if it stood there."""
    namespace: dict[str, Callable[[Hold], None]] = {}
    exec(compile(f"def {name}(hold):\n    hold()\n", path, "exec"), namespace)
    return namespace[name]


@pytest.mark.timeout(30)
def test_the_innermost_functions_are_named() -> None:
    stands = where_it_is(reads_data, "reads_data")
    places = stands.text.split(" < ")
    assert places[0].startswith("test_standing.py:")
    assert [place.rpartition(" ")[2] for place in places[:2]] == ["reads_data", "where_it_is"]
    assert len(places) == 3
    assert not stands.waits


@pytest.mark.timeout(30)
def test_who_is_in_a_collective_waits() -> None:
    stands = where_it_is(in_file(dist.distributed_c10d.__file__, "all_wait"), "all_wait")
    assert stands.text.startswith("distributed_c10d.py:2 in all_wait < ")
    assert stands.waits


@pytest.mark.timeout(30)
def test_who_waits_for_a_snapshot_to_cross_waits() -> None:
    """Both ends of a link that stalls would else be given up: the share of one, and its copy."""
    crossed = threading.Event()
    waiter = SimpleNamespace(_deadline=lambda said: Deadline.after(SystemClock(), 20.0, said))
    seen: list[Standing] = []

    def look() -> None:
        while not (seen and "keeping.py" in seen[-1].text and "threading.py" in seen[-1].text):
            seen.append(main_thread_stands(CPU))
        crossed.set()

    threading.Thread(target=look, daemon=True).start()
    keeping._Taking.wait(waiter, crossed, "the snapshot of step 3 to be complete")  # type: ignore[arg-type]
    assert seen[-1].waits
    assert not where_it_is(in_file(threading.__file__, "wait"), "wait").waits, "for who knows what"


CLIPS = in_file("/site/megatron/core/optimizer/clip_grads.py", "norm")


@pytest.mark.timeout(30)
def test_on_a_late_device_who_has_work_there_waits_and_who_holds_it_up_has_none() -> None:
    """NCCL's call has returned long ago: the host waits where it reads what comes of it."""
    waiting, stuck = (LateDevice(Machines(), worker) for worker in (0, 1))
    waiting.launch("an all-reduce that a peer does not come to")
    stuck.launch("a backward").done = True
    waits, reads = where_it_is(CLIPS, "norm", waiting), where_it_is(reads_data, "reads_data", stuck)
    assert waits.waits
    assert not reads.waits
    assert held_up(waits, reads) == (1,)
    assert not where_it_is(CLIPS, "norm").waits, "on a CPU it computes"


def held_up(*stand: Standing) -> tuple[int, ...]:
    """Who of these workers holds the others up."""
    config: Any = SimpleNamespace(deadlines=SimpleNamespace(step_s=5.0), eval=None)
    now_s = iter((0.0, 6.0))
    clock: Any = SimpleNamespace(now_s=lambda: next(now_s))
    core: Any = SimpleNamespace(
        state=TRAINING,
        world=SimpleNamespace(rank_map=SimpleNamespace(workers=range(len(stand)))),
        handoffs=SimpleNamespace(idle=True),
        recorder=SimpleNamespace(steps_done=3),
        agents=SimpleNamespace(node_of=lambda _worker: None),
    )
    progress = Progress(config, clock)
    for worker, (stands, waits) in enumerate(stand):
        progress.beat(m.Heartbeat(worker=worker, step=3, stands=stands, waits=waits))
    found = progress.held_up(core)
    return () if found is None else found.workers
