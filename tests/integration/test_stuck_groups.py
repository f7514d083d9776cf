"""Who waits in a group for a peer that is silent is freed from outside, and who computes for it."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_hpc.errors import TransferError
from tests.integration.processes import WorkerProcess, closable, run_workers
from tests.integration.random_tokens import tiny_recipe
from tests.integration.toys import build_world

GIVES_UP_S, AT_ONCE_S = 20.0, 1.0

of_gloo = pytest.mark.skipif(torch.cuda.is_available(), reason="gloo's, of memory of the host")


def _await_all(process: WorkerProcess, workers: int) -> None:
    """Nobody closes a connection before all have seen what they were to see."""
    process.store.add("done", 1)
    while process.store.add("done", 0) < workers:
        time.sleep(0.02)


def _wait_in_groups(process: WorkerProcess) -> dict[str, float]:
    """The first worker waits in two groups that the second one is in, and never comes. How long it
    waited, by group, when its second world was aborted in vain and in earnest."""

    from liver_hpc.world.groups import GroupBook

    book = GroupBook(1, process.worker, process.device)
    kept = book.group((0, 1))
    book.connect(process.network, process.store, GIVES_UP_S)
    target = GroupBook(2, process.worker, process.device)
    target.group((0, 1))
    own = target.group((1, 0))
    target.connect(process.network, process.store, GIVES_UP_S, previous=book)
    waited_s = {}
    ones = torch.ones(1000, device=process.device.torch_device)
    if process.worker == 0:
        timers = [threading.Timer(at_s, target.abort, (at_s > 1,)) for at_s in (0.5, 2.0)]
        for timer in timers:
            timer.start()
        for name, group in (("own", own), ("kept", kept)):
            began_s = time.monotonic()
            try:
                group.process_group.allreduce([ones]).wait()
                process.device.synchronize()  # a late device waits, not the host
            except RuntimeError:
                pass
            waited_s[name] = time.monotonic() - began_s
    _await_all(process, 2)
    target.close()
    book.close()
    return waited_s


def test_an_abort_frees_whoever_waits_for_a_silent_peer(tmp_path: Path) -> None:
    """In a group that the source world has, too, only when that is to be built again."""
    waited_s, _ = run_workers(_wait_in_groups, 2, tmp_path)
    assert 0.4 < waited_s["own"] < 0.5 + AT_ONCE_S
    assert 1.0 < waited_s["kept"] < 1.5 + AT_ONCE_S


BIG_BYTES, RUN_S = 1 << 30, 60.0


def _lose_the_peer(process: WorkerProcess, wants: str) -> float:
    """The second worker is gone in the middle of what crosses. How long the first one waited since,
    until it failed and had closed its groups."""

    from liver_hpc.clock import Deadline, SystemClock
    from liver_hpc.transport import gloo_waits
    from liver_hpc.transport.wire import GlooWire, Parcel
    from liver_hpc.world.groups import GroupBook

    book = GroupBook(1, process.worker, process.device)
    group = book.group((0, 1))
    book.connect(process.network, process.store, RUN_S)
    memory = torch.ones(BIG_BYTES, dtype=torch.uint8)
    sends = (wants == "receives") == (process.worker == 1)

    def cross() -> None:
        if wants == "reduces":
            group.process_group.allreduce([memory]).wait()
        elif wants == "wire":
            wire = GlooWire(group.backend, {0: 0, 1: 1}, memory.device)
            threading.Timer(1.0, wire.close).start()
            deadline = Deadline.after(SystemClock(), RUN_S, "the peer")
            wire.exchange([Parcel(1 - process.worker, 0, memory, sends)], deadline)
        else:
            way = group.process_group.send if sends else group.process_group.recv
            way([memory], 1 - process.worker, 0).wait()

    if process.worker == 1:
        breaks = threading.Timer(0.05, book.abort, (True,))
        breaks.start()
        with pytest.raises((RuntimeError, TransferError)), gloo_waits.within(book):
            cross()
        return 0.0
    if wants != "wire":
        threading.Timer(1.0, book.abort, (True,)).start()
    began_s = time.monotonic()
    with pytest.raises((RuntimeError, TransferError)), gloo_waits.within(book):
        cross()
    book.close()
    return time.monotonic() - began_s


@of_gloo
@pytest.mark.parametrize("wants", ["sends", "receives", "reduces", "wire"])
def test_what_is_crossing_when_a_connection_breaks_is_not_waited_for(
    wants: str, tmp_path: Path
) -> None:
    """gloo tells nobody of it before the group's timeout."""
    waited_s, _ = run_workers(_lose_the_peer, 2, tmp_path, wants)
    assert waited_s < RUN_S / 3


def _lose_one_of_two_peers(process: WorkerProcess) -> float:
    """As "wire" above, but nobody here closes anything, and a third worker stays."""

    from liver_hpc.clock import Deadline, SystemClock
    from liver_hpc.transport.wire import GlooWire, Parcel
    from liver_hpc.world.groups import GroupBook

    book = GroupBook(1, process.worker, process.device)
    group = book.group((0, 1, 2))
    book.connect(process.network, process.store, RUN_S)
    wire = GlooWire(group.backend, {0: 0, 1: 1, 2: 2}, torch.device("cpu"))
    began_s = time.monotonic()
    if process.worker < 2:
        memory = torch.ones(BIG_BYTES, dtype=torch.uint8)
        deadline = Deadline.after(SystemClock(), RUN_S, "the peer")
        if process.worker == 1:
            threading.Timer(0.05, wire.close).start()
        with pytest.raises(TransferError, match=f"worker {1 - process.worker}"):
            wire.exchange([Parcel(1 - process.worker, 0, memory, process.worker == 0)], deadline)
    waited_s = time.monotonic() - began_s
    _await_all(process, 3)
    wire.close()
    book.close()
    return waited_s


@of_gloo
def test_a_message_ends_with_the_connection_that_it_crosses(tmp_path: Path) -> None:
    waited_s, *_ = run_workers(_lose_one_of_two_peers, 3, tmp_path)
    assert waited_s < RUN_S / 3


def _wait_for_what_gloo_forgot(process: WorkerProcess) -> tuple[float, float]:
    """As where gloo has taken an operation off its lists: nobody ends it. How long the first worker
    waited in a collective, and closed its groups."""

    from liver_hpc.transport import gloo_sockets, gloo_waits
    from liver_hpc.world.groups import GroupBook

    book = GroupBook(1, process.worker, process.device)
    group = book.group((0, 1))
    book.connect(process.network, process.store, 6.0)
    if process.worker == 1:
        time.sleep(8.0)
        book.close()
        return 0.0, 0.0
    gloo_sockets._shut = lambda _connections: None  # type: ignore[assignment]
    gloo_sockets.are_closed = bool  # type: ignore[assignment]
    work = group.process_group.allreduce([torch.ones(1000)])
    threading.Timer(0.5, book.abort, (True,)).start()
    began_s = time.monotonic()
    with pytest.raises(TransferError, match="closed"), gloo_waits.within(book):
        work.wait()
    waited_s = time.monotonic() - began_s
    del work, group
    book.close()
    return waited_s, time.monotonic() - began_s - waited_s


@of_gloo
def test_a_collective_that_never_ends_is_neither_waited_for_nor_in_the_way(tmp_path: Path) -> None:
    (waited_s, closed_s), _ = run_workers(_wait_for_what_gloo_forgot, 2, tmp_path)
    assert waited_s < 3.0
    assert closed_s < AT_ONCE_S


def _prepare_for_a_silent_peer(process: WorkerProcess, path: str) -> float:
    """The second worker connects, and has nothing to say over the transfer's connections. How long
    PREPARE of the first one went on after the attempt was called off."""
    import torch.distributed as dist

    from liver_hpc.errors import LiverError
    from liver_hpc.handoff import prepare as preparing
    from liver_hpc.handoff.session import Session
    from liver_hpc.layout.coordinates import Layout, RankMap
    from liver_hpc.protocol.messages import Abort, Prepare, WireRankMap
    from liver_hpc.transport.wire import GlooWire

    store = closable(dist.FileStore)
    context = process.context(tiny_recipe(), lambda: store(path, -1))
    one = Layout(1, 1, 1)
    source, target = RankMap(one, (1,)), RankMap(one, (0,))
    message = Prepare(
        generation=1,
        source=WireRankMap.of(source),
        source_generation=0,
        target=WireRankMap.of(target),
    )
    session = Session(message, context)
    called_off_s: list[float] = []

    def call_off() -> None:
        called_off_s.append(time.monotonic())
        session.deliver(Abort(generation=1, reason="nobody wants it any more"))

    plain_meet = GlooWire.meet

    def meet(wire: Any, peers: Any, deadline: Any) -> None:
        if process.worker == 0:
            threading.Timer(1.0, call_off).start()
            plain_meet(wire, peers, deadline)
        _await_all(process, 2)

    GlooWire.meet = meet  # type: ignore[method-assign]
    try:
        preparing.prepare(session, None).drop()
    except LiverError:
        _await_all(process, 2)
        return time.monotonic() - called_off_s[0]
    return -1.0


def test_prepare_ends_with_its_attempt_whatever_its_peers_do(tmp_path: Path) -> None:
    ended_s, _ = run_workers(_prepare_for_a_silent_peer, 2, tmp_path, str(tmp_path / "handoff"))
    assert 0.0 <= ended_s < AT_ONCE_S


def test_a_world_whose_groups_are_aborted_computes_no_further_micro_batch(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny_recipe()
    world = build_world(recipe, device)
    plain, computed = recipe.loss, []

    def loss(model: Any, samples: Any) -> Any:
        computed.append(len(samples))
        if len(computed) == 2:
            world.book.abort(shared=True)
        return plain(model, samples)

    monkeypatch.setattr(recipe, "loss", loss)
    with pytest.raises(TransferError, match=f"generation {world.generation} were aborted"):
        world.forward_backward(0)
    assert len(computed) == 2
    world.close()
