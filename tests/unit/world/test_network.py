"""How a group's backend comes to be where a peer is late, and what is read of NCCL's log."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.cluster.network import NCCL_LOG
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.world.network import NCCL_LOG_BYTES
from tests.late_device import LateDevice, LateNetwork, Machines


@pytest.fixture(autouse=True)
def environment_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_NONBLOCKING_TIMEOUT", "")
    monkeypatch.delenv("TORCH_NCCL_NONBLOCKING_TIMEOUT")


class Store:
    """The coordinator's, in which another member has come, or does not come."""

    def __init__(self, other_came: bool) -> None:
        self._other_came = other_came
        self._closed = threading.Event()

    def add(self, _key: str, amount: int) -> int:
        return amount + self._other_came

    def set(self, _key: str, _value: str) -> None: ...

    def wait(self, _keys: list[str], timeout: timedelta) -> None:
        if not self._other_came and self._closed.wait(timeout.total_seconds()):
            raise LiverError("the store is closed")

    def close(self) -> None:
        self._closed.set()


class Refusing:
    """What NCCL does where a communicator does not come to be."""

    aborted = False

    def allreduce(self, _tensors: list[Any]) -> Any:
        raise RuntimeError("NCCL timeout in: NCCLUtils.cpp:197")

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(("limit_s", "error"), [(0.0, DeadlineError), (60.0, RuntimeError)])
def test_a_group_that_is_late_names_its_peers(
    limit_s: float, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Refusing()
    network = LateNetwork(LateDevice(Machines(), 0))
    monkeypatch.setattr(network, "_new_nccl", lambda *_arguments: backend)
    with pytest.raises(error, match=r"workers \[0, 3\]" if limit_s == 0.0 else "NCCL timeout"):
        network.open_backend(Store(other_came=True), 0, 2, limit_s, "workers [0, 3]")
    assert backend.aborted


def test_who_waits_for_a_peer_that_does_not_come_is_freed_with_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In NCCL it would wait for as long as torch lets it, whatever else has happened. It has no
    stream yet, which others that connect meanwhile would be given, too."""
    backend, store = Refusing(), Store(other_came=False)
    network = LateNetwork(LateDevice(Machines(), 0))
    monkeypatch.setattr(network, "_new_nccl", lambda *_arguments: backend)
    threading.Timer(0.2, store.close).start()
    with pytest.raises(LiverError, match="the store is closed"):
        network.open_backend(store, 0, 2, 60.0, "workers [0, 3]")
    assert backend.aborted
    assert backend not in network._streams._of
    with pytest.raises(RuntimeError, match="NCCL timeout"):
        network.open_backend(Store(other_came=True), 0, 2, 60.0, "workers [0, 3]")
    assert backend in network._streams._of


@pytest.mark.parametrize(("name", "is_cut"), [("nccl-n1-7.log", True), ("mine.log", False)])
def test_a_long_log_of_nccl_is_read_once_and_cut(
    name: str, is_cut: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "logs" / name
    path.parent.mkdir()
    monkeypatch.setenv(NCCL_LOG, str(path))
    network = LateNetwork(LateDevice(Machines(), 0))
    with path.open("w", buffering=1) as nccl:  # which goes on where it was
        for text in ("one\n", "two\n" * (NCCL_LOG_BYTES // 4), "three\n", "four\n"):
            nccl.write(text)
            assert network._newly_logged() == text
    taken_bytes = path.stat().st_blocks * 512
    assert (taken_bytes < NCCL_LOG_BYTES // 8) == is_cut
    assert path.read_text().lstrip("\0").startswith("three" if is_cut else "one")
