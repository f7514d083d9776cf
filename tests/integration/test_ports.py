"""Strangers at every port that a real run listens at: it trains on as if nobody had come.

The ports are found, not known: each belongs to a row of the table in docs/explanation/security.md.
"""

from __future__ import annotations

import contextlib
import re
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from liver_hpc.cli.client import request
from liver_hpc.protocol.messages import Reply, ResizeRequest, StatusRequest, StopRequest
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, ChannelRefused, connect
from liver_hpc.rendezvous.handshake import (
    ANSWER_BYTES,
    GREETING,
    NONCE_BYTES,
    PROOF_BYTES,
)
from liver_hpc.report.store import RunRecords, read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.secret import read_secret
from tests.integration.elastic import losses
from tests.integration.runs import (
    ENDLESS,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_until,
    watch,
    worst_difference,
)
from tests.unit.rendezvous.test_channel import Relay, altered, said_again

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("unhurried_steps")]

ROWS = {
    "liver_hpc.worker.main": ("gloo's, one for each group", "gloo's, of snapshots"),
    "liver_hpc.rendezvous.mpi.endpoint accept": ("MPI's, of the acceptor",),
    "liver_hpc.rendezvous.mpi.endpoint connect": ("MPI's, of a joiner",),
    "liver_hpc.tracking.main": ("`/metrics`, ours",),
    "submitit.core._submit": ("control server, ours", "queue of the rendezvous, ours"),
}
"""The rows of the table by what is on the command line of who listens there."""
COORDINATOR = "submitit.core._submit"
WORKER = "liver_hpc.worker.main"
METRICS = "liver_hpc.tracking.main"
TABLE = Path(__file__).parents[2] / "docs/explanation/security.md"
GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 300, b"\x16\x03\x01" + bytes(500)]
NUMBERS = [struct.pack("<q", number) for number in range(64)]
"""What gloo's pairs say first."""
BESIEGED = "tests.integration.besieged:BesiegedGPT"


class Port(NamedTuple):
    role: str
    address: tuple[str, int]


def all_processes(run: RunDirectory) -> list[psutil.Process]:
    found = {process.pid: process for process in processes_of(run)}
    for process in list(found.values()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {child.pid: child for child in process.children(recursive=True)}
    return list(found.values())


def ports_of(run: RunDirectory) -> list[Port]:
    """Where any process of the run listens over TCP."""
    found = []
    for process in all_processes(run):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            line = " ".join(process.cmdline())
            role = next((role for role in ROWS if role in line), line)
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN:
                    found.append(Port(role, (one.laddr.ip, one.laddr.port)))
    return found


@contextmanager
def stranger(address: tuple[str, int], said: bytes = b"") -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=20.0) as came:
        came.sendall(said)
        yield came


def heard(came: socket.socket) -> bytes:
    """All that a stranger was told, until he was shut out; TimeoutError where he was not."""
    said = b""
    with contextlib.suppress(ConnectionError):
        while part := came.recv(4096):
            said += part
    return said


def attack_ours(address: tuple[str, int], secret: bytes) -> int:
    """Each stranger learns a challenge, and nothing else; returns how many came.

    The relays at the end are used by somebody who holds the secret: an overheard proof and frame
    are said again on a connection of their own.
    """
    greeting = len(GREETING) + NONCE_BYTES
    came = 0
    for said in GARBAGE:
        with stranger(address, said) as one:
            assert len(heard(one)) <= greeting
        came += 1
    for size in (len(GREETING), ANSWER_BYTES - 1):  # who leaves in between
        with stranger(address, (GREETING + bytes(ANSWER_BYTES))[:size]) as one:
            assert len(one.recv(greeting, socket.MSG_WAITALL)) == greeting
        came += 1
    with stranger(address) as silent, stranger(address, GREETING[:5]) as half:  # who stays
        assert len(heard(silent)) == len(heard(half)) == greeting
        came += 2
    with pytest.raises(ChannelRefused):
        connect(address, bytes(len(secret)), 10.0, "the run")
    came += 1
    frames: list[bytes] = []

    def listen(of_client: bool, so_far: list[bytes]) -> list[bytes]:
        frames.append(so_far[-1])
        return so_far[-1:]

    relay = Relay(address, listen)
    channel = connect(relay.address, secret, 10.0, "the run")
    channel.send(StatusRequest())
    with contextlib.suppress(ChannelClosed):  # the rendezvous's queue does not answer
        channel.receive(10.0)
    channel.close()
    relay.close()
    with stranger(address, relay.answer + frames[0]) as one:
        said = heard(one)
        assert said[greeting:] in (b"", bytes(PROOF_BYTES))  # no proof, and no reply
    return came + 1


def attack_metrics(address: tuple[str, int], token: str) -> None:
    """No token, a wrong one, garbage, silence: nothing is learned. Then who has it comes."""
    for said in (*GARBAGE, b"GET /metrics HTTP/1.1\r\nAuthorization: Bearer 0\r\n\r\n"):
        with stranger(address, said) as one:
            assert re.fullmatch(rb"(HTTP/1.1 40[01] [^:]*:(?s:.*)\r\n\r\n)?", heard(one))
    with stranger(address) as silent, stranger(address, b"GET /me") as half:
        assert heard(silent) == heard(half) == b""
    asked = f"GET /metrics HTTP/1.1\r\nAuthorization: Bearer {token}\r\n\r\n"
    with stranger(address, asked.encode()) as owner:
        assert b"liver_steps_done{" in heard(owner)


def attack_in_between(
    address: tuple[str, int], secret: bytes, change: Callable[[bool, list[bytes]], list[bytes]]
) -> None:
    """A command whose words somebody on the way changes or says again is not obeyed."""
    relay = Relay(address, change)
    channel = connect(relay.address, secret, 10.0, "the run")
    with contextlib.suppress(ChannelClosed):
        if change is altered:
            channel.send(StopRequest(checkpoint=False))
        else:
            ask(channel)
            channel.send(StatusRequest())  # twice on its way
            channel.receive(10.0)
    wait_until(lambda: is_closed(channel), 10.0, "the coordinator to hang up")
    channel.close()
    relay.close()


def is_closed(channel: Channel) -> bool:
    try:
        channel.receive(1.0)
    except ChannelClosed:
        return True
    return False


def ask(channel: Channel) -> None:
    channel.send(StatusRequest())
    reply = channel.receive(10.0)
    assert isinstance(reply, Reply)
    assert reply.ok


def turned_away(run: RunDirectory) -> Counter[str]:
    """What the coordinator's log says of strangers, once it has ended."""
    log = (run.path / "logs" / "coordinator.log").read_text()
    totals = map(int, re.findall(r"(\d+) strangers were turned away in all", log))
    changed = log.count("that was changed, repeated or left out")
    return Counter(strangers=sum(totals), changed=changed)


class Besiegers(threading.Thread):
    """Come to each port of a worker that was not there before, and say something there."""

    def __init__(self, run: RunDirectory, said: list[bytes]) -> None:
        super().__init__(daemon=True)
        self._run, self._said = run, said
        self._known = set(ports_of(run))
        self._came: list[socket.socket] = []
        self._enough = threading.Event()

    def run(self) -> None:
        while not self._enough.is_set():
            for port in set(ports_of(self._run)) - self._known:
                self._known.add(port)
                for said in self._said if port.role == WORKER else []:
                    self._say(port.address, said)

    def _say(self, address: tuple[str, int], said: bytes) -> None:
        with contextlib.suppress(OSError):  # it takes nobody any more
            came = socket.create_connection(address, timeout=0.3)
            self._came.append(came)
            came.sendall(said)

    def end(self) -> list[bytes]:
        """What they have heard."""
        self._enough.set()
        self.join(20.0)
        all_said = []
        for came in self._came:
            came.settimeout(0.1)
            try:
                all_said.append(heard(came))
            except TimeoutError:
                all_said.append(b"")
            came.close()
        return all_said


def resized(run: RunDirectory, besiegers: Besiegers) -> RunRecords:
    """To four workers while others come to their ports, and some steps further."""
    besiegers.start()
    request(run, ResizeRequest(workers=4))
    watch(run, lambda s: s.handoffs_done + s.handoffs_aborted > 0 and s.handoff is None, 150.0)
    said = besiegers.end()
    assert said
    assert set(said) == {b""}
    last = read_run(run.path).reconfigurations[-1].step
    watch(run, lambda status: status.step >= last + 4, 60.0)
    return stop_and_read(run)


def test_strangers_at_every_port_change_nothing(tmp_path: Path, quiet: RunRecords) -> None:
    """Ours refuse and count them; MPI's acceptor may be replaced; gloo's take nobody once their
    group has met. A handoff afterwards, with others at the ports of the new groups, succeeds."""
    sections = {"snapshots": {"every_steps": 1}, "tracking": {"openmetrics": {}}}
    run = start(run_config(tmp_path, ENDLESS, recipe=BESIEGED, **sections))
    watch(run, lambda status: status.step >= 5, 150.0)
    token = run.path / "tracking" / "openmetrics-token"
    wait_until(token.with_name("openmetrics.json").exists, 60.0, "the endpoint of metrics")
    secret, came = read_secret(run.secret_path), 0
    ports = ports_of(run)
    rows = [row for row in TABLE.read_text().splitlines() if row.startswith("| ")]
    for port in ports:
        assert port.address[0] == "127.0.0.1", port
        for name in ROWS[port.role]:
            assert any(row.startswith(f"| {name}") for row in rows), name
    found = Counter(port.role for port in ports)
    acceptor = "liver_hpc.rendezvous.mpi.endpoint accept"
    assert found == {COORDINATOR: 2, acceptor: 1, WORKER: 4, METRICS: 1}
    control = run.coordinator()
    assert control is not None

    for role, address in ports:
        if role == COORDINATOR:
            came += attack_ours(address, secret)
        elif role == METRICS:
            attack_metrics(address, token.read_text().strip())
        elif role == WORKER:
            with pytest.raises(TimeoutError):
                socket.create_connection(address, timeout=0.5)
        else:
            for said in (*GARBAGE, b"", b"\0"):
                with contextlib.suppress(OSError), stranger(address, said) as one:
                    one.settimeout(1.0)
                    heard(one)
    for change in (altered, said_again):
        attack_in_between((control.host, control.port), secret, change)

    records = resized(run, Besiegers(run, [*GARBAGE, b"", b"\0\0\0"]))
    assert [(each.outcome, each.digest_equal) for each in records.reconfigurations] == [
        ("completed", True)
    ]
    assert not records.recoveries
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
    before = records.reconfigurations[0].step
    assert losses(records)[:before] == losses(quiet)[:before]
    assert turned_away(run) == {"strangers": came, "changed": 2}
    wait_until(lambda: not all_processes(run), 20.0, f"the end of {all_processes(run)}")


@pytest.mark.long
def test_who_takes_a_place_in_a_new_group_hears_nothing_and_forges_nothing(
    tmp_path: Path, quiet: RunRecords
) -> None:
    """He makes the handoff fail. Training goes on as if he had not come."""
    run = start(run_config(tmp_path, ENDLESS, recipe=BESIEGED))
    watch(run, lambda status: status.step >= 5, 150.0)
    records = resized(run, Besiegers(run, NUMBERS))
    (attempt,) = records.reconfigurations
    assert attempt.outcome == "aborted"
    assert "strangers came" in attempt.detail
    assert worst_difference(losses(records), losses(quiet)) <= 1e-4
