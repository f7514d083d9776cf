"""Who is served the page, and who is refused or hung up on."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.dashboard import server as module
from liver_hpc.dashboard.page import Page
from liver_hpc.dashboard.server import Server, document
from liver_hpc.host import http_server
from liver_hpc.host.http_server import MOST_CONNECTIONS

TOKEN = "right-token"
LIMIT_S = 20.0


class Served:
    """A server in a thread of its own."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._ready.wait(LIMIT_S)

    async def _run(self) -> None:
        self.loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        self.page = Page()
        self.server = Server(self.page, FakeClock(), TOKEN, "127.0.0.1")
        _, self.port = await self.server.listen("127.0.0.1", 0)
        self._ready.set()
        await self._over.wait()
        self.server.close()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def publish(self, **parts: Any) -> None:
        def now() -> None:
            self.page.put(parts)
            self.page.publish()

        self.loop.call_soon_threadsafe(now)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), LIMIT_S)

    def answer(self, request: bytes) -> tuple[str, str]:
        """Head and body of the answer to a request, until it hangs up."""
        with closing(self.connect()) as connection:
            connection.sendall(request)
            data = b""
            while more := connection.recv(2**16):
                data += more
        head, _, body = data.decode().partition("\r\n\r\n")
        return head, body

    def get(self, path: str, host: str = "127.0.0.1", method: str = "GET") -> tuple[str, str]:
        return self.answer(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())

    def stream(self, last: str = "") -> Stream:
        connection = self.connect()
        head = f"GET /events?token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        head += f"Last-Event-ID: {last}\r\n" if last else ""
        connection.sendall(f"{head}\r\n".encode())
        return Stream(connection)


class Stream:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._file = connection.makefile("rb")
        self.id = ""
        while self._file.readline().strip():
            pass  # the head

    def event(self) -> dict[str, Any]:
        lines = []
        while line := self._file.readline().strip():
            lines.append(line.decode())
        assert lines, "it was hung up on"
        self.id = lines[0].removeprefix("id: ")
        told: dict[str, Any] = json.loads(lines[1].removeprefix("data: "))
        return told


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.close()


# ---- the page


def test_who_has_the_token_gets_the_page(served: Served) -> None:
    head, body = served.get(f"/?token={TOKEN}")
    assert head.startswith("HTTP/1.1 200 OK")
    assert body.startswith("<!doctype html>")
    assert "Set-Cookie" not in head
    assert "Cache-Control: no-store" in head
    assert "Referrer-Policy: no-referrer" in head


def test_the_page_may_use_nothing_but_itself(served: Served) -> None:
    head, body = served.get(f"/?token={TOKEN}")
    (policy,) = re.findall("Content-Security-Policy: (.*)\r", head)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert document()[1] == policy
    outside = [url for url in re.findall(r"https?://[^\"' ]+", body) if "w3.org" not in url]
    assert outside == []


@pytest.mark.parametrize(
    "host", ["127.0.0.1:9", "localhost", "LOCALHOST:80", "[::1]:7", "10.0.0.7"]
)
def test_this_machine_is_asked_for_by_any_of_its_names_at_any_port(
    served: Served, host: str
) -> None:
    """A tunnel may begin at another port than it ends at."""
    assert served.get(f"/?token={TOKEN}", host)[0].startswith("HTTP/1.1 200")


# ---- who is refused


@pytest.mark.parametrize("path", ["/", "/events", "/nothing"])
@pytest.mark.parametrize(
    "token", ["", "?token=", "?token=wrong", f"?token={TOKEN}x", f"?t={TOKEN}"]
)
def test_nobody_else_gets_anything(served: Served, path: str, token: str) -> None:
    served.publish(run="secret")
    head, body = served.get(path + token)
    assert head.startswith("HTTP/1.1 403 ")
    assert body == "wanted the address with the token that was printed\n"


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil:1"])
def test_a_foreign_name_is_not_served(served: Served, host: str) -> None:
    """It may have been made to lead here."""
    assert served.get(f"/?token={TOKEN}", host)[0].startswith("HTTP/1.1 421 ")


def test_a_request_without_a_host_is_refused(served: Served) -> None:
    head, _ = served.answer(f"GET /?token={TOKEN} HTTP/1.0\r\n\r\n".encode())
    assert head.startswith("HTTP/1.1 421 ")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "get"])
def test_there_is_no_other_way_to_ask(served: Served, method: str) -> None:
    head, _ = served.get(f"/?token={TOKEN}", method=method)
    assert head.startswith("HTTP/1.1 405 ")
    assert "Allow: GET" in head


@pytest.mark.parametrize("path", ["/x", "//", "/../secret", "/journal.jsonl", "/events/"])
def test_there_is_nothing_else(served: Served, path: str) -> None:
    assert served.get(f"{path}?token={TOKEN}")[0].startswith("HTTP/1.1 404 ")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
        b"\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET / HTTP/2\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET //[ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\xff\xfe \x00 \x00\r\n\r\n",
    ],
)
def test_garbage_is_refused(served: Served, garbage: bytes) -> None:
    head, _ = served.answer(garbage)
    assert head.startswith("HTTP/1.1 400 ")
    assert served.get(f"/?token={TOKEN}")[0].startswith("HTTP/1.1 200")


def test_a_head_without_an_end_is_hung_up_on(served: Served) -> None:
    head = b"GET / HTTP/1.1\r\nX: " + b"x" * 2 * http_server.HEAD_BYTES
    with closing(served.connect()) as connection:
        connection.sendall(head)
        assert is_hung_up_on(connection)


def test_who_says_nothing_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.2)
    with closing(served.connect()) as silent, closing(served.connect()) as slow:
        slow.sendall(b"GET / HT")
        assert is_hung_up_on(silent)
        assert is_hung_up_on(slow)


def test_who_reads_nothing_is_hung_up_on(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "WRITE_S", 0.2)
    stream = served.stream()
    stream.event()
    served.publish(text="x" * 2**25)
    with closing(stream.connection):
        wait_for(lambda: not served.server._open)


def test_there_are_only_so_many_at_a_time(served: Served) -> None:
    streams = [served.stream() for _ in range(MOST_CONNECTIONS)]
    for stream in streams:
        stream.event()
    with closing(served.connect()) as another:
        assert is_hung_up_on(another)
    for stream in streams:
        stream.connection.shutdown(socket.SHUT_RDWR)
    wait_for(lambda: not served.server._open)
    assert served.get(f"/?token={TOKEN}")[0].startswith("HTTP/1.1 200")


# ---- the stream


def test_who_comes_is_told_all_and_then_what_is_new(served: Served) -> None:
    served.publish(run=1, notes=["a"])
    stream = served.stream()
    assert {"run": 1, "notes": ["a"]}.items() <= stream.event().items()
    served.publish(run=2)
    news = stream.event()
    assert news["run"] == 2
    assert "notes" not in news


def test_who_comes_again_is_told_what_it_lacks(served: Served) -> None:
    served.publish(run=1, notes=["a"])
    stream = served.stream()
    stream.event()
    stream.connection.shutdown(socket.SHUT_RDWR)
    served.publish(run=2)
    news = served.stream(stream.id).event()
    assert news["run"] == 2
    assert "notes" not in news


@pytest.mark.parametrize("last", ["0ther-1", "nonsense", "-", "9999999999-99999999999999999999"])
def test_who_was_told_by_another_dashboard_is_told_all(served: Served, last: str) -> None:
    served.publish(run=1)
    assert served.stream(last).event()["run"] == 1


def test_an_open_stream_says_that_it_is_open(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SIGN_OF_LIFE_S", 0.05)
    stream = served.stream()
    stream.event()
    assert stream._file.readline() == b": still here\n"


def is_hung_up_on(connection: socket.socket) -> bool:
    try:
        return not connection.recv(1)
    except ConnectionResetError:
        return True


def wait_for(condition: Callable[[], object]) -> None:
    pause, tries = threading.Event(), int(LIMIT_S / 0.02)
    for _ in range(tries):
        if condition():
            return
        pause.wait(0.02)
    raise AssertionError(f"waited {LIMIT_S:g} s")
