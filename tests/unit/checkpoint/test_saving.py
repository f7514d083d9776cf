"""Checkpoints beside training: what is in them, who waits for them, and what gives them up."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from liver_hpc.checkpoint import saving
from liver_hpc.checkpoint.copied import HostCopy
from liver_hpc.checkpoint.index import part_name, partial_path
from liver_hpc.checkpoint.newest import newest_checkpoint
from liver_hpc.checkpoint.saving import LONGEST_S, SHORTEST_S, Saving, interval_s
from liver_hpc.checkpoint.torch_dist.parts import Peers
from liver_hpc.clock import Clock, FakeClock, SystemClock
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import (
    CheckpointError,
    DeadlineError,
    LiverError,
    PlanError,
    StoreAway,
    TransferError,
)
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.tensors import PARAMETER, Box
from liver_hpc.protocol.events import WorldRef
from liver_hpc.protocol.messages import (
    NO_STORE,
    AtBoundary,
    FromWorker,
    Saved,
    StoreAnswers,
    StoreAsks,
    StoreReply,
    StoreRequest,
    decode,
)
from liver_hpc.rendezvous.channel import Part
from liver_hpc.run.events import CheckpointWritten
from liver_hpc.transport.lane import InlineLane
from liver_hpc.world.store import ControlStore
from tests.late_device import Machines
from tests.late_worlds import SEED, LateRun, late_worlds
from tests.unit.checkpoint.disk import (
    Disk,
    PlainWriter,
    digests_of,
    empty,
    filled,
    read_state,
    save_part,
    scalar_state,
    write_part,
)
from tests.unit.handoff.test_late_device import MOVED, TP
from tests.unit.layout.models import TIED, UNTIED_BF16, rank_map
from tests.unit.world.test_state import numbers

ONE = Layout(1, 1, 1)
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _writes_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", PlainWriter)


def wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.002)


# ---- the copy


@pytest.mark.parametrize("model", [TIED, UNTIED_BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("layout", [ONE, Layout(2, 1, 2), Layout(1, 2, 3)], ids=str)
def test_a_copy_is_written_as_the_state_is(tmp_path: Path, model: Any, layout: Layout) -> None:
    for at in layout.coordinates():
        state = filled(model, layout, at)
        wanted = write_part(state, 4, tmp_path / "state")
        copy = HostCopy(model, layout, at)
        copy.take(state)
        state.release()  # it is the state's memory no more
        assert write_part(copy, 4, tmp_path / "copy").num_bytes == wanted.num_bytes
        name = part_name(layout.rank(at))
        files = [(tmp_path / which / name).read_bytes() for which in ("state", "copy")]
        assert len(files[0]) == len(files[1])


def test_a_copy_gives_parts_of_boxes_and_refuses_what_it_lacks() -> None:
    (at,) = ONE.coordinates()
    state, copy = filled(TIED, ONE, at), HostCopy(TIED, ONE, at)
    copy.take(state)
    part = Box(3, 7, 2, 9)
    assert torch.equal(copy.view(PARAMETER, 0, part), state.view(PARAMETER, 0, part))
    with pytest.raises(PlanError, match=r"lacks parameter .* of 'embedding.word_embeddings"):
        copy.view(PARAMETER, 0, Box(0, 41, 0, 16))
    copy.given_up = "a test"
    with pytest.raises(CheckpointError, match="given up: a test"):
        copy.view(PARAMETER, 0, part)


# ---- one worker


class Seat:
    """A worker that saves, in a world of one, or has a rank in that of another layout. made: host
    memory, by its bytes. kind: of its device."""

    def __init__(
        self,
        directory: Path,
        collective_s: float = 60.0,
        clock: Clock | None = None,
        kind: str = "cpu",
        layout: Layout = ONE,
        rank: int = 0,
    ) -> None:
        at = [*layout.coordinates()][rank]
        self.directory = directory
        self.said: list[FromWorker] = []
        self.state = filled(TIED, layout, at)
        self.settled = 0
        self.made: list[int] = []
        self.world: Any = SimpleNamespace(
            recipe=SimpleNamespace(spec=TIED),
            rank_map=rank_map(layout),
            at=at,
            worker=rank,
            generation=3,
            state=self.state,
            settle=self._settle,
            book=SimpleNamespace(check=lambda: None),
            scalar_state=scalar_state,
        )
        self.context: Any = SimpleNamespace(
            config=SimpleNamespace(
                checkpoint=SimpleNamespace(every_steps="auto", cost=0.05),
                deadlines=SimpleNamespace(
                    collective_s=collective_s, checkpoint_s=WAIT_S, word_s=0.0
                ),
            ),
            clock=clock or SystemClock(),
            send=self.said.append,
            device=SimpleNamespace(
                enter=lambda: None,
                new_lane=InlineLane,
                host_memory=self._host_memory,
                torch_device=SimpleNamespace(type=kind),
            ),
            open_store=None,
            checkpoints=directory,
        )
        self.saving = Saving(self.context)

    def _settle(self) -> None:
        self.settled += 1

    def _host_memory(self, num_bytes: int) -> torch.Tensor:
        self.made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    def told(self, messages: int) -> list[Saved]:
        wait_until(lambda: len(self.said) >= messages)
        return [each for each in self.said if isinstance(each, Saved)]

    def file(self, step: int) -> Path:
        return partial_path(self.directory, step, 3) / part_name(0)


class Held:
    """Writing comes to a stop at its first box, until it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.goes_on = threading.Event()
        self.writes = threading.Event()
        write = saving.HostCopy.view

        def held(copy: Any, *arguments: Any) -> Any:
            self.writes.set()
            assert self.goes_on.wait(WAIT_S)
            return write(copy, *arguments)

        monkeypatch.setattr(saving.HostCopy, "view", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.goes_on.set()


def test_the_state_may_change_while_it_is_written(tmp_path: Path, held: Held) -> None:
    seat = Seat(tmp_path)
    digests = digests_of(seat.state)
    seat.saving.begin(seat.world, 4)
    seat.saving.taken()
    for index, box in seat.state.boxes(PARAMETER):
        seat.state.view(PARAMETER, index, box).zero_()
    assert held.writes.wait(WAIT_S)
    assert seat.said == []
    held.goes_on.set()
    (saved,) = seat.told(1)
    assert (saved.error, saved.digests) == ("", digests)
    assert saved.num_bytes == seat.file(4).stat().st_size
    assert saved.took_s > 0


@pytest.mark.parametrize("beside", [True, False])
def test_parameters_that_were_not_gathered_are_not_saved(tmp_path: Path, beside: bool) -> None:
    """Which a device tells once it has come to their end."""
    seat = Seat(tmp_path)

    def check() -> None:
        raise TransferError("NCCL has failed")

    seat.world.book.check = check
    if beside:
        seat.saving.begin(seat.world, 4)
    else:
        seat.saving.now(seat.world, 4, tmp_path, lambda: None)
    (saved,) = seat.told(1)
    assert saved.error == "NCCL has failed"
    assert not seat.file(4).exists()


def test_only_one_that_training_waits_for_makes_a_run_directory_again(tmp_path: Path) -> None:
    """That which was moved may come back, and would find another one in its place."""
    run = tmp_path / "run"
    seat = Seat(run / "checkpoints")
    seat.saving.begin(seat.world, 4)
    assert [saved.error for saved in seat.told(1)] == [f"{run} is gone"]
    assert not run.exists()
    seat.saving.now(seat.world, 5, seat.directory, lambda: None)
    assert [saved.error for saved in seat.told(2)][1:] == [""]
    assert seat.file(5).exists()


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, held: Held) -> None:
    seat = Seat(tmp_path)
    seat.saving.begin(seat.world, 4)
    assert held.writes.wait(WAIT_S)
    threading.Timer(0.3, held.goes_on.set).start()
    seat.saving.begin(seat.world, 5)
    assert [each.scalars.step for each in seat.told(1)][:1] == [4]
    assert [(s.scalars.step, s.error) for s in seat.told(2)] == [(4, ""), (5, "")]
    assert seat.settled == 2


def test_a_disk_that_does_not_answer_costs_later_ones_without_a_wait(
    tmp_path: Path, held: Held
) -> None:
    seat = Seat(tmp_path, collective_s=0.2)
    seat.saving.begin(seat.world, 4)
    assert held.writes.wait(WAIT_S)
    seat.saving.begin(seat.world, 5)
    seat.saving._context.config.deadlines.collective_s = 100.0
    began_s = time.monotonic()
    seat.saving.begin(seat.world, 6)
    assert time.monotonic() - began_s < 10.0
    later = [(saved.scalars.step, saved.error) for saved in seat.told(2)]
    assert later == [(step, "the checkpoint before is still being written") for step in (5, 6)]
    held.goes_on.set()
    assert seat.told(3)[2].error == ""
    wait_until(lambda: threading.active_count() == 1 or seat.saving._ended(0.1))
    seat.saving.begin(seat.world, 7)
    assert seat.told(4)[3].error == ""


def test_a_handoff_waits_for_a_while_and_then_has_it_given_up(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "YIELDS_S", 0.1)
    seat = Seat(tmp_path)
    assert seat.saving.lets_cross(4)
    seat.saving.begin(seat.world, 4)
    assert held.writes.wait(WAIT_S)
    assert not seat.saving.lets_cross(5)
    time.sleep(0.15)
    assert seat.saving.lets_cross(5)
    (saved,) = seat.told(1)
    assert saved.error == "given up: a handoff has waited 0.1 s for it"
    held.goes_on.set()
    wait_until(lambda: seat.saving._ended(0.1))
    assert len(seat.said) == 1, "what it still did is told nobody"
    monkeypatch.setattr(saving, "YIELDS_S", WAIT_S)
    seat.saving.begin(seat.world, 8)
    assert seat.saving.lets_cross(5), "one that has begun since is waited for"
    assert seat.told(2)[1].error == ""


@pytest.mark.parametrize(("kind", "made"), [("cpu", 3), ("cuda", 1)])
def test_the_memory_of_a_copy_is_kept_where_it_takes_long_to_make(
    kind: str, made: int, tmp_path: Path
) -> None:
    seat = Seat(tmp_path, kind=kind)
    for number in (1, 2, 3):
        seat.saving.begin(seat.world, 4 * number)
        assert seat.told(number)[-1].error == ""
        seat.saving.finish(WAIT_S)
    assert len(seat.made) == made
    assert len({*seat.made}) == 1
    assert (seat.saving._kept.numel() > 0) == (kind == "cuda")


class LateLane(InlineLane):
    """The device does not come to its end."""

    def mark(self) -> Callable[[], bool]:
        return lambda: False


def test_memory_that_a_late_device_may_still_copy_into_is_not_used_again(tmp_path: Path) -> None:
    seat, parked = Seat(tmp_path, kind="cuda", collective_s=0.2), list[object]()
    device = seat.saving._context.device
    device.park = lambda copy, _lane: parked.append(copy)  # type: ignore[method-assign]
    device.new_lane = LateLane  # type: ignore[method-assign]
    seat.saving.begin(seat.world, 4)
    late = "waited 0.2 s for the device to copy the state for a checkpoint: the device has not"
    assert late in seat.told(1)[-1].error
    seat.saving.finish(WAIT_S)
    (copy,) = parked
    assert isinstance(copy, saving.HostCopy)
    assert copy._held
    device.new_lane = InlineLane  # type: ignore[method-assign]
    seat.saving.begin(seat.world, 8)
    assert seat.told(2)[-1].error == ""
    assert len(seat.made) == 2


def test_a_world_that_is_let_go_is_read_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor waited for by training for longer than allowed."""
    seat, takes, goes_on = Seat(tmp_path, collective_s=0.2), threading.Event(), threading.Event()
    take = saving.HostCopy.take

    def held_take(copy: Any, state: Any) -> None:
        takes.set()
        assert goes_on.wait(WAIT_S)
        take(copy, state)

    monkeypatch.setattr(saving.HostCopy, "take", held_take)
    seat.saving.begin(seat.world, 4)
    assert takes.wait(WAIT_S)
    waits = r"waited 0\.2 s for the state to be copied for a checkpoint"
    with pytest.raises(DeadlineError, match=waits):
        seat.saving.taken()
    threading.Timer(0.2, goes_on.set).start()
    seat.saving.halt()
    assert goes_on.is_set()
    seat.state.release()
    (saved,) = seat.told(1)
    assert saved.error == "given up: a worker was lost"
    assert not seat.file(4).exists()


def test_a_disk_that_is_full_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", "__0_0.distcp")

    seat = Seat(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("liver_hpc.checkpoint.torch_dist.files.RankWriter.add", full)
        seat.saving.begin(seat.world, 4)
        seat.saving.taken()
        assert seat.told(1)[0].error == "No space left on device"
    seat.saving.begin(seat.world, 8)
    assert seat.told(2)[1].error == ""


# ---- when, where the run file leaves it open


def test_the_interval_follows_from_what_writing_takes() -> None:
    assert interval_s(0.0, 0.05) == SHORTEST_S
    assert interval_s(0.5, 0.05) == SHORTEST_S
    assert interval_s(30.0, 0.05) == pytest.approx(600.0)
    assert interval_s(30.0, 0.1) == pytest.approx(300.0)
    assert interval_s(1000.0, 0.05) == LONGEST_S


def test_a_worker_wants_one_once_its_interval_is_over(tmp_path: Path, held: Held) -> None:
    clock = FakeClock()
    seat = Seat(tmp_path, clock=clock)
    assert seat.saving.wants(), "a joiner has nobody wait"
    seat.saving.start()
    assert not seat.saving.wants()
    clock.advance(SHORTEST_S - 1)
    assert not seat.saving.wants()
    clock.advance(1)
    assert seat.saving.wants()
    seat.saving.begin(seat.world, 4)
    assert held.writes.wait(WAIT_S)
    clock.advance(30.0)
    assert not seat.saving.wants(), "it is being written"
    held.goes_on.set()
    wait_until(lambda: seat.saving._ended(0.1))
    assert seat.told(1)[0].took_s == 30.0
    clock.advance(600.0 - 31)
    assert not seat.saving.wants()
    clock.advance(1)
    assert seat.saving.wants()


def test_a_run_file_that_says_how_often_is_not_asked_again(tmp_path: Path) -> None:
    seat = Seat(tmp_path)
    for every in (4, None):
        seat.saving._context.config.checkpoint.every_steps = every
        assert not seat.saving.wants()


# ---- whole worlds, on devices that are as late as they may be


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(TIED, tmp_path, keep=1)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, disk: Disk) -> Iterator[LateRun]:
    machines = Machines(0)  # the threads of the disk, which are there already, are not waited for
    with late_worlds(monkeypatch, machines) as ledger:
        yield LateRun(machines, TP, ledger=ledger, saves_every=3, checkpoints=disk.directory)


def saved_of(run: LateRun) -> list[Saved]:
    """But for what the stand-in says that training waits for, which writes nothing."""
    said = [each for each in run.said if isinstance(each, Saved)]
    return [each for each in said if each.error or each.digests]


@pytest.mark.parametrize("every", [3, "auto"])
def test_what_is_on_the_disk_is_the_state_of_its_boundary(
    run: LateRun, disk: Disk, every: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where workers have to agree on the boundary."""
    monkeypatch.setattr(saving, "interval_s", lambda _took_s, _cost: 0.0)
    run.saves_every = every
    run.begin()
    wait_until(lambda: len(saved_of(run)) >= 4 * len(TP.workers))
    run.check(TP.workers)
    assert differences(run, disk) == []


def test_an_update_that_does_not_wait_for_the_copy_is_found_out(
    run: LateRun, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.Saving, "taken", lambda _saving: None)
    run.begin()
    wait_until(lambda: len(saved_of(run)) >= 4 * len(TP.workers))
    run.stop(TP.workers)
    assert differences(run, disk) != []


def differences(run: LateRun, disk: Disk) -> list[object]:
    """Checkpoints that are not what a world is after so many steps, by what is read of them."""
    found = list[object]()
    for saved in saved_of(run):
        outcome = save_part(disk.checkpoints, saved, WorldRef(1, TP))
        if outcome is None:
            continue
        if not isinstance(outcome, CheckpointWritten):
            found.append(outcome)
            continue
        newest = newest_checkpoint(disk.directory)
        assert newest is not None
        for at in TP.layout.coordinates():
            state = empty(TIED, TP.layout, at)
            read_state(state, newest.path)
            rank = TP.layout.rank(at)
            if digests_of(state) != newest.index.digests[rank] or not after(state, outcome.step):
                found.append((outcome.step, rank))
    return found


def after(state: Any, steps: int) -> bool:
    """Every step of these worlds adds 1 to all that there is."""
    first = empty(TIED, state.layout, state.at)
    first.initialize(numbers, SEED)
    return all(
        torch.allclose(state.view(kind, *owned), first.view(kind, *owned) + steps, atol=1e-3)
        for kind in TIED.kinds
        for owned in state.boxes(kind)
    )


def test_a_handoff_comes_between_checkpoints(run: LateRun) -> None:
    """Each is of one world, and complete before that one's end."""
    run.saves_every = 1
    run.begin()
    ended = run.hand_off(MOVED)
    assert ended.outcome == "completed", ended.detail
    wait_until(lambda: any(saved.generation == 2 for saved in saved_of(run)))
    run.check(MOVED.workers)
    workers: dict[tuple[int, int], set[int]] = defaultdict(set)
    crossing: set[int] = set()
    for message in run.said:
        if isinstance(message, AtBoundary):
            crossing.add(message.worker)
        if isinstance(message, Saved):
            assert message.error == ""
            late = message.generation == 1 and message.worker in crossing
            assert not late, "written across the boundary"
            workers[message.generation, message.scalars.step].add(message.worker)
    for (generation, _), members in workers.items():
        world: RankMap = TP if generation == 1 else MOVED
        assert members == set(world.workers)


def test_without_being_asked_a_handoff_would_cross_while_one_is_written(
    run: LateRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.Saving, "lets_cross", lambda _saving, _generation: True)
    view = saving.HostCopy.view

    def view_once_crossed(copy: Any, *box: Any) -> torch.Tensor:
        wait_until(lambda: any(isinstance(message, AtBoundary) for message in run.said))
        return view(copy, *box)

    monkeypatch.setattr(saving.HostCopy, "view", view_once_crossed)
    with pytest.raises(AssertionError, match="written across the boundary"):
        test_a_handoff_comes_between_checkpoints(run)


class Silent:
    """A store in which no peer ever tells of its part."""

    def __init__(self) -> None:
        self.waits, self.closed = threading.Event(), threading.Event()

    def wait(self, _keys: list[str], _timeout: object) -> None:
        self.waits.set()
        assert self.closed.wait(WAIT_S)
        raise LiverError("the store is closed")

    def close(self) -> None:
        self.closed.set()


class FirstRank(PlainWriter):
    """That of the first of two, which waits for the other one's part."""

    def __init__(self, world: Any, scalars: Any, partial: Path, peers: Any) -> None:
        super().__init__(world, scalars, partial, peers)
        self._peers = peers

    def write(self, state: Any) -> Any:
        written = super().write(state)
        assert not self._peers.problems(2)
        return written


def test_training_waits_for_no_peers_part_once_its_world_is_to_be_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", FirstRank)
    seat, store = Seat(tmp_path), Silent()
    seat.context.open_store = lambda: store
    waits = threading.Thread(
        target=seat.saving.now, args=(seat.world, 4, tmp_path, lambda: None), daemon=True
    )
    waits.start()
    assert store.waits.wait(WAIT_S)
    seat.saving.interrupt(seat.world.generation)
    waits.join(WAIT_S)
    assert not waits.is_alive()
    (saved,) = seat.told(1)
    assert "the store is closed" in saved.error


def test_a_part_that_takes_longer_than_a_collective_may_is_waited_for_where_training_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", FirstRank)
    seat, limits_s = Seat(tmp_path, collective_s=0.1), list[float]()
    seat.context.open_store = lambda: SimpleNamespace(
        wait=lambda _keys, limit: limits_s.append(limit.total_seconds()),
        multi_get=lambda keys: [b"\n" for _ in keys],
        delete_keys=len,
        close=lambda: None,
    )
    seat.saving.now(seat.world, 4, tmp_path, lambda: None)
    seat.saving.begin(seat.world, 5)
    assert [saved.error for saved in seat.told(2)] == ["", ""]
    assert limits_s == [WAIT_S, 0.1]


def test_training_writes_no_further_box_once_its_world_is_to_be_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who takes longer for the rest than the coordinator waits would count as lost, too."""
    seat, viewed = Seat(tmp_path), list[int]()
    view = seat.state.view

    def slow_view(kind: str, index: int, box: Box) -> torch.Tensor:
        viewed.append(index)
        seat.saving.interrupt(seat.world.generation)
        return view(kind, index, box)

    monkeypatch.setattr(seat.state, "digests", lambda _kinds: ())
    monkeypatch.setattr(seat.state, "view", slow_view)
    seat.saving.now(seat.world, 4, tmp_path, lambda: None)
    (saved,) = seat.told(1)
    assert saved.error == "a peer was lost"
    assert len(viewed) == 1


@pytest.mark.parametrize("ends", ["interrupt", "halt"])
def test_the_first_rank_waits_for_no_part_of_a_checkpoint_that_is_given_up(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does its training thread, which is to begin the next one."""
    monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", FirstRank)
    seat, store = Seat(tmp_path), Silent()
    seat.context.open_store = lambda: store
    seat.saving.begin(seat.world, 4)
    assert store.waits.wait(WAIT_S)
    waits = threading.Thread(target=seat.saving.begin, args=(seat.world, 5), daemon=True)
    waits.start()
    if ends == "interrupt":
        seat.saving.interrupt(seat.world.generation)
    else:
        seat.saving.halt()
    waits.join(WAIT_S / 2)
    assert not waits.is_alive()
    assert store.closed.is_set()
    assert seat.told(2)[0].error == "given up: a worker was lost"
    seat.saving.finish(WAIT_S)


def test_training_waits_for_no_disk_once_its_world_is_to_be_let_go(
    tmp_path: Path, held: Held
) -> None:
    """What comes to an end later is waited for in the next world."""
    seat = Seat(tmp_path)
    seat.saving.begin(seat.world, 4)
    assert held.writes.wait(WAIT_S)
    waits = threading.Thread(target=seat.saving.begin, args=(seat.world, 5), daemon=True)
    waits.start()
    seat.saving.interrupt(seat.world.generation)
    waits.join(WAIT_S / 2)
    assert not waits.is_alive()
    assert [saved.scalars.step for saved in seat.told(2)] == [4, 5]
    seat.saving.halt()
    threading.Timer(0.3, held.goes_on.set).start()
    seat.saving.begin(seat.world, 6)
    assert [(saved.scalars.step, saved.error) for saved in seat.told(3)[2:]] == [(6, "")]


def test_a_save_that_training_would_wait_for_does_not_begin_in_a_world_that_is_to_be_let_go(
    tmp_path: Path,
) -> None:
    seat = Seat(tmp_path)

    def check() -> None:
        raise CheckpointError("halted")

    with pytest.raises(CheckpointError, match="halted"):
        seat.saving.now(seat.world, 4, tmp_path, check)
    assert seat.said == []


class Line:
    """To a store service in this process. asked: the operations."""

    def __init__(self) -> None:
        self.service = StoreService(FakeClock(), gather_s=0.0)
        self.asked: list[str] = []
        self._answers: dict[int, Future[StoreReply]] = {}

    def open_store(self) -> ControlStore:
        return ControlStore(self._ask, WAIT_S)

    def _ask(self, request: StoreRequest) -> Future[StoreReply]:
        number = len(self.asked)
        self.asked.append(request.operation)
        answer = self._answers[number] = Future()
        numbered = request.model_copy(update={"number": number})
        self.service.ask(self, StoreAsks.of([(0, numbered)]))
        self.service.expire()
        return answer

    def post(self, parts: list[Part]) -> None:
        for answers in (decode(part.data) for part in parts):
            assert isinstance(answers, StoreAnswers)
            for _, reply in answers.replies():
                self._answers.pop(reply.number).set_result(reply)


@pytest.fixture
def line() -> Iterator[Line]:
    made = Line()
    yield made
    made.service.close()


def key_of(rank: int) -> str:
    return f"p/{rank}"


class TwoRanks(PlainWriter):
    """Those of two, of which the first waits for the other one's part, as `PartWriter` does."""

    def __init__(self, world: Any, scalars: Any, partial: Path, peers: Any) -> None:
        super().__init__(world, scalars, partial, peers)
        self._rank, self._peers = world.worker, peers

    def write(self, state: Any) -> Any:
        if self._rank == 0:
            raise CheckpointError("; ".join(self._peers.problems(2)))
        return super().write(state)


class NoWriter(PlainWriter):
    """Of a module that does not say where all of a tensor lies."""

    def __init__(self, world: Any, *others: Any) -> None:
        super().__init__(world, *others)
        raise PlanError("nobody knows where")


@pytest.mark.parametrize("gives_up", ["its disk hangs", "a handoff hurries", "it has no writer"])
def test_who_gives_a_checkpoint_up_has_rank_0_wait_no_longer(
    gives_up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: Line, held: Held
) -> None:
    """Which would write no other one meanwhile, and have training wait for it."""
    monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", TwoRanks)
    first, second = (Seat(tmp_path, 1e4, layout=Layout(1, 1, 2), rank=rank) for rank in (0, 1))
    for seat in (first, second):
        seat.context.open_store = line.open_store
    first.saving.begin(first.world, 8)
    wait_until(lambda: line.asked == ["wait"])
    if gives_up == "its disk hangs":
        second.saving.begin(second.world, 4)
        assert held.writes.wait(WAIT_S)
        second.saving._waited_in_vain = True
        second.saving.begin(second.world, 8)
        why = "the checkpoint before is still being written"
    elif gives_up == "a handoff hurries":
        second.saving.begin(second.world, 8)
        assert held.writes.wait(WAIT_S)
        second.saving.finish(0.0)
        why = "given up: the run has waited 0 s for it"
    else:
        monkeypatch.setattr("liver_hpc.checkpoint.parts.PartWriter", NoWriter)
        second.saving.begin(second.world, 8)
        why = "nobody knows where"
    (saved,) = first.told(1)
    assert saved.error == f"rank 1: {why}"
    assert second.told(1)[0].error == why


@pytest.mark.parametrize("ranks", [4, 64])
def test_what_became_of_all_parts_is_asked_with_as_few_requests_as_of_some(
    line: Line, ranks: int
) -> None:
    peers = Peers(line.open_store, key_of, 0.0)
    for rank in range(1, ranks):
        peers.tell(rank, "the disk is full" if rank == 2 else "")
    line.asked.clear()
    assert peers.problems(ranks) == ["rank 2: the disk is full"]
    assert line.asked == ["wait", "get", "delete"]
    assert not line.service._values, "nothing is left in the store"


def test_a_part_of_which_nobody_tells_is_named(line: Line) -> None:
    peers = Peers(line.open_store, key_of, 0.0)
    for rank in (1, 3):
        peers.tell(rank, "")
    with pytest.raises(DeadlineError, match=r"waited 0 s; missing keys \['p/2'\]$"):
        peers.problems(4)


class Interrupted(Line):
    """Whose coordinator is away for some requests, and the next one's store is empty."""

    def __init__(self, away: int) -> None:
        super().__init__()
        self.away = away

    def _ask(self, request: StoreRequest) -> Future[StoreReply]:
        if self.away == 0:
            return super()._ask(request)
        self.away -= 1
        answer: Future[StoreReply] = Future()
        answer.set_result(StoreReply(error=NO_STORE))
        return answer


def test_who_may_wait_for_a_coordinator_asks_the_next_one() -> None:
    line = Interrupted(away=4)
    away = Peers(line.open_store, key_of, 600.0, away_s=WAIT_S)
    hears = threading.Thread(target=lambda: found.append(away.problems(2)), daemon=True)
    found: list[list[str]] = []
    hears.start()
    Peers(line.open_store, key_of, 600.0, away_s=WAIT_S).tell(1, "the disk is full")
    hears.join(WAIT_S)
    line.service.close()
    assert found == [["rank 1: the disk is full"]]


def test_others_do_not_ask_the_next_one() -> None:
    line = Interrupted(away=1)
    with pytest.raises(StoreAway, match="no coordinator just now"):
        Peers(line.open_store, key_of, 600.0).problems(2)
    line.service.close()


def test_who_has_met_a_break_waits_for_slow_ranks_as_long_as_before() -> None:
    line, limits_s = Interrupted(away=1), list[float]()
    ask = line._ask

    def noted(request: StoreRequest) -> Future[StoreReply]:
        if request.operation == "wait":
            limits_s.append(request.timeout_s)
            line.service.put(key_of(1), "\n")
        return ask(request)

    line._ask = noted  # type: ignore[method-assign]
    assert Peers(line.open_store, key_of, 600.0, away_s=WAIT_S).problems(2) == []
    assert limits_s == [600.0, 600.0]
    line.service.close()


def test_peers_that_were_closed_are_not_asked() -> None:
    store = Silent()
    peers = Peers(lambda: store, key_of, 1.0)
    peers.close()
    for ask in (lambda: peers.problems(2), lambda: peers.tell(1, "")):
        with pytest.raises(CheckpointError, match="a peer was lost"):
            ask()
    assert store.closed.is_set()
    assert not store.waits.is_set()
