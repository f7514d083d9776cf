"""A worker's part in filling a world after a loss: until when it keeps its connections."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.clock import SystemClock
from liver_hpc.errors import LiverError
from liver_hpc.handoff.session import WorldHalted
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.protocol import messages as m
from liver_hpc.snapshot.memory import SnapshotState
from liver_hpc.transport.digest import MODULUS
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import Parcel, Wire
from liver_hpc.worker import holder, refilling
from liver_hpc.worker.holder import LeftWorld, WorldHolder
from liver_hpc.worker.refilling import Refilling
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.device import Device
from liver_hpc.world.state import WorldState
from liver_hpc.world.store import ControlStore
from tests.late_device import LateDevice, Machines
from tests.unit.config.runs import minimal
from tests.unit.layout.models import MIXTURE, TIED, UNTIED_BF16
from tests.unit.snapshot.states import CPU, filled, share_of
from tests.unit.transport import memory as memory_wire
from tests.unit.transport.memory import MemoryExchange

GENERATION, WORKER = 4, 1
PRECISIONS = [(TIED, torch.float32), (UNTIED_BF16, torch.bfloat16), (MIXTURE, torch.bfloat16)]
SCALARS = m.ScalarState(step=3, consumed_samples=24, optimizer_step=3, loss_scale=1.0, seed=1)


class Filling:
    """In the place of `Refilling`: nothing crosses."""

    def __init__(self, _context: WorkerContext, message: m.Refill, *_calls: Any) -> None:
        self.generation, self.closed = message.generation, False

    def run(self, _world: Any, _held: Any) -> m.Refilled:
        return m.Refilled(worker=WORKER, generation=self.generation, scalars=SCALARS)

    def close(self) -> None:
        self.closed = True


class Holder(WorldHolder):
    """Its worlds are nothing, its thread is the test's second one."""

    def __init__(self) -> None:
        unused: Any = None
        self.said = threading.Event()
        context = WorkerContext(
            checkpoints=Path("checkpoints"),
            worker=WORKER,
            config=minimal(snapshots={"every_steps": 1}),
            recipe=SimpleNamespace(spec=None),  # type: ignore[arg-type]
            device=Device(torch.device("cpu")),
            network=unused,
            clock=SystemClock(),
            send=lambda _message: self.said.set(),
            open_store=unused,
        )
        super().__init__(context)
        self.outcome: BaseException | None = None

    def _build(self, rank_map: RankMap, generation: int, kept: Any = None) -> Any:
        return SimpleNamespace(rank_map=rank_map, generation=generation, state=None)

    def refill_beside(self, message: m.Refill) -> threading.Thread:
        def refill() -> None:
            try:
                self.refill(message)
            except BaseException as error:  # noqa: BLE001 - the test looks at it
                self.outcome = error

        thread = threading.Thread(target=refill, daemon=True)
        thread.start()
        assert self.said.wait(10)
        return thread


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Holder]:
    monkeypatch.setattr(holder, "Refilling", Filling)
    one = Holder()
    yield one
    one.proceed.set()


def refill_of(*seats: int) -> m.Refill:
    """Workers 0 and 1 have snapshots."""
    rank_map = RankMap(Layout(1, 1, len(seats)), seats)
    return m.Refill(
        generation=GENERATION,
        rank_map=m.WireRankMap.of(rank_map),
        saved_generation=0,
        saved="tp1 pp1 dp2",
        holders=(0, WORKER),
        scalars=SCALARS,
        known=3,
    )


@pytest.mark.parametrize("seats", [(0, WORKER), (0,)], ids=["with a seat", "without"])
def test_connections_stay_until_all_workers_hold_what_they_should(
    keeper: Holder, seats: tuple[int, ...]
) -> None:
    thread = keeper.refill_beside(refill_of(*seats))
    filling: Any = keeper._refilling
    thread.join(0.2)
    assert thread.is_alive()
    assert not filling.closed
    keeper.proceed.set()
    thread.join(10)
    assert filling.closed
    assert keeper._refilling is None
    if WORKER in seats:
        assert keeper.outcome is None
    else:
        assert isinstance(keeper.outcome, LeftWorld)
        assert keeper.outcome.generation == GENERATION


# ---- another one is lost meanwhile


class Connecting:
    """A network that waits in the store for who is gone, as gloo does. The store's answers never
    come."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.timeout_s = 0.0

    def open_backend(
        self, store: Any, _rank: int, _size: int, timeout_s: float, *_rest: Any
    ) -> Any:
        self.timeout_s = timeout_s
        self.begun.set()
        store.get("the address of who is gone")


class Building(Holder):
    """It stands still while its world is built, or connects for real."""

    def __init__(self, network: Any, build: Callable[[], None]) -> None:
        super().__init__()
        self._context = replace(
            self._context,
            network=network,
            open_store=lambda: ControlStore(lambda _: Future(), 60.0),
        )
        self.build = build

    def _build(self, rank_map: RankMap, generation: int, kept: Any = None) -> Any:
        self.build()
        return super()._build(rank_map, generation, kept)


@pytest.mark.parametrize("where", ["building", "connecting"])
def test_a_halt_ends_a_refill_wherever_it_is(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the one that is lost now would wait for minutes."""
    network, halted = Connecting(), threading.Event()

    def build() -> None:
        if where == "building":
            network.begun.set()
            assert halted.wait(10)

    monkeypatch.setattr(refilling, "Refill", lambda *_: None)
    one = Building(network, build)
    one.said.set()
    thread = one.refill_beside(refill_of(0, WORKER))
    assert network.begun.wait(10)
    one.halt(m.Halt(generation=GENERATION, reason="worker 0 is lost"))
    halted.set()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(one.outcome, LiverError)


def test_who_only_gives_waits_for_those_that_build_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as the coordinator does."""
    monkeypatch.setattr(refilling, "Refill", lambda *_: None)
    network = Connecting()
    one = Building(network, lambda: None)
    one.said.set()
    thread = one.refill_beside(refill_of(0))
    assert network.begun.wait(10)
    limits = one._context.config.limits
    assert network.timeout_s == limits.prepare_s + limits.transfer_s
    one.halt(m.Halt(generation=GENERATION, reason="the test ends"))
    thread.join(10)


def test_who_has_no_seat_stays_as_long_as_filling_and_the_first_steps_may_take(
    keeper: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may give nothing, and stay from the beginning of the filling on."""
    allowed: list[float] = []
    monkeypatch.setattr(
        keeper, "_await_halt", lambda _generation, limit_s, _what: allowed.append(limit_s)
    )
    assert keeper.linger(GENERATION)
    limits = keeper._context.config.limits
    assert allowed[0] > limits.prepare_s + limits.transfer_s + limits.boundary_s


def test_what_frees_one_round_leaves_the_next_one_alone(keeper: Holder) -> None:
    """The thread that frees what waits may come late."""
    thread = keeper.refill_beside(refill_of(0, WORKER))
    filling: Any = keeper._refilling
    keeper._break(GENERATION - 1)
    thread.join(0.2)
    assert thread.is_alive()
    assert not filling.closed
    keeper.halt(m.Halt(generation=GENERATION, reason="worker 0 is lost"))
    thread.join(10)
    assert isinstance(keeper.outcome, WorldHalted)
    assert filling.closed


def test_what_frees_one_round_late_lets_the_next_one_wait(
    keeper: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would train before all hold what they should."""
    closing, goes_on = threading.Event(), threading.Event()

    def close(_filling: Filling) -> None:
        closing.set()
        assert goes_on.wait(10)

    thread = keeper.refill_beside(refill_of(0, WORKER))
    with monkeypatch.context() as patched:
        patched.setattr(Filling, "close", close)
        late = threading.Thread(target=keeper._break, args=(GENERATION,), daemon=True)
        late.start()
        assert closing.wait(10)
    keeper.proceed.set()  # its own thread is free before, as it was in what is closed
    thread.join(10)
    keeper.said.clear()
    again = refill_of(0, WORKER).model_copy(update={"generation": GENERATION + 1})
    thread = keeper.refill_beside(again)
    goes_on.set()
    late.join(10)
    thread.join(0.2)
    assert thread.is_alive()


def test_what_frees_one_round_late_gives_up_no_checkpoint_of_the_next_one(
    keeper: Holder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Connections of snapshots may take their time to close; the next world saves meanwhile."""
    closing, goes_on, given_up = threading.Event(), threading.Event(), list[int]()

    def interrupt(*_generation: int) -> None:
        closing.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(keeper._snapshots, "interrupt", interrupt)
    late = threading.Thread(target=keeper._break, args=(GENERATION,), daemon=True)
    late.start()
    assert closing.wait(10)

    def comes_late() -> None:
        goes_on.set()
        late.join(10)
        assert not late.is_alive()

    def save(_context: WorkerContext, world: Any, step: int, *_where: Any, waits: bool) -> Any:
        return SimpleNamespace(
            generation=world.generation,
            now=lambda _world: None,
            interrupt=lambda: given_up.append(step),
        )

    monkeypatch.setattr("liver_hpc.checkpoint.saving.Save", save)
    world: Any = SimpleNamespace(generation=GENERATION + 1, settle=lambda: None)
    keeper._saving.now(world, 4, Path("checkpoints"), comes_late)
    assert not given_up


def test_who_has_no_world_lets_none_go() -> None:
    """As a joiner whose attempt has failed."""
    one = Holder()
    assert not one.can_let_go
    one._break(GENERATION)
    assert one.proceed.is_set()


def test_who_waits_for_a_world_to_prepare_beside_hears_that_it_is_off() -> None:
    trainer = Trainer(Holder()._context)
    told = m.Halt(generation=GENERATION, reason="worker 0 is lost")

    def check() -> None:
        raise WorldHalted(told.reason)

    session: Any = SimpleNamespace(is_source=True, check=check)
    with pytest.raises(WorldHalted):
        trainer._source_of(session)


# ---- what crosses


def filled_again(
    model: ModelSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, flips: bool = False
) -> tuple[list[WorldState], list[m.Refilled | LiverError], dict[str, int]]:
    """Worker 2 of three is lost, whose share worker 0 has a copy of. The states that the other two
    are filled with, what they answer, and the digests of all shares. flips: a bit on its way."""
    saved, layout = (
        (Layout(1, 1, 3, 1, 3), Layout(1, 1, 2, 1, 2))
        if any(tensor.expert for tensor in model.tensors)
        else (Layout(1, 1, 3), Layout(1, 1, 2))
    )
    shares = [share_of(filled(model, saved, at, dtype)) for at in saved.coordinates()]
    states = [filled(model, layout, at, dtype) for at in layout.coordinates()]
    for state in states:
        for kind in model.kinds:
            for memory in state.memory(kind):
                memory.zero_()
    exchange = MemoryExchange()
    monkeypatch.setattr(refilling, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(refilling, "end", lambda _: None)
    monkeypatch.setattr(refilling, "group_wire", lambda worker, *_: exchange.wire(worker))
    cross = memory_wire._cross

    def flipping(sent: Any, received: Any) -> None:
        cross(sent, received)
        if flips and received.parcel.memory.numel() > 1000:
            received.parcel.memory[8] ^= 1

    monkeypatch.setattr(memory_wire, "_cross", flipping)

    def fill(worker: int) -> m.Refilled | LiverError:
        context: Any = SimpleNamespace(
            worker=worker,
            config=minimal(),
            recipe=SimpleNamespace(spec=model),
            device=Device(CPU),
            network=SimpleNamespace(open_backend=lambda *_: worker),
            clock=SystemClock(),
        )
        world: Any = SimpleNamespace(
            state=states[worker],
            load_scalar_state=lambda _: None,
            scalar_state=lambda _: SCALARS,
        )
        message = m.Refill(
            generation=GENERATION,
            rank_map=m.WireRankMap.of(RankMap(layout, (0, 1))),
            saved_generation=0,
            saved=str(saved),
            holders=(0, 1, 0),
            scalars=SCALARS,
            known=3,
        )
        held = [shares[rank] for rank, holder in enumerate(message.holders) if holder == worker]
        filling = Refilling(context, message, lambda: nullcontext(None), lambda: None)  # type: ignore[arg-type]
        try:
            return filling.run(world, SnapshotState(model, held, CPU, states[worker]))
        except LiverError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        answers = [*pool.map(fill, (0, 1))]
    totals: dict[str, int] = {}
    for share in shares:
        for kind, value in share.digests.items():
            totals[kind] = (totals.get(kind, 0) + value) % MODULUS
    return states, answers, totals


@pytest.mark.parametrize(("model", "dtype"), PRECISIONS)
def test_a_world_is_filled_with_the_very_state_of_snapshots(
    model: ModelSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dense ones in fp32 and bf16, and experts, with a buffer and a frozen parameter."""
    states, answers, totals = filled_again(model, dtype, monkeypatch)
    told: dict[str, int] = dict.fromkeys(totals, 0)
    for state, answer in zip(states, answers, strict=True):
        assert isinstance(answer, m.Refilled), answer
        wanted = filled(model, state.layout, state.at, dtype)
        assert answer.digests == wanted.digests(model.kinds)
        for kind in model.kinds:
            for index, box in state.boxes(kind):
                assert torch.equal(state.view(kind, index, box), wanted.view(kind, index, box))
        for kind, value in answer.shares.items():
            told[kind] = (told[kind] + int(value, 16)) % MODULUS
    assert told == totals


@pytest.mark.parametrize(("model", "dtype"), PRECISIONS)
def test_a_bit_that_flips_on_its_way_is_found(
    model: ModelSpec, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the shares' digests, which the coordinator adds up; what is cast is in none of these."""
    _, answers, totals = filled_again(model, dtype, monkeypatch, flips=True)
    if not model.main_is_parameter:
        assert any("hold something else than was sent" in str(answer) for answer in answers)
        return
    told = [answer.shares for answer in answers if isinstance(answer, m.Refilled)]
    assert len(told) == 2
    assert any(
        sum(int(each[kind], 16) for each in told) % MODULUS != total
        for kind, total in totals.items()
    )


# ---- what is given


class Slow(Wire):
    """Nothing has crossed before it is waited for, which its messages' memory stays for.
    most_bytes: of what was under way at once."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.all_bytes = self.open_bytes = self.most_bytes = 0

    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Any]:
        num_bytes = sum(parcel.memory.numel() for parcel in parcels)
        self.all_bytes += num_bytes
        self.open_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.open_bytes)

        def wait(_deadline: Any) -> None:
            self.open_bytes -= num_bytes

        return [SimpleNamespace(wait=wait)]

    def close(self) -> None:
        """Nothing."""


@pytest.mark.parametrize("late", [False, True], ids=["cast", "on a device"])
def test_copies_of_what_is_given_are_under_way_within_staging(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a world that fills the device, all that a worker gives would not fit."""
    model = TIED if late else UNTIED_BF16
    share = share_of(filled(model, Layout(1, 1, 2), Coordinate(0, 0, 1), torch.float32))
    wire, staging_bytes = Slow(), 2048
    monkeypatch.setattr(Transport, "acknowledge", lambda *_: None)
    monkeypatch.setattr(refilling, "group_wire", lambda *_: wire)
    network: Any = SimpleNamespace(open_backend=lambda *_: None)
    recipe: Any = SimpleNamespace(spec=model)
    context = replace(
        Holder()._context,
        config=minimal(handoff={"bucket_bytes": 512, "staging_bytes": staging_bytes}),
        recipe=recipe,
        device=LateDevice(Machines(), WORKER) if late else Device(torch.device("cpu")),
        network=network,
    )
    store: Any = torch.distributed.HashStore()
    one = refilling.Refilling(context, refill_of(0, 2), lambda: nullcontext(store), lambda: None)
    one.run(None, SnapshotState(model, [share], torch.device("cpu"), None))
    assert 0 < wire.most_bytes <= staging_bytes < wire.all_bytes
