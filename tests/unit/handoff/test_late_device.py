"""A handoff on late devices, and what goes wrong without each of its waits."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError, LiverError, TransferError
from liver_hpc.handoff import prepare
from liver_hpc.handoff.beside import Beside
from liver_hpc.handoff.crossing import Crossing
from liver_hpc.handoff.session import Session
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol import messages as m
from liver_hpc.transport import wire
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world import rehearsed
from liver_hpc.world.device import Device, Room
from liver_hpc.world.groups import GroupBook
from liver_hpc.world.memoryless import Memoryless
from liver_hpc.world.network import Network
from tests.late_device import LateBackend, LateDevice, LateGroup, LateNetwork, Machines
from tests.late_worlds import ANSWER_S, LIMITS, STAGING_BYTES, LateRun, LateWorld, late_worlds
from tests.unit.layout.models import TIED

TP = RankMap(Layout(2, 1, 1), (0, 1))
PP = RankMap(Layout(1, 2, 1), (0, 1))
MOVED = RankMap(Layout(1, 2, 1), (1, 2))
"""Worker 0 leaves, worker 2 joins."""


@pytest.fixture
def machines(request: pytest.FixtureRequest) -> Machines:
    return Machines(getattr(request, "param", 0))


@pytest.fixture
def run(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> Iterator[LateRun]:
    with late_worlds(monkeypatch, machines) as ledger:
        yield LateRun(machines, TP, ledger=ledger)


def digest(run: LateRun, digests: str) -> None:
    run.handoff = run.handoff.model_copy(update={"digests": digests})


@pytest.mark.parametrize(
    ("machines", "digests"), [(0, "moved"), (1, "moved"), (2, "whole")], indirect=["machines"]
)
@pytest.mark.parametrize("target", [PP, MOVED], ids=["the same workers", "others"])
def test_a_handoff_goes_through_in_whatever_order_devices_work(
    run: LateRun, target: RankMap, digests: str
) -> None:
    digest(run, digests)
    run.begin()
    ended = run.hand_off(target)
    assert ended.outcome == "completed", ended.detail
    run.check(target.workers)
    worlds: list[Any] = [run.seats[worker].trainer._world for worker in target.workers]
    assert all(world.in_training_lane for world in worlds)
    dropped = {worker: seat.device.dropped_workspaces for worker, seat in run.seats.items()}
    assert dropped == dict.fromkeys({*TP.workers, *target.workers}, 1), "lanes come with handoffs"


@pytest.mark.parametrize("alike", [True, False])
def test_persistent_buffers_that_copies_have_otherwise_call_a_handoff_off(
    alike: bool, run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what crosses arrives as it left: each copy goes its own way."""
    buffer, plain = replace(TIED.tensors[-1], role="buffer"), LateWorld._grow
    model = replace(TIED, tensors=(*TIED.tensors[:-1], buffer))
    monkeypatch.setattr("tests.late_worlds.TIED", model)

    def grow(world: LateWorld, kinds: tuple[str, ...]) -> None:
        plain(world, kinds)
        if PARAMETER in kinds and world.worker == 1 and not alike:
            world.state.view(PARAMETER, len(model.tensors) - 1, buffer.whole).add_(0.5)

    monkeypatch.setattr(LateWorld, "_grow", grow)
    run.source = RankMap(Layout(1, 1, 2), (0, 1))
    run.begin()
    ended = run.hand_off(TP)
    assert ended.outcome == ("completed" if alike else "aborted"), ended.detail
    assert alike or "digests differ; persistent buffers: parameter (re" in ended.detail


def rehearsals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The workers that rehearse the target's seats, as they do."""
    rehearsed: list[int] = []
    plain = LateWorld.warm_up

    def warm_up(world: LateWorld, again: bool = True) -> None:
        rehearsed.extend([world.worker] if world.generation == 2 else [])
        plain(world, again)

    monkeypatch.setattr(LateWorld, "warm_up", warm_up)
    return rehearsed


def test_who_must_not_rehearse_beside_training_hands_off_without(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    rehearsed = rehearsals(monkeypatch)
    monkeypatch.setattr(LateWorld, "allows_rehearsal_beside", False)
    run.rooms[1] = Room(free_bytes=1 << 30, peak_bytes=1 << 40)  # none for a second step's peak
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    assert rehearsed == [2], "the joiner, which does not train yet"
    run.check(MOVED.workers)


# ---- each wait taken out once

WAITS = {
    "transfer begins behind the source's last gather": (
        wire.NcclWire, "streaming", "self._lane.follow()", "pass",
    ),
    "what arrived is unpacked behind its message": (
        wire._Started, "wait", "work.wait()\n", "pass\n",
    ),
    "the host waits for the end of a stream": (
        wire.NcclWire, "streaming", "self._lane.finish(deadline)", "pass",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wait", WAITS)
def test_a_missing_wait_shows(wait: str, run: LateRun, without: Any) -> None:
    without(*WAITS[wait])
    digest(run, "whole")  # else the host reads on the way what has come
    run.begin()
    if run.hand_off(MOVED).outcome == "completed":
        with pytest.raises(AssertionError):
            run.check(MOVED.workers)


@pytest.mark.parametrize("waits", [True, False])
def test_prepared_is_said_when_the_device_is(
    waits: bool, run: LateRun, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here nothing crosses, so that no pair has to meet behind the rehearsal, and no digest is
    computed, which on a late device the host waits for."""
    monkeypatch.setattr("liver_hpc.transport.stream.warm_up", lambda *_of: None)
    if not waits:
        without(prepare, "_prepare", "lane.finish(limit, session.check)", "pass")
    run.begin()
    run.hand_off(TP)
    assert bool(run.ledger) != waits


@pytest.mark.parametrize("waits", [True, False])
def test_the_vote_waits_for_the_first_gradients(waits: bool, run: LateRun, without: Any) -> None:
    if not waits:
        without(Crossing, "_computed", "self._session.context.device.finish(deadline)", "pass")
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    assert any("votes before its device" in entry for entry in run.ledger) != waits


# ---- connecting beside training


def connect_beside_training(machines: Machines) -> tuple[list[Exception], list[bool]]:
    """Two workers connect a group while they train: worker 0's device hears of training's
    collective first, worker 1's of the other one. Errors of connecting, and whether each worker's
    training went on."""
    store = dist.HashStore()
    devices = [LateDevice(machines, worker) for worker in (0, 1)]
    networks = [LateNetwork(device) for device in devices]
    errors: list[Exception] = []
    trained = [False, False]

    def connect(worker: int) -> None:
        devices[worker].enter()
        prefix = dist.PrefixStore("connect", store)
        try:
            networks[worker].open_backend(prefix, worker, 2, 0.5, "workers 0-1")
        except (DeadlineError, RuntimeError) as error:
            errors.append(error)

    def work(worker: int) -> None:
        devices[worker].enter()
        prefix = dist.PrefixStore("train", store)
        training = networks[worker]._new_nccl(prefix, worker, 2, timedelta())
        training.join()
        if worker == 0:
            training.allreduce([torch.ones(1)]).wait()
        connecting = threading.Thread(target=connect, args=(worker,), daemon=True)
        connecting.start()
        if worker == 1:
            soon = Deadline.after(SystemClock(), 10.0, "worker 1 to connect")
            poll_until(lambda: any(each.works for each in networks[1].opened[1:]), soon, 0.001)
            training.allreduce([torch.ones(1)]).wait()
        connecting.join(10.0)
        with contextlib.suppress(DeadlineError):
            devices[worker].training.finish(Deadline.after(SystemClock(), 0.5, "training"))
            trained[worker] = True

    threads = [threading.Thread(target=work, args=(worker,), daemon=True) for worker in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    machines.stop()
    return errors, trained


@pytest.mark.parametrize("machines", range(2), indirect=True)
def test_a_group_connects_beside_training_whichever_comes_first(machines: Machines) -> None:
    assert connect_beside_training(machines) == ([], [True, True])
    assert not machines.unfinished()


def test_in_trainings_lane_the_two_would_wait_for_each_other(
    machines: Machines, without: Any
) -> None:
    without(Network, "_connect", "self._device.new_lane()", "self._device.own_lane()")
    errors, _ = connect_beside_training(machines)
    assert errors, "of the first whose deadline passes; its abort may free the other"
    assert all("for workers 0-1 to connect" in str(error) for error in errors)


def test_with_one_hardware_queue_the_deadline_lets_training_go_on() -> None:
    errors, trained = connect_beside_training(Machines(queues=1))
    assert errors, "of the first whose deadline passes; its abort may free the other"
    assert trained == [True, True]


def test_what_cannot_connect_and_is_not_aborted_stops_training(without: Any) -> None:
    without(Network, "open_backend", "backend.abort()", "pass")
    assert connect_beside_training(Machines(queues=1))[1] == [False, False]


def test_preparing_ends_once_the_group_is_connected(machines: Machines, without: Any) -> None:
    without(Network, "_connect", "lane.finish(deadline, check)", "pass")
    connect_beside_training(machines)
    assert any("all-reduce" in each for each in machines.unfinished())


def test_no_pair_is_connected_inside_the_pause(run: LateRun) -> None:
    assert not new_pairs(run)


def test_a_pair_that_does_not_meet_is_connected_inside_the_pause(
    run: LateRun, without: Any
) -> None:
    without(prepare, "_prepare", "wire.meet(peers, meeting)", "pass")
    assert new_pairs(run)


def new_pairs(run: LateRun) -> list[tuple[str, int]]:
    """Pairs of workers whose first message came after all were prepared."""
    before: set[tuple[int, str, int]] = set()

    def pairs() -> set[tuple[int, str, int]]:
        return {
            (worker, backend.name, peer)
            for worker, seat in run.seats.items()
            for backend in seat.network.opened
            for peer in backend.pairs
        }

    run.arm = lambda: before.update(pairs())
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    return sorted((name, peer) for _, name, peer in pairs() - before)


@pytest.mark.parametrize(
    ("told", "pairs"),
    [
        (LateGroup.pair_with_neighbours, [{1, 3}, {0, 2}, {1, 3}, {2, 0}]),
        (LateGroup.pair_with_all, [{1, 2, 3}, {0, 2, 3}, {0, 1, 3}, {0, 1, 2}]),
        (lambda _group: None, [set(), set(), set(), set()]),
    ],
)
def test_a_group_connects_the_pairs_that_exchange_messages(
    told: Callable[[LateGroup], None], pairs: list[set[int]], machines: Machines
) -> None:
    store, members = dist.HashStore(), (5, 3, 8, 4)
    networks = {worker: LateNetwork(LateDevice(machines, worker)) for worker in members}

    def connect(worker: int) -> None:
        device = networks[worker]._device
        device.enter()
        group = LateGroup("stages", members, worker, device)
        told(group)
        group.connect(networks[worker], store, 10.0)

    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(connect, members))
    assert [networks[worker].opened[0].pairs for worker in members] == pairs
    assert not machines.unfinished()


# ---- overlap


@pytest.mark.parametrize("own_lane", [True, False])
def test_optimizer_state_does_not_wait_for_the_first_forward(
    own_lane: bool, run: LateRun, without: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not own_lane:
        lane = "with self._lane.entered():"
        without(Beside, "run", lane, "with contextlib.nullcontext():")
        monkeypatch.setattr("liver_hpc.handoff.beside.contextlib", contextlib, raising=False)

    def target_world(worker: int) -> Any:
        return run.target(worker).world

    def hold_the_forward() -> None:
        name = target_world(1)._group.backend.name
        run.machines.stopped.add(f"{name}: all-reduce")

    plain = wire.NcclWire.streaming

    def streaming(self: Any, deadline: Deadline) -> Any:
        if threading.current_thread().name == "optimizer-transfer":
            launched = Deadline.after(SystemClock(), 5.0, "the forwards")
            poll_until(
                lambda: all("no" not in target_world(w).backward.what for w in (1, 2)),
                launched,
                0.001,
            )
        return plain(self, deadline)

    monkeypatch.setattr(wire.NcclWire, "streaming", streaming)
    run.arm = hold_the_forward
    run.begin()
    handing = threading.Thread(target=run.hand_off, args=(MOVED,), daemon=True)
    handing.start()
    soon = Deadline.after(SystemClock(), ANSWER_S, "all to be armed")
    poll_until(lambda: bool(run.machines.stopped), soon, 0.001)

    def moved() -> bool:
        threads = [run.target(worker).moving for worker in (1, 2)]
        return all(thread is not None and not thread.is_alive() for thread in threads)

    limit = Deadline.after(SystemClock(), 5.0 if own_lane else 1.0, "optimizer state")
    if own_lane:
        poll_until(moved, limit, 0.001)
    else:
        with pytest.raises(DeadlineError):
            poll_until(moved, limit, 0.001)
    run.machines.stopped.clear()
    handing.join(ANSWER_S)


@pytest.mark.parametrize("machines", range(3), indirect=True)
@pytest.mark.parametrize("target", [PP, MOVED], ids=["the same workers", "others"])
def test_by_itself_optimizer_state_moves_once_a_device_has_the_first_gradients(
    target: RankMap, run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[bool] = []
    plain = wire.NcclWire.streaming

    def streaming(self: Any, deadline: Deadline) -> Any:
        for worker in target.workers:
            crossing = run.target(worker)
            if self is crossing.transport._wire and len(crossing.parts) == 2:
                assert crossing.world is not None
                computed.append(crossing.world.backward.done)  # type: ignore[attr-defined]
        return plain(self, deadline)

    run.handoff = run.handoff.model_copy(update={"overlap": "auto"})
    run.arm = lambda: monkeypatch.setattr(wire.NcclWire, "streaming", streaming)
    run.begin()
    ended = run.hand_off(target)
    assert ended.outcome == "completed", ended.detail
    assert sorted(computed) == [False, False, True, True]  # parameters, and the rest
    run.check(target.workers)


# ---- ABORT


def test_a_worker_that_is_stuck_on_the_device_comes_free_with_the_abort(run: LateRun) -> None:
    LateWorld.syncs, LateWorld.breaks = True, frozenset({2})
    run.begin()
    ended = run.hand_off(MOVED)
    assert (ended.outcome, "the forward fails" in ended.detail) == ("aborted", True)
    run.check(TP.workers)


def test_without_aborted_backends_it_stays(run: LateRun, without: Any) -> None:
    without(Session, "deliver", 'quiet_thread(partial(self.end_waits, shared), "abort")', "pass")
    LateWorld.syncs, LateWorld.breaks = True, frozenset({2})
    run.begin()
    with pytest.raises(AssertionError, match="no end"):
        run.hand_off(MOVED, within_s=1.5)


@pytest.mark.parametrize("waits", [True, False])
def test_one_that_is_stuck_in_a_group_of_both_worlds_comes_free(
    waits: bool, run: LateRun, without: Any
) -> None:
    """The source world is built again on fresh groups, from memory that is kept until the device
    has copied it."""
    if not waits:
        without(Trainer, "_fill", "self._context.device.finish(", "str(")
    LateWorld.syncs, LateWorld.breaks = True, frozenset({1})
    run.begin()
    assert run.hand_off(PP).outcome == "aborted"
    if waits:
        run.check(TP.workers)
    else:
        with pytest.raises(AssertionError, match="saw other parameter"):
            run.check(TP.workers)


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_freed_once_the_device_has_let_it_go(
    waits: bool, run: LateRun, without: Any
) -> None:
    if not waits:
        without(Device, "aborted_has_ended", "self.finish(", "str(")
    LateWorld.breaks = frozenset({1})
    run.begin()
    assert run.hand_off(MOVED).outcome == "aborted"
    if waits:
        run.check(TP.workers)
    else:
        with pytest.raises(AssertionError, match="freed memory"):
            run.check(TP.workers)


@pytest.mark.parametrize("ends", range(3))
@pytest.mark.parametrize("refused_by", ["torch", "NCCL"])
def test_a_thread_whose_messages_were_refused_reduces_afterwards(
    refused_by: str, ends: int, machines: Machines, without: Any
) -> None:
    """ends: how many groups of NCCL's are ended."""
    without(wire, "end_batch", "range(2)", f"range({ends})")
    device = LateDevice(machines, 0)
    failed, training = (LateBackend(device, name, 0, 1) for name in ("transfer", "training"))
    crossing = wire.NcclWire(failed, {1: 1}, device.torch_device, device.new_lane())
    failed.refuses = refused_by == "NCCL"
    if not failed.refuses:
        failed.abort()
    with pytest.raises(TransferError, match="network error" if failed.refuses else "was aborted"):
        crossing.launch([wire.Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), True)])
    training.allreduce([torch.ones(1)]).wait()
    launched = any("all-reduce" in each for each in machines.unfinished())
    assert launched == (ends > failed.refuses), "it is the device's to do, or counts as done"


def test_a_thread_whose_messages_were_aborted_in_their_launch_connects_afterwards(
    machines: Machines,
) -> None:
    """As the training thread does, in which a world is built again after a loss."""
    device = LateDevice(machines, 0)
    failed, network = LateBackend(device, "stages", 0, 1), LateNetwork(device)
    crossing = wire.NcclWire(failed, {1: 1}, device.torch_device, device.new_lane())
    plain = failed.send

    def send(*given: Any) -> None:
        plain(*given)
        failed.abort()

    failed.send = send  # type: ignore[method-assign]
    with pytest.raises(TransferError, match="the group has failed"):
        crossing.launch([wire.Parcel(1, 0, torch.zeros(16, dtype=torch.uint8), True)])
    network.open_backend(dist.HashStore(), 0, 1, 10.0)


@pytest.mark.parametrize("enters", [True, False])
@pytest.mark.parametrize("of", [Network, Beside])
def test_a_thread_of_ours_has_its_workers_gpu(
    of: type, enters: bool, machines: Machines, without: Any
) -> None:
    """Which torch keeps for each thread."""
    if not enters:
        without(of, "_connect" if of is Network else "run", "self._device.enter()", "pass")
    device = LateDevice(machines, 3)
    fails = pytest.raises((RuntimeError, LiverError), match="has the first GPU")
    with contextlib.nullcontext() if enters else fails:
        if of is Network:
            LateNetwork(device).open_backend(dist.HashStore(), 0, 1, 10.0)
        else:
            soon = Deadline.after(SystemClock(), 10.0, "it")
            Beside("beside", lambda: device.launch("work"), device).outcome(soon)


# ---- NCCL fails


def fail(run: LateRun, worlds: Callable[[], list[Any]], stand: Callable[[list[Any]], bool]) -> None:
    """Holds the reductions of worlds from the moment when all are prepared; once they `stand` in
    them, NCCL has an error."""
    held: list[Any] = []

    def hold() -> None:
        held.extend(worlds())
        with run.machines._lock:  # none is half done
            run.machines.stopped.add(f"{held[0]._group.backend.name}: all-reduce")

    run.arm = hold
    run.begin()
    run.request(MOVED)
    soon = Deadline.after(SystemClock(), ANSWER_S, "all to stand")
    poll_until(lambda: bool(run.machines.stopped) and stand(held), soon, 0.001)
    for world in held:
        world._group.backend.fail()


@pytest.mark.parametrize("checks", [True, False])
def test_a_step_whose_reductions_ended_undone_is_not_done(
    checks: bool, run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checks:
        monkeypatch.setattr(GroupBook, "check", lambda _book: None)

    def source() -> list[Any]:
        return [run.seats[worker].trainer._world for worker in TP.workers]

    done = 0

    def stand_at_the_steps_end(worlds: list[Any]) -> bool:
        nonlocal done
        launched = [[*world._group.backend.works] for world in worlds]
        # One when it was connected, and two in a step.
        stand = all(len(works) % 2 == 1 and not works[-1].done for works in launched)
        done = run.seats[0].trainer.step
        return stand

    def steps() -> int:
        return sum(isinstance(each, m.StepDone) for each in run.said)

    fail(run, source, stand_at_the_steps_end)
    for worker in TP.workers:
        thread = run.seats[worker].thread
        assert thread is not None
        thread.join(ANSWER_S)
    assert not any(isinstance(each, m.AtBoundary) for each in run.said)
    assert steps() == done + (not checks)
    if checks:
        errors = [str(run.seats[worker].error) for worker in TP.workers]
        assert errors == ["NCCL between workers 0-1 has failed: COMM_ERROR"] * 2


@pytest.mark.parametrize("checks", [True, False])
def test_a_first_backward_whose_reductions_ended_undone_is_not_voted_for(
    checks: bool, run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not checks:
        monkeypatch.setattr(GroupBook, "check", lambda _book: None)

    def target() -> list[Any]:
        return [run.target(worker).world for worker in MOVED.workers]

    def have_launched(worlds: list[Any]) -> bool:
        return all(world.backward.what.startswith("backward") for world in worlds)

    def votes() -> dict[int, bool]:
        return {each.worker: each.ok for each in run.said if isinstance(each, m.Vote)}

    fail(run, target, have_launched)
    soon = Deadline.after(SystemClock(), ANSWER_S, "all votes")
    poll_until(lambda: len(votes()) == 3, soon, 0.001)
    assert votes() == {0: True, 1: not checks, 2: not checks}
    if checks:
        ended = run.end()
        assert ended.outcome == "aborted"
        assert "NCCL between workers 1-2 has failed: COMM_ERROR" in ended.detail
        run.check(TP.workers)


# ---- room, and what stays


@pytest.mark.parametrize("machines", [0, 1, 2], indirect=True)
@pytest.mark.parametrize("target", [PP, MOVED], ids=["the same workers", "others"])
def test_bounded_memory_is_given_back_in_whatever_order_devices_work(
    target: RankMap, run: LateRun
) -> None:
    run.begin()
    ended = run.hand_off(target, bounded=True)
    assert ended.outcome == "completed", ended.detail
    run.check(target.workers)


class AtTheBoundary:
    """Checkpoints are due at the step of the handoff's boundary alone."""

    def __init__(self, run: LateRun) -> None:
        self._said = run.said

    def __rmod__(self, step: int) -> int:
        at = [each.scalars.step for each in self._said if isinstance(each, m.AtBoundary)]
        return step not in at


def test_the_checkpoint_of_the_boundary_is_not_written_twice(run: LateRun) -> None:
    """Nor at the next step, as those who join would have to know of it."""
    run.saves_every = AtTheBoundary(run)
    run.begin()
    ended = run.hand_off(MOVED, bounded=True)
    assert ended.outcome == "completed", ended.detail
    run.check(MOVED.workers)
    saved = [each for each in run.said if isinstance(each, m.Saved)]
    assert sorted(each.worker for each in saved) == [*TP.workers]
    assert {each.generation for each in saved} == {1}


def test_bounded_memory_waits_for_the_device(run: LateRun, without: Any) -> None:
    """Else what is sent is read from memory that is somebody else's; the digests tell."""
    without(wire.NcclWire, "streaming", "self._lane.finish(deadline)", "pass")
    run.begin()
    ended = run.hand_off(PP, bounded=True)
    assert ended.outcome == "failed"
    assert "hold something else than was sent to them" in ended.detail


@pytest.mark.parametrize(
    ("bounded", "free_bytes", "when"),
    [
        (False, 1000, "for staging beside the world that trains"),
        (False, STAGING_BYTES, "at the boundary, the device has"),
        (True, 1000, "for staging beside the world that trains"),
        (True, STAGING_BYTES, "at the boundary, the device has"),
    ],
)
def test_a_world_that_has_no_room_is_not_built(
    run: LateRun, bounded: bool, free_bytes: int, when: str
) -> None:
    run.rooms[1] = Room(free_bytes=free_bytes, peak_bytes=0)
    run.begin()
    ended = run.hand_off(MOVED, bounded=bounded)
    assert ended.outcome == "aborted"
    assert "worker 1: its seat in" in ended.detail
    assert when in ended.detail
    assert not any(isinstance(each, m.Failed) and each.no_room for each in run.said)
    run.check(TP.workers)


def test_where_bounded_memory_would_do_the_coordinator_hears_of_it(run: LateRun) -> None:
    run.rooms[1] = Room(free_bytes=STAGING_BYTES, peak_bytes=2**30)
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "aborted"
    assert "GiB beside the world that trains, the device has" in ended.detail
    assert [each.no_room for each in run.said if isinstance(each, m.Failed)] == [True]
    run.check(TP.workers)


@pytest.mark.parametrize(
    ("worker", "bounded", "no_room"), [(1, False, True), (1, True, False), (2, False, False)]
)
def test_of_memory_that_runs_out_the_coordinator_hears_where_less_would_do(
    run: LateRun, worker: int, bounded: bool, no_room: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free memory in many pieces, and what a network library takes, is in no account. Worker 2
    joins, and holds one world anyway."""

    def runs_out(context: Any, *others: Any) -> int:
        if context.worker == worker:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return connect_groups(context, *others)

    connect_groups = prepare.connect_groups
    monkeypatch.setattr(prepare, "connect_groups", runs_out)
    run.begin()
    ended = run.hand_off(MOVED, bounded=bounded)
    assert ended.outcome == "aborted"
    assert "Tried to allocate 2.00 GiB" in ended.detail
    told = [each for each in run.said if isinstance(each, m.Failed) and each.worker == worker]
    assert [each.no_room for each in told] == [no_room]
    run.check(TP.workers)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> dict[int, Any]:
    """What each worker's target is made in."""
    chosen, allocating = dict[int, Any](), prepare._allocating

    def note(session: Session, rehearses: bool) -> Any:
        chosen[session.context.worker] = found = allocating(session, rehearses)
        return found

    monkeypatch.setattr(prepare, "_allocating", note)
    return chosen


def test_where_memory_ran_out_bounded_memory_takes_none_beside_training(
    run: LateRun, chosen: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the account says: it was wrong."""
    run.rooms[1] = Room(free_bytes=2**40, peak_bytes=2**40)

    def runs_out(context: Any, *others: Any) -> int:
        if context.worker == 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return connect_groups(context, *others)

    connect_groups = prepare.connect_groups
    run.begin()
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "connect_groups", runs_out)
        assert run.hand_off(MOVED).outcome == "aborted"
    assert chosen[1] is not Memoryless
    ended = run.hand_off(MOVED, bounded=True)
    assert ended.outcome == "completed", ended.detail
    assert chosen[1] is Memoryless
    run.check(MOVED.workers)


def test_bounded_memory_needs_room_for_staging_alone_beside_training(
    run: LateRun, chosen: dict[int, Any]
) -> None:
    """What training takes for a step is there at the boundary."""
    run.rooms[1] = Room(free_bytes=STAGING_BYTES, peak_bytes=2**30)
    run.begin()
    ended = run.hand_off(MOVED, bounded=True)
    assert ended.outcome == "completed", ended.detail
    run.check(MOVED.workers)
    assert chosen[1] is Memoryless
    assert chosen[2] is not Memoryless


@pytest.mark.parametrize("peak_bytes", [2**20, 2**40])
def test_a_world_with_room_for_itself_alone_is_not_rehearsed(
    run: LateRun, peak_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipeline's peak has the activations of many micro-batches, a rehearsal one."""
    rehearsed = rehearsals(monkeypatch)
    run.rooms[1] = Room(free_bytes=2**30, peak_bytes=peak_bytes)
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    assert (1 in rehearsed) == (peak_bytes < 2**30)


@pytest.mark.parametrize(("after_s", "steps_s"), [(0.5, 0.0), (3.5, 3.0), (60.0, 0.0)])
def test_the_target_is_built_once_a_step_has_told_what_training_takes(
    after_s: float, steps_s: float, run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which those do not that end while another attempt's memory is let go. Steps may be long."""
    told, known_then = threading.Event(), dict[int, bool]()

    def begin_beside(device: LateDevice, generation: int) -> None:
        known_then[device.worker] = told.is_set()
        Device.begin_beside(device, generation)

    monkeypatch.setattr(LateDevice, "knows_a_step", lambda device: told.is_set(), raising=False)
    monkeypatch.setattr(LateDevice, "begin_beside", begin_beside, raising=False)
    timer = threading.Timer(after_s, told.set)
    timer.start()
    run.begin()
    ended = run.hand_off(PP, steps_s=steps_s)
    timer.cancel()
    if after_s < 60.0:
        assert ended.outcome == "completed", ended.detail
        assert known_then == {0: True, 1: True}
    else:
        assert ended.outcome == "aborted"
        assert "waited 2.5 s for a step beside which no other world has memory" in ended.detail
        assert known_then == {}
    run.check(PP.workers)


def test_a_rehearsal_that_does_not_come_to_its_end_calls_the_handoff_off(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurried = LIMITS.model_copy(update={"prepare_s": 0.5})  # the workers', not the coordinator's
    monkeypatch.setattr("tests.late_worlds.LIMITS", hurried)
    run.machines.stopped.add("rehearsal of generation 2")
    run.begin()
    soon = Deadline.after(SystemClock(), ANSWER_S, "a step")
    poll_until(lambda: any(isinstance(each, m.StepDone) for each in run.said), soon, 0.001)
    ended = run.hand_off(PP)
    assert ended.outcome == "aborted"
    late = "waited 0.5 s for PREPARE's warm_up: the device has not come to its end"
    assert late in ended.detail
    run.check(TP.workers)


def test_a_world_whose_preparation_fails_is_let_go(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    built, plain = list[LateWorld](), LateWorld.__init__

    def build(world: LateWorld, *given: Any, **named: Any) -> None:
        plain(world, *given, **named)
        built.append(world)

    def fails(*_of: object) -> Any:
        raise TransferError("no memory for messages")

    monkeypatch.setattr(LateWorld, "__init__", build)
    monkeypatch.setattr(prepare.Transport, "prepare", fails)
    run.begin()
    ended = run.hand_off(PP)
    assert (ended.outcome, "no memory for messages" in ended.detail) == ("aborted", True)
    run.check(TP.workers)
    targets = [world for world in built if world.generation == 2]
    assert targets
    soon = Deadline.after(SystemClock(), ANSWER_S, "them to be closed")
    poll_until(lambda: all(world._closed for world in targets), soon, 0.01)


def test_a_seat_that_is_known_wants_no_room_for_a_rehearsal(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = MOVED.coordinate_of(1)
    assert at is not None
    seat = rehearsed.shapes_of(TIED, 1, MOVED.layout, at)
    monkeypatch.setattr(rehearsed, "_rehearsed", {seat})
    run.rooms[1] = Room(free_bytes=1 << 30, peak_bytes=1 << 40)
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    run.check(MOVED.workers)


def test_no_communicator_stays_but_those_that_are_used(run: LateRun) -> None:
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    opened = run.seats[1].network.opened
    assert [backend.aborted for backend in opened] == [True, False, True]
    run.check(MOVED.workers)


def test_all_that_an_attempt_has_is_ended_at_once() -> None:
    """NCCL's end of a communicator waits for the device, so for what only another end frees."""
    both, ended = threading.Barrier(2), list[bool]()
    session = Session.__new__(Session)

    def end(shared: bool) -> None:
        both.wait(5.0)
        ended.append(shared)

    session._ends = [end, end]
    session.end_waits(shared=True)
    assert ended == [True, True]
