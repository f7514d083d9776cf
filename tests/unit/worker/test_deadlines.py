"""Every wait of a worker ends at its deadline, and says for whom it was."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import DeadlineError
from liver_hpc.handoff import crossing
from liver_hpc.handoff.crossing import Crossing
from liver_hpc.handoff.session import Session
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.run.directory import RunDirectory
from liver_hpc.snapshot.memory import SnapshotState
from liver_hpc.transport.moved import Moved
from liver_hpc.transport.wire import NcclWire, Parcel, late
from liver_hpc.worker import control, holder, refilling, trainer
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Device
from tests.late_device import LateBackend, LateDevice, Machines
from tests.unit.config.runs import MINIMAL, minimal
from tests.unit.layout.models import TIED
from tests.unit.snapshot.states import CPU, filled, share_of
from tests.unit.transport.memory import MemoryExchange
from tests.unit.worker.test_refill import GENERATION, SCALARS, WORKER, Filling, refill_of

LIMITS = DeadlineSection(
    prepare_s=0.01,
    boundary_s=0.02,
    transfer_s=0.05,
    checkpoint_s=0.03,
    collective_s=0.05,
    release_s=0.04,
    control_s=0.01,
    boot_s=0.01,
    coordinator_s=0.01,
)
BOUND_S = 10.0
"""Of all waits here, on a busy machine."""
SOURCE, TARGET = RankMap(Layout(1, 1, 2), (0, 1)), RankMap(Layout(2, 1, 1), (1, 2))


class Worker(Trainer):
    """Worker 1, whose worlds are nothing, and to whom nobody says a word. said: by itself."""

    def __init__(self, device: Device) -> None:
        unused: Any = None
        self.said: list[Any] = []
        train = {**MINIMAL["train"], "verify_every_steps": 1}
        config = minimal(snapshots={"every_steps": 1}, train=train, handoff={"overlap": "always"})
        recipe: Any = SimpleNamespace(spec=TIED)
        context = WorkerContext(
            checkpoints=Path("checkpoints"),
            worker=WORKER,
            config=config.model_copy(update={"deadlines": LIMITS}),
            recipe=recipe,
            device=device,
            network=unused,
            clock=SystemClock(),
            send=self.said.append,
            open_store=unused,
        )
        super().__init__(context)

    def handoff(self, *, bounded: bool = False) -> Session:
        """From workers 0 and 1 to 1 and 2."""
        prepare = m.Prepare(
            generation=GENERATION,
            source=m.WireRankMap.of(SOURCE),
            source_generation=GENERATION - 1,
            target=m.WireRankMap.of(TARGET),
            bounded=bounded,
        )
        return Session(prepare, self._context)

    def crossing(self, *, bounded: bool = False, world: Any = None, transport: Any = None) -> Any:
        """Its part in that; what moves is `transport`'s."""
        parts: dict[Any, Any] = {("parameter",): None, TIED.optimizer_kinds: None}
        target: Any = SimpleNamespace(world=world, parts=parts, transport=transport)
        unused: Any = None
        return Crossing(self.handoff(bounded=bounded), target, None, unused)

    def _tell_ranks(self, rank_map: RankMap) -> None:
        """Not in the environment of the tests."""

    def _build(self, rank_map: RankMap, generation: int, kept: Any = None) -> Any:
        return SimpleNamespace(rank_map=rank_map, generation=generation, state=None)

    def _prepare(self, session: Session) -> None:
        """It is done."""


@pytest.fixture
def worker() -> Worker:
    return Worker(Device(CPU))


@pytest.fixture
def stuck() -> Iterator[Worker]:
    """On a device that does not come to its end."""
    machines = Machines()
    machines.stopped.add("a kernel")
    device = LateDevice(machines, WORKER)
    device.launch("a kernel")
    yield Worker(device)
    machines.stop()


@contextmanager
def ends(said: str) -> Iterator[None]:
    began_s = time.monotonic()
    with pytest.raises(DeadlineError) as raised:
        yield
    assert said in str(raised.value)
    assert time.monotonic() - began_s < BOUND_S


# ---- words of the coordinator


def joins(worker: Worker) -> None:
    worker.join(worker.handoff())


def restores(worker: Worker) -> None:
    worker._restore(worker._build(SOURCE, GENERATION), Path("/checkpoints/step-3"), False)


def refills(worker: Worker) -> None:
    worker.refill(refill_of(0, WORKER))


def lingers(worker: Worker) -> None:
    worker.linger(GENERATION)


def lets_go(worker: Worker) -> None:
    worker._abandoned = GENERATION
    worker.let_go("a peer is gone")


def has_no_source(worker: Worker) -> None:
    worker._source_of(worker.handoff())


def goes_back(worker: Worker) -> None:
    session: Any = worker.handoff()
    session.prepared = SimpleNamespace(drop=lambda: True)
    source: Any = SimpleNamespace(scalar_state=lambda _step: SCALARS)
    worker._go_back(session, source, m.Abort(generation=GENERATION, reason="a test"))


def waits_for_the_boundary(worker: Worker) -> None:
    worker.crossing(bounded=True)._work_bounded([])


def waits_for_the_verdict(worker: Worker) -> None:
    worker.crossing()._verdict()


WORDS: dict[Callable[[Worker], None], str] = {
    joins: "waited 0.03 s for workers 0-2 to be prepared",
    restores: "waited 0.04 s for workers 0-1 to restore from /checkpoints/step-3",
    refills: "waited 0.06 s for all workers to fill tp1 pp1 dp2 on workers 0-1",
    lingers: "waited 0.11 s for generation 4 to have snapshots",
    lets_go: "waited 0.03 s for the coordinator's word after a peer is gone",
    has_no_source: "waited 0.01 s for the source world to stand",
    goes_back: "waited 0.05 s for workers 0-2 to go back",
    waits_for_the_boundary: "waited 0.13 s for the coordinator to say where the source stands",
    waits_for_the_verdict: "waited 0.08 s for the coordinator's verdict on the handoff",
}


@pytest.mark.parametrize("wait", WORDS, ids=lambda wait: wait.__name__)
def test_who_hears_nothing_from_the_coordinator_says_what_was_to_come(
    wait: Callable[[Worker], None], worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder, "Refilling", Filling)
    restored = SimpleNamespace(scalars=SCALARS)
    monkeypatch.setattr(trainer, "restore", lambda *_of: restored)
    with ends(WORDS[wait]):
        wait(worker)


# ---- a device


def fills(worker: Worker) -> None:
    kinds = SimpleNamespace(kinds=("parameter",))
    held: Any = SimpleNamespace(model=kinds, boxes=lambda _kind: ())
    worker._fill(worker._build(SOURCE, GENERATION), held, frees=False)


def computes(worker: Worker) -> None:
    world = SimpleNamespace(load_scalar_state=lambda _scalars: None)
    worker.crossing()._computed(world, SCALARS)


def sends(worker: Worker) -> None:
    device: Any = worker._context.device
    backend = LateBackend(device, "transfer", 0, 1)
    wire = NcclWire(backend, {1: 1}, device.torch_device, device.new_lane())
    bytes_ = Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), True)
    wire.exchange([bytes_], Deadline.after(SystemClock(), 0.05, "the bytes"))


LATE = {
    fills: "waited 0.05 s for the state to be copied: the device",
    computes: "waited 0.05 s for the first gradients of workers 1-2: the device",
    sends: "waited 0.05 s for the bytes: the device has not come to its end: messages between "
    "workers 1 are stuck",
}


@pytest.mark.parametrize("wait", LATE, ids=lambda wait: wait.__name__)
def test_a_device_that_is_stuck_is_said_to_be(
    wait: Callable[[Worker], None], stuck: Worker
) -> None:
    with ends(LATE[wait]):
        wait(stuck)


# ---- peers, and threads that wait for them


def test_who_gives_a_snapshot_names_the_one_that_does_not_take_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refilling, "group_wire", lambda *_of: MemoryExchange().wire(WORKER))
    network: Any = SimpleNamespace(open_backend=lambda *_of: None)
    context = replace(worker._context, network=network)
    store: Any = torch.distributed.HashStore()
    one = refilling.Refilling(context, refill_of(0, 2), lambda: nullcontext(store), lambda: None)
    share = share_of(filled(TIED, Layout(1, 1, 2), Coordinate(0, 0, 1), torch.float32))
    said = r"waited 0\.05 s for the bytes of snapshots: not crossed: .* bytes to worker 0"
    with pytest.raises(DeadlineError, match=said):
        one.run(None, SnapshotState(TIED, [share], CPU, None))


class Moving:
    """A transport over which parameters have moved, and optimizer state does not: worker 0 sends
    none. late_s: how long after the deadline that is seen."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._streams = 0

    def close(self) -> None:
        """The vote is no."""

    def stream(self, *given: Any, digest: bool) -> Moved:
        self._streams += 1
        if self._streams == 1:
            return Moved({}, {}, {})
        deadline: Deadline = given[4]
        time.sleep(deadline.remaining_s() + self._late_s)
        raise late(deadline, "message 3 of 8 bytes from worker 0")


@pytest.mark.parametrize(
    ("late_s", "said"),
    [
        (0.02, "s for the bytes of exp_avg, exp_avg_sq: not crossed: message 3 of 8 bytes from"),
        (0.5, "waited 0.25 s for the optimizer state to arrive"),
    ],
)
def test_the_thread_that_moves_optimizer_state_has_time_to_say_from_whom_it_does_not_come(
    late_s: float, said: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crossing, "MOVING_ENDS_S", 0.2)
    vote = worker.crossing(transport=Moving(late_s))._cross(None, [])
    assert not vote.ok
    assert said in vote.reason


def test_digests_of_the_state_that_do_not_come_are_named(worker: Worker) -> None:
    over = threading.Event()
    state = SimpleNamespace(digests=lambda _kinds: over.wait(BOUND_S))
    world: Any = SimpleNamespace(
        settle=lambda: None,
        recipe=worker._context.recipe,
        state=SimpleNamespace(standing=lambda: state),
        generation=GENERATION,
    )
    worker.step = 1
    with ends("waited 0.05 s for the digests of the state"), worker._verification(world):
        pass
    over.set()


def test_a_worker_whose_coordinator_does_not_say_exit_ends_by_itself(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("install_sentinel", "Trainer", "Network", "address_towards", "quiet_thread"):
        monkeypatch.setattr(control, name, lambda *_of: None)
    monkeypatch.setattr(control, "code_of", lambda *_of: {})
    monkeypatch.setattr(control, "leave", sys.exit)
    one: Any = object.__new__(control.Worker)
    one._config, one._clock = worker._context.config, SystemClock()
    one._run, one._recipe, one._device = RunDirectory(Path("runs/one")), None, None
    one._booted_s, one._timings_s = 0.0, {}
    one._send = one._open_store = worker.said.append
    one._train = lambda: None
    with pytest.raises(SystemExit) as ended:
        one.serve(WORKER, "node0", None)
    assert ended.value.code == control.EXIT_FAILED
    assert "waited 0.07 s for the coordinator's Exit" in caplog.text
