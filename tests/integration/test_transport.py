"""The transport over real process groups: gloo between processes of this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import TransferError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire
from tests.unit.layout.models import TIED
from tests.unit.transport.conformance import (
    LONG_S,
    SMALL,
    Failed,
    Member,
    TransportConformance,
    stream_failure,
)

pytestmark = pytest.mark.timeout(180)


def _child(worker: int, orders: Connection, barriers: dict[int, Any]) -> None:
    """Runs scenarios until the parent hangs up."""
    torch.set_num_threads(1)
    while True:
        try:
            scenario, workers, store_path, arguments = orders.recv()
        except EOFError:
            return
        try:
            answer, failure = (
                _scenario(worker, workers, store_path)(scenario, barriers[workers], arguments),
                "",
            )
        except BaseException:  # noqa: BLE001 - shown by the parent
            answer, failure = None, traceback.format_exc()
        orders.send((answer, failure))


def _scenario(worker: int, workers: int, store_path: str) -> Callable[..., Any]:
    import torch.distributed as dist

    # Group ranks that are not the worker ids.
    ranks = {member: (member + 1) % workers for member in range(workers)}

    def connect(model: ModelSpec, handoff: HandoffSection) -> Transport:
        wire = group_wire(dist.group.WORLD, ranks, torch.device("cpu"))
        return Transport(wire, model, handoff)

    def depart() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def run(scenario: Callable[..., Any], barrier: Any, arguments: tuple[Any, ...]) -> Any:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store_path, workers),
            rank=ranks[worker],
            world_size=workers,
            timeout=timedelta(seconds=LONG_S),
        )
        # A member that leaves while others still connect would fail them.
        barrier.wait()
        try:
            return scenario(Member(worker, connect, depart, barrier.wait), *arguments)
        finally:
            depart()

    return run


class Processes:
    """Worker processes that run one scenario after the other, each on a fresh group."""

    def __init__(self, workers: int, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._directory = directory
        self._scenarios = 0
        # Kept: the children find them by name.
        self._barriers = {
            size: context.Barrier(size, timeout=LONG_S) for size in range(2, workers + 1)
        }
        self._orders: list[Connection] = []
        self._children = []
        for worker in range(workers):
            ours, theirs = context.Pipe()
            child = context.Process(
                target=_child, args=(worker, theirs, self._barriers), daemon=True
            )
            child.start()
            theirs.close()
            self._orders.append(ours)
            self._children.append(child)

    def run(
        self, scenario: Callable[..., Any], workers: int, *arguments: Any, dying: int | None = None
    ) -> list[Any]:
        """The scenario's results by worker; without the one that is to die."""
        self._scenarios += 1
        if self._barriers[workers].broken:
            self._barriers[workers].reset()
        store_path = str(self._directory / f"store-{self._scenarios}")
        for orders in self._orders[:workers]:
            orders.send((scenario, workers, store_path, arguments))
        answers, failures = [], []
        for worker, orders in enumerate(self._orders[:workers]):
            if worker == dying:
                continue
            assert orders.poll(2 * LONG_S), f"worker {worker} does not answer"
            answer, failure = orders.recv()
            answers.append(answer)
            if failure:
                failures.append(f"worker {worker}:\n{failure}")
        assert not failures, "\n".join(failures)
        return answers

    def close(self) -> None:
        for orders in self._orders:
            orders.close()
        for child in self._children:
            child.kill()
            child.join()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    started = Processes(4, tmp_path_factory.mktemp("stores"))
    yield started
    started.close()


class TestGloo(TransportConformance):
    @pytest.fixture(autouse=True)
    def _in_processes(self, processes: Processes) -> None:
        self._processes = processes

    def run(self, scenario: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
        return self._processes.run(scenario, workers, *arguments)


def _peer_is_killed(member: Member) -> str:
    transport = member.connect(TIED, SMALL)
    member.meet()
    if member.worker == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    failed: Failed = stream_failure(member, transport)
    assert isinstance(failed.error, TransferError)
    assert failed.after_s < LONG_S / 4
    transport.close()
    return failed.text


def test_a_killed_peer_is_named_at_once(tmp_path: Path) -> None:
    processes = Processes(2, tmp_path)
    try:
        (text,) = processes.run(_peer_is_killed, 2, dying=1)
    finally:
        processes.close()
    assert "worker 1" in text
    assert "Connection" in text
