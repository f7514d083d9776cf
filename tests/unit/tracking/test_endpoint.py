"""The page for who has the token, and what everybody else is told."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import pytest

from liver_hpc.errors import LiverError
from liver_hpc.host import http_server
from liver_hpc.tracking.endpoint import Endpoint

TOKEN = "ab" * 32
GOOD = f"Authorization: Bearer {TOKEN}"


@pytest.fixture
def served() -> Iterator[Endpoint]:
    one = Endpoint(("127.0.0.1", 0), TOKEN, lambda: b"liver_steps_done 3\n", "text/plain")
    yield one
    one.close()
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(one.address, 1.0)


def told(one: Endpoint, said: bytes) -> bytes:
    """All that comes back until the end."""
    heard = b""
    with socket.create_connection(one.address, 10.0) as came:
        came.sendall(said)
        while part := came.recv(4096):
            heard += part
    return heard


def asked(one: Endpoint, first: str, *fields: str) -> str:
    return told(one, "\r\n".join([first, *fields, "", ""]).encode()).decode()


def test_who_comes_while_there_are_no_descriptors_is_served_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, errors = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")]

    def falters(listener: socket.socket) -> Any:
        if errors:
            raise errors.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", falters)
    with closing(Endpoint(("127.0.0.1", 0), TOKEN, lambda: b"steps 3\n", "text/plain")) as one:
        assert asked(one, "GET /metrics HTTP/1.1", GOOD).endswith("steps 3\n")
    assert "Too many open files" in caplog.text


def test_a_name_of_many_addresses_opens_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may be that of a network that nobody has named."""
    hosts = {socket.AF_INET6: "::1", socket.AF_INET: "127.0.0.2"}

    def found(host: str, port: int, **_: Any) -> list[Any]:
        assert host == "node1"
        return [(family, socket.SOCK_STREAM, 6, "", (at, port)) for family, at in hosts.items()]

    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: found(args[0], args[1]))
    made = socket.create_server
    opened: list[object] = []
    monkeypatch.setattr(
        socket, "create_server", lambda at, **how: opened.append(at) or made(at, **how)
    )
    with closing(Endpoint(("node1", 0), TOKEN, lambda: b"", "text/plain")) as one:
        assert opened == [("127.0.0.2", 0)]
        assert one.address[0] == "127.0.0.2"


def test_the_loop_is_not_that_of_the_thread_that_made_it(served: Endpoint) -> None:
    """Who logs to W&B there may want one of its own."""
    try:
        loop = asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        return  # it has none
    assert not loop.is_running()


def test_who_has_the_token_gets_the_page(served: Endpoint) -> None:
    answer = asked(served, "GET /metrics HTTP/1.1", "Host: n1", GOOD)
    head, _, text = answer.partition("\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK")
    assert "Content-Type: text/plain" in head
    assert "Content-Length: 19" in head
    assert text == "liver_steps_done 3\n"


@pytest.mark.parametrize(
    "fields",
    [
        (),
        ("Authorization: Bearer",),
        (f"Authorization: Bearer {TOKEN[:-1]}",),
        (f"Authorization: Bearer {'cd' * 32}",),
        (f"Authorization: {TOKEN}",),
        (GOOD, GOOD),
        ("Authorization: Bearer \N{LATIN SMALL LETTER E WITH ACUTE}",),
    ],
)
@pytest.mark.parametrize("first", ["GET /metrics HTTP/1.1", "GET / HTTP/1.1", "PUT / HTTP/1.1"])
def test_who_has_not_learns_nothing(served: Endpoint, first: str, fields: tuple[str, ...]) -> None:
    answer = asked(served, first, *fields)
    assert answer.startswith("HTTP/1.1 401 Unauthorized")
    assert "WWW-Authenticate: Bearer" in answer
    assert answer.endswith("\r\n\r\n")


def test_other_paths_and_methods_are_refused(served: Endpoint) -> None:
    assert asked(served, "GET / HTTP/1.1", GOOD).startswith("HTTP/1.1 404 ")
    assert asked(served, "GET /metrics/../secret HTTP/1.1", GOOD).startswith("HTTP/1.1 404 ")
    assert asked(served, "POST /metrics HTTP/1.1", GOOD).startswith("HTTP/1.1 405 ")


@pytest.mark.parametrize("said", [b"\r\n\r\n", b"GET /metrics\r\n\r\n"])
def test_garbage_is_refused(served: Endpoint, said: bytes) -> None:
    assert told(served, said).startswith(b"HTTP/1.1 400 ")
    assert asked(served, "GET /metrics HTTP/1.1", GOOD).startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize("said", [bytes(8192), b"\x16\x03" * 4096, b"GET /" + b"x" * 2**17])
def test_garbage_without_an_end_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, served: Endpoint, said: bytes
) -> None:
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    with socket.create_connection(served.address, 10.0) as came, suppress(ConnectionError):
        came.sendall(said)
        assert came.recv(1) == b""
    assert asked(served, "GET /metrics HTTP/1.1", GOOD).startswith("HTTP/1.1 200 ")


def test_who_is_slow_is_cut_off_and_keeps_nobody_out_for_long(
    monkeypatch: pytest.MonkeyPatch, served: Endpoint
) -> None:
    """One connection more than is served, all silent."""
    monkeypatch.setattr(http_server, "HEAD_S", 0.3)
    number = http_server.MOST_CONNECTIONS + 1
    silent = [socket.create_connection(served.address, 10.0) for _ in range(number)]
    for each in silent:
        assert each.recv(1) == b""
        each.close()
    assert asked(served, "GET /metrics HTTP/1.1", GOOD).startswith("HTTP/1.1 200 ")


def test_a_place_that_is_taken_is_named(served: Endpoint) -> None:
    with pytest.raises(LiverError, match=f"cannot listen on 127.0.0.1, port {served.address[1]}: "):
        Endpoint(served.address, TOKEN, lambda: b"", "text/plain")
