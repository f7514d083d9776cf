"""Strangers at gloo's ports, before a group has met and afterwards: a process of their own; two
threads of this one play the members."""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import LiverError, TransferError
from liver_hpc.transport import gloo_sockets
from liver_hpc.world.device import Device
from liver_hpc.world.network import Network
from tests.unit.world.test_groups import in_two_threads

CPU = Device(torch.device("cpu"))
NUMBERS = [struct.pack("<q", number) for number in range(64)]
"""One of them is a pair's in a group of two."""
STRANGERS = """
import json, socket, sys
came = []
for line in sys.stdin:
    told = json.loads(line)
    for said in told.get("say", []):
        came.append(socket.create_connection(told["to"], timeout=5.0))
        came[-1].sendall(bytes.fromhex(said))
    heard = []
    for one in came if "hear" in told else []:
        heard.append("")
        try:
            while part := one.recv(4096):
                heard[-1] += part.hex()
        except ConnectionError:
            pass
        except TimeoutError:
            heard[-1] = "still waits"
    print(json.dumps(heard), flush=True)
"""

pytestmark = pytest.mark.timeout(60)


class Strangers:
    """Where they have come to, and said what; what each has heard until it was shut out."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def _tell(self, **told: Any) -> list[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(told) + "\n")
        self._process.stdin.flush()
        return list(json.loads(self._process.stdout.readline()))

    def come(self, address: tuple[str, int], said: list[bytes]) -> None:
        self._tell(to=address, say=[each.hex() for each in said])
        time.sleep(0.2)  # gloo's thread takes in what was said

    def heard(self) -> list[str]:
        return self._tell(hear=True)


@pytest.fixture
def strangers() -> Iterator[Strangers]:
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-S", "-c", STRANGERS], stdin=pipe, stdout=pipe, text=True
    ) as process:
        yield Strangers(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(10.0)


class Besieged(Network):
    """Strangers come to a new port of gloo's before any member can."""

    def __init__(self, strangers: Strangers, said: list[bytes]) -> None:
        super().__init__(CPU, "127.0.0.1")
        self._strangers = strangers
        self._said = said
        self.address = ("", 0)

    def _new_gloo_devices(self) -> list[Any]:
        before = _listening()
        devices = super()._new_gloo_devices()
        (self.address,) = _listening() - before
        self._strangers.come(self.address, self._said)
        return devices


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("tcp")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def reduced(backend: Any) -> float:
    tensor = torch.ones(1)
    backend.allreduce([tensor]).wait()
    return float(tensor.item())


def test_who_takes_the_place_of_a_peer_hears_no_tensor_and_the_group_does_not_come_to_be(
    strangers: Strangers,
) -> None:
    """gloo alone takes such a stranger for the peer, and sends it what is to be reduced."""
    networks, store = [Besieged(strangers, NUMBERS) for _ in range(2)], dist.HashStore()

    def connect(worker: int) -> str:
        try:
            reduced(networks[worker].open_backend(store, worker, 2, 5.0))
        except (TransferError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    complaints = in_two_threads(connect)
    for said in complaints:
        assert re.match("TransferError: the 1 connections of a group .*6[4-9] strangers came", said)
    assert set(strangers.heard()) == {""}


@pytest.mark.parametrize(
    "said",
    [
        pytest.param([b""] * 5, id="silent"),
        pytest.param([b"\0\0\0"] * 5, id="half a number"),
        pytest.param([struct.pack("<q", 2**40 + n) for n in range(5)], id="no pair's number"),
        pytest.param([b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 300], id="garbage"),
    ],
)
def test_others_change_nothing(
    said: list[bytes], strangers: Strangers, caplog: pytest.LogCaptureFixture
) -> None:
    networks, store = [Besieged(strangers, said) for _ in range(2)], dist.HashStore()
    backends = in_two_threads(lambda w: networks[w].open_backend(store, w, 2, 10.0))
    assert in_two_threads(lambda w: reduced(backends[w])) == [2.0, 2.0]
    assert strangers.heard() == [""] * 2 * len(said)
    assert f"{len(said)} strangers at gloo's ports were shut out" in caplog.text


def test_nobody_comes_in_once_the_group_has_met(strangers: Strangers) -> None:
    networks, store = [Besieged(strangers, []) for _ in range(2)], dist.HashStore()
    backends = in_two_threads(lambda w: networks[w].open_backend(store, w, 2, 10.0))
    for network in networks:
        with pytest.raises(TimeoutError):
            socket.create_connection(network.address, timeout=0.5)
    assert in_two_threads(lambda w: reduced(backends[w])) == [2.0, 2.0]


class Beside(Network):
    """Another thread, as NCCL's may, begins to listen while gloo does: so many times."""

    def __init__(self, times: int) -> None:
        super().__init__(CPU, "127.0.0.1")
        self.others: list[socket.socket] = []
        self._times = times

    def _new_gloo_devices(self) -> list[Any]:
        if len(self.others) < self._times:
            self.others.append(socket.create_server(("127.0.0.1", 0)))
        return super()._new_gloo_devices()


def test_what_another_thread_listens_at_meanwhile_is_not_taken_for_gloo_s() -> None:
    """Else it would be locked, and NCCL's members did not come in."""
    networks, store = [Beside(times=1) for _ in range(2)], dist.HashStore()
    backends = in_two_threads(lambda w: networks[w].open_backend(store, w, 2, 10.0))
    assert in_two_threads(lambda w: reduced(backends[w])) == [2.0, 2.0]
    for network in networks:
        (other,) = network.others
        with other, socket.create_connection(other.getsockname(), timeout=2.0):
            pass


def test_who_never_tells_gloo_s_ports_from_others_says_so() -> None:
    network, watch, before = Beside(times=100), gloo_sockets.Watch(), _listening()
    with pytest.raises(TransferError, match="2 sockets of this process began to listen as gloo"):
        watch.listen(network._new_gloo_devices)
    for other in network.others:
        other.close()
    assert _listening() == before, "the devices are closed"


def test_who_waits_for_a_silent_member_as_they_connect_hears_that_it_is_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    networks, store = [Network(CPU, "127.0.0.1") for _ in range(2)], dist.HashStore()
    tried, ended, off_s = gloo_sockets._tried, threading.Event(), time.monotonic() + 1.0

    def is_silent(backend: Any, size: int, check: Callable[[], None]) -> str:
        if backend.rank() == 0:
            return tried(backend, size, check)
        assert ended.wait(20.0)
        return "it was silent"

    def check() -> None:
        if time.monotonic() > off_s:
            raise LiverError("it is off")

    def connect(worker: int) -> str:
        try:
            networks[worker].open_backend(store, worker, 2, 20.0, check=check)
        except LiverError as error:
            ended.set()
            return str(error)
        return ""

    monkeypatch.setattr(gloo_sockets, "_tried", is_silent)
    first, second = in_two_threads(connect)
    assert first == "it is off"
    assert "it was silent" in second
    assert time.monotonic() < off_s + 5.0


def test_cpu_time_of_what_crosses_is_that_of_the_threads_of_gloo() -> None:
    networks, store = [Network(CPU, "127.0.0.1") for _ in range(2)], dist.HashStore()
    backends = in_two_threads(lambda w: networks[w].open_backend(store, w, 2, 10.0))
    idle = [Network(CPU, "127.0.0.1").open_backend(dist.HashStore(), 0, 1, 10.0)]
    began_s = time.process_time()  # the first of the clocks, and the last: they go on between
    before_s = [gloo_sockets.cpu_s(one) for one in backends + idle]

    def cross(worker: int) -> float:
        memory = torch.ones(1 << 26)
        began_s = time.thread_time()
        way = backends[worker].send if worker == 0 else backends[worker].recv
        way([memory], 1 - worker, 7).wait()
        return time.thread_time() - began_s

    own_s = sum(in_two_threads(cross))
    sent_s, received_s, idle_s = (
        gloo_sockets.cpu_s(one) - was_s
        for one, was_s in zip(backends + idle, before_s, strict=True)
    )
    assert sent_s + received_s + own_s <= time.process_time() - began_s
    assert received_s > 0.01, "a quarter of a gigabyte was copied out of the kernel"
    assert idle_s < 0.01


def test_a_thread_that_has_ended_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another's, which had begun while the group connected."""

    class Backend:
        pass

    ended, backend = threading.Thread(target=list), Backend()
    ended.start()
    ended.join()
    while Path(f"/proc/self/task/{ended.native_id}").exists():
        time.sleep(0.001)
    monkeypatch.setitem(gloo_sockets._threads, backend, {str(ended.native_id)})
    assert gloo_sockets.cpu_s(backend) == 0.0


def test_the_number_of_a_closed_connection_may_be_a_file_s(tmp_path: Path) -> None:
    with (tmp_path / "part").open("w") as file:
        number = file.fileno()
        before = psutil.Process().num_fds()
        with gloo_sockets._opened(gloo_sockets.Socket(number, os.fstat(number).st_ino)) as its:
            assert its is None
        assert psutil.Process().num_fds() == before


class GoneOnceItHasTold(dist.Store):  # type: ignore[misc,name-defined]
    """Of a member that tells where it listens, and ends."""

    def __init__(self, store: Any) -> None:
        super().__init__()
        self._store = store

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        raise RuntimeError("I am gone")


@pytest.mark.parametrize("addresses", [("127.0.0.1", "127.0.0.2"), ("127.0.0.2", "127.0.0.1")])
@pytest.mark.parametrize(("timeout_s", "off_s"), [(60.0, 1.0), (1.0, 60.0)])
def test_who_connects_to_a_member_that_is_gone_hears_that_it_is_off_and_leaves_nothing(
    addresses: tuple[str, str], timeout_s: float, off_s: float
) -> None:
    """Which of two members waits for the other to come, gloo tells by their addresses: that one
    waits five times as long as it is told."""
    networks, store = [Network(CPU, address) for address in addresses], dist.HashStore()
    began_s, before = time.monotonic(), _listening()

    def check() -> None:
        if time.monotonic() > began_s + off_s:
            raise LiverError("it is off")

    with pytest.raises(RuntimeError, match="I am gone"):
        networks[1].open_backend(GoneOnceItHasTold(store), 1, 2, timeout_s)
    with pytest.raises((LiverError, RuntimeError)) as told:
        networks[0].open_backend(store, 0, 2, timeout_s, "workers [0, 3]", check)
    assert time.monotonic() < began_s + 5.0
    assert re.search("it is off|waited 1 s for workers.*0, 3|Connection refused", str(told.value))
    del told  # in whose traceback gloo's device is
    gc.collect()
    deadline = Deadline.after(SystemClock(), 5.0, "the thread that connects, and its port")
    poll_until(lambda: "connect" not in {each.name for each in threading.enumerate()}, deadline)
    poll_until(lambda: _listening() <= before, deadline)
