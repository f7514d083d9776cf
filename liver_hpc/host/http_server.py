"""HTTP as the live page and the endpoint of metrics serve it: one request for each connection.

Whoever is slow, or comes while many are served, is hung up on.
"""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import parse_qs, urlsplit

HEAD_S = 10.0
"""By then a request has been said."""
HEAD_BYTES = 16 * 2**10
WRITE_S = 30.0
"""So long somebody may leave what he is sent."""
MOST_CONNECTIONS = 32
"""More are hung up on at once."""


class Refused(Exception):
    """An answer that is none."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """The head of a request. token: of the address; empty without. headers: by name in lower case;
    one that is there twice has both values, with a comma between."""

    method: str
    path: str
    token: str
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> Asked:
        """Raises Refused for what is no head of HTTP."""
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        words = first.split(" ")
        named = [line.partition(":") for line in lines]
        is_http = len(words) == 3 and words[2] in ("HTTP/1.0", "HTTP/1.1")
        if not is_http or not all(name and colon for name, colon, _ in named):
            raise Refused(HTTPStatus.BAD_REQUEST, "wanted a request of HTTP/1.1")
        try:
            target = urlsplit(words[1])
        except ValueError:
            raise Refused(HTTPStatus.BAD_REQUEST, "wanted a path") from None
        headers: dict[str, str] = {}
        for name, _, value in named:
            before = headers.get(name.lower())
            headers[name.lower()] = value.strip() if before is None else f"{before}, {value}"
        return cls(words[0], target.path, parse_qs(target.query).get("token", [""])[0], headers)


class HttpServer(ABC):
    """headers: of every answer. says_why: whether who is refused is told more than the status."""

    says_why = True

    def __init__(self, headers: Mapping[str, str]) -> None:
        self._headers = {**headers, "Allow": "GET", "Connection": "close"}
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    @abstractmethod
    async def answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Sends all of it. Raises Refused where there is none."""

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Where it listens: of a name's addresses at one, of IPv4 if there is one. Raises OSError
        where that cannot be had."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, *_, at = min(found, key=lambda each: each[0] != socket.AF_INET)
        listening = socket.create_server(at[:2], family=family)
        self._server = await asyncio.start_server(self._serve, sock=listening, limit=HEAD_BYTES)
        address, port = listening.getsockname()[:2]
        return str(address), int(port)

    def close(self) -> None:
        """Hangs up on everybody."""
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open.add(writer)
        writer.transport.set_write_buffer_limits(0)
        try:
            async with asyncio.timeout(HEAD_S):
                head = await reader.readuntil(b"\r\n\r\n")
            try:
                await self.answer(Asked.parse(head), reader, writer)
            except Refused as refused:
                why = f"{refused}\n".encode() if self.says_why else b""
                await self.send(writer, refused.status, "text/plain", why)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # it has gone, or never said what it wanted
        finally:
            self._open.discard(writer)
            writer.transport.abort()  # all that was sent has left us, or will not be taken

    async def send(
        self, writer: asyncio.StreamWriter, status: HTTPStatus, kind: str, body: bytes | None = None
    ) -> None:
        """An answer; without a body the beginning of one that has no end."""
        headers = {**self._headers, "Content-Type": kind}
        if body is not None:
            headers["Content-Length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode()
        await put(writer, head + (body or b""))


async def put(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Returns once all of it has left this process; raises TimeoutError where it is not taken in
    time."""
    writer.write(data)
    async with asyncio.timeout(WRITE_S):
        await writer.drain()
