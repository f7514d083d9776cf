"""The keeper lives as long as its coordinator, and not without one."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.config.load import dump_run
from liver_hpc.coordinator.connections import ConnectionServer, Inbox
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.node.keeper import keep
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, write_private_json
from liver_hpc.run.secret import create_secret
from tests.unit.config.runs import minimal

pytestmark = pytest.mark.timeout(30)

COORDINATOR_S = 1.0


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    create_secret(tmp_path / "secret")
    config = minimal(deadlines={"coordinator_s": COORDINATOR_S})
    (tmp_path / "run.yaml").write_text(dump_run(config))
    return tmp_path


@pytest.fixture
def server(run_directory: Path) -> Iterator[ControlServer]:
    secret = bytes.fromhex((run_directory / "secret").read_text(encoding="ascii"))
    connections = ConnectionServer(Inbox(), StoreService(SystemClock()), control_s=0.2)
    server = ControlServer("127.0.0.1", secret, connections.handle)
    yield server
    server.close()


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("liver_hpc.node.keeper.CONNECT_S", 0.2)


def announce(run_directory: Path, server: ControlServer) -> None:
    host, port = server.address
    write_private_json(run_directory / COORDINATOR_FILE, {"host": host, "port": port, "pid": 1})


class Kept:
    """A keeper in a thread. how: None where the run is over."""

    def __init__(self, run_directory: Path) -> None:
        self.ended = threading.Event()
        self.how: LiverError | None = None
        self._run_directory = run_directory
        threading.Thread(target=self._live, daemon=True).start()

    def _live(self) -> None:
        try:
            keep(self._run_directory, "7")
        except LiverError as error:
            self.how = error
        self.ended.set()


def test_it_stays_until_no_coordinator_is_left(run_directory: Path, server: ControlServer) -> None:
    announce(run_directory, server)
    kept = Kept(run_directory)
    assert not kept.ended.wait(0.6), "held open beyond the greeter's first patience"
    began_s = time.monotonic()
    server.close()
    assert kept.ended.wait(5.0)
    assert time.monotonic() - began_s >= COORDINATOR_S
    assert isinstance(kept.how, DeadlineError)


def test_it_goes_over_to_the_next_coordinator(run_directory: Path, server: ControlServer) -> None:
    announce(run_directory, server)
    kept = Kept(run_directory)
    secret = bytes.fromhex((run_directory / "secret").read_text(encoding="ascii"))
    connections = ConnectionServer(Inbox(), StoreService(SystemClock()), control_s=5.0)
    another = ControlServer("127.0.0.1", secret, connections.handle)
    assert not kept.ended.wait(0.2)
    server.close()
    announce(run_directory, another)
    assert not kept.ended.wait(2 * COORDINATOR_S)
    Outcome("finished", "", 3).write(run_directory)
    another.close()
    assert kept.ended.wait(5.0)
    assert kept.how is None


def test_nodes_that_are_granted_while_there_is_no_coordinator_are_kept_for_the_next_one(
    run_directory: Path, server: ControlServer
) -> None:
    kept = Kept(run_directory)
    assert not kept.ended.wait(COORDINATOR_S / 2)
    announce(run_directory, server)
    assert not kept.ended.wait(COORDINATOR_S)
    server.close()


def test_without_a_coordinator_it_gives_up(run_directory: Path, server: ControlServer) -> None:
    with pytest.raises(DeadlineError, match="waited 1 s for the coordinator of"):
        keep(run_directory, "7")
    announce(run_directory, server)
    server.close()  # the file is left of a coordinator that was killed
    with pytest.raises(DeadlineError, match="the coordinator of"):
        keep(run_directory, "7")


def test_one_that_begins_is_waited_for(run_directory: Path, server: ControlServer) -> None:
    """It reads what the last one has left, however long that has been running."""
    with claim_epoch(run_directory).shown():
        kept = Kept(run_directory)
        assert not kept.ended.wait(3 * COORDINATOR_S)
    announce(run_directory, server)
    assert not kept.ended.wait(2 * COORDINATOR_S)
    server.close()
    assert kept.ended.wait(4 * COORDINATOR_S)
    assert isinstance(kept.how, DeadlineError)


def test_a_stranger_in_its_place_is_no_coordinator(
    run_directory: Path, server: ControlServer
) -> None:
    announce(run_directory, server)
    (run_directory / "secret").unlink()
    create_secret(run_directory / "secret")
    with pytest.raises(LiverError):
        keep(run_directory, "7")


def test_one_that_does_not_answer_keeps_it_from_no_other(
    run_directory: Path, server: ControlServer
) -> None:
    """Nor does a file that cannot be read now."""
    config = minimal(deadlines={"coordinator_s": COORDINATOR_S, "control_s": 0.3})
    (run_directory / "run.yaml").write_text(dump_run(config))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here = dict(zip(("host", "port"), silent.getsockname(), strict=True))
        write_private_json(run_directory / COORDINATOR_FILE, {**here, "pid": 1})
        kept = Kept(run_directory)
        assert not kept.ended.wait(0.5)
        (run_directory / COORDINATOR_FILE).unlink()
        (run_directory / COORDINATOR_FILE).mkdir()
        assert not kept.ended.wait(0.5)
        (run_directory / COORDINATOR_FILE).rmdir()
        announce(run_directory, server)
        assert not kept.ended.wait(2 * COORDINATOR_S)
        Outcome("finished", "", 3).write(run_directory)
        server.close()
        assert kept.ended.wait(2.0)
    assert kept.how is None
