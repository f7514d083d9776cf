"""The keeper lives as long as its coordinator, and not without one."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_hpc.coordinator.connections import ConnectionServer, Inbox
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.node.keeper import keep
from liver_hpc.rendezvous.channel import ControlServer
from liver_hpc.run.outcome import COORDINATOR_FILE, write_private_json
from liver_hpc.run.secret import create_secret

pytestmark = pytest.mark.timeout(30)


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    create_secret(tmp_path / "secret")
    return tmp_path


@pytest.fixture
def server(run_directory: Path) -> Iterator[ControlServer]:
    secret = bytes.fromhex((run_directory / "secret").read_text(encoding="ascii"))
    connections = ConnectionServer(Inbox(), StoreService(), control_s=0.2)
    server = ControlServer("127.0.0.1", secret, connections.handle)
    yield server
    server.close()


def announce(run_directory: Path, server: ControlServer) -> None:
    host, port = server.address
    write_private_json(run_directory / COORDINATOR_FILE, {"host": host, "port": port, "pid": 1})


def test_it_stays_until_the_coordinator_is_gone(run_directory: Path, server: ControlServer) -> None:
    announce(run_directory, server)
    ended = threading.Event()

    def live() -> None:
        keep(run_directory, "7", limit_s=5.0)
        ended.set()

    threading.Thread(target=live, daemon=True).start()
    assert not ended.wait(0.6), "held open beyond the greeter's first patience"
    server.close()
    assert ended.wait(5.0)


def test_without_a_coordinator_it_gives_up(run_directory: Path, server: ControlServer) -> None:
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for the coordinator of"):
        keep(run_directory, "7", limit_s=0.2)
    announce(run_directory, server)
    server.close()  # the file is left of a coordinator that was killed
    with pytest.raises(DeadlineError, match="the coordinator of"):
        keep(run_directory, "7", limit_s=0.2)


def test_a_stranger_in_its_place_is_no_coordinator(
    run_directory: Path, server: ControlServer
) -> None:
    announce(run_directory, server)
    (run_directory / "secret").unlink()
    create_secret(run_directory / "secret")
    with pytest.raises(LiverError):
        keep(run_directory, "7", limit_s=5.0)
