"""The page over HTTP: a document, and a stream of events to each browser that shows it.

Whoever asks has to know the token, which stands in the address that is printed and nowhere else. It
is no cookie: a browser sends it to nobody by itself, to no other port of this machine and from no
other page. A name that is not this machine's is refused, so that no foreign name can be made to
lead here. There are two things to GET and no other way to ask. Whoever is slow is hung up on.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.etree.ElementTree import fromstring, tostring

from liver_hpc.clock import Clock
from liver_hpc.dashboard.page import Page
from liver_hpc.report.page.parts import asset

HEAD_S = 10.0
"""By then a browser has said what it wants."""
HEAD_BYTES = 16 * 2**10
WRITE_S = 30.0
"""So long a browser may leave what it is sent."""
SIGN_OF_LIFE_S = 15.0
SCRIPTS = ("drawing.js", "curve.js", "lanes.js", "dashboard.js")
MOST_CONNECTIONS = 32
"""More are hung up on at once."""

_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "Connection": "close"}
_HEADERS |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}


class Refused(Exception):
    """An answer that is none. status: as HTTP has it: "403 Forbidden"."""

    def __init__(self, status: str, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Asked:
    """The head of a request. token: of the address; empty without."""

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
            raise Refused("400 Bad Request", "wanted a request of HTTP/1.1")
        try:
            target = urlsplit(words[1])
        except ValueError:
            raise Refused("400 Bad Request", "wanted a path") from None
        headers = {name.lower(): value.strip() for name, _, value in named}
        return cls(words[0], target.path, parse_qs(target.query).get("token", [""])[0], headers)


class Server:
    """address: where it listens, from `listen` on."""

    def __init__(self, page: Page, clock: Clock, token: str, host: str) -> None:
        """host: a name or an address of this machine."""
        self.address = (host, 0)
        self._page = page
        self._clock = clock
        self._token = token
        self._names = {name.lower() for name in ("localhost", host, socket.gethostname())}
        self._document, self._policy = document()
        self._open: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, port: int) -> None:
        """Raises OSError where that cannot be had."""
        host, _ = self.address
        self._server = await asyncio.start_server(self._serve, host, port, limit=HEAD_BYTES)
        self.address = (host, self._server.sockets[0].getsockname()[1])

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
            await self._answer(head, reader, writer)
        except (OSError, EOFError, TimeoutError, asyncio.LimitOverrunError):
            pass  # it has gone, or never said what it wanted
        finally:
            self._open.discard(writer)
            writer.transport.abort()  # all that was sent has left us, or will not be taken

    async def _answer(
        self, head: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            asked = Asked.parse(head)
            self._check(asked)
            if asked.path == "/":
                await _send(writer, self._head("200 OK", "text/html", len(self._document)))
                await _send(writer, self._document)
            elif asked.path == "/events":
                await self._stream(asked, reader, writer)
            else:
                raise Refused("404 Not Found", "there is nothing here")
        except Refused as refused:
            text = f"{refused}\n".encode()
            allow = "Allow: GET\r\n" if refused.status.startswith("405") else ""
            head = self._head(refused.status, "text/plain", len(text), allow)
            await _send(writer, head + text)

    def _check(self, asked: Asked) -> None:
        """Raises Refused where somebody must not ask, or not so."""
        if not self._is_here(asked.headers.get("host", "")):
            raise Refused("421 Misdirected Request", "this name is not served here")
        if not hmac.compare_digest(asked.token.encode(), self._token.encode()):
            raise Refused("403 Forbidden", "wanted the address with the token that was printed")
        if asked.method != "GET":
            raise Refused("405 Method Not Allowed", "wanted GET")

    def _is_here(self, host: str) -> bool:
        """Whether a Host is an address, or a name of this machine; at whatever port, as the browser
        may sit at the other end of a tunnel."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    def _head(self, status: str, kind: str, num_bytes: int | None, more: str = "") -> bytes:
        headers = {**_HEADERS, "Content-Type": f"{kind}; charset=utf-8"}
        headers["Content-Security-Policy"] = self._policy
        if num_bytes is not None:
            headers["Content-Length"] = str(num_bytes)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"HTTP/1.1 {status}\r\n{lines}{more}\r\n".encode()

    async def _stream(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """What there is, then whatever is new, until the browser goes."""
        await _send(writer, self._head("200 OK", "text/event-stream", None))
        page, known = self._page, self._page.known_to(asked.headers.get("last-event-id", ""))
        is_new = True
        gone = asyncio.ensure_future(reader.read(1))  # it has nothing more to say
        try:
            while not gone.done():
                changed = page.changed
                if is_new or page.version > known:
                    event = page.event(known, self._clock.now_s())
                    known, is_new = page.version, False
                    await _send(writer, event)
                    continue
                awaited: set[asyncio.Future[Any]] = {changed, gone}
                done, _ = await asyncio.wait(
                    awaited, timeout=SIGN_OF_LIFE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await _send(writer, b": still here\n\n")
        finally:
            gone.cancel()


async def _send(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Returns once all of it has left this process; raises TimeoutError where it is not taken in
    time."""
    writer.write(data)
    async with asyncio.timeout(WRITE_S):
        await writer.drain()


def document() -> tuple[bytes, str]:
    """The page, with the report's style sheet, and the policy under which it is shown: what stands
    in it, by digest, and the stream from here, is all that it may use."""
    beside = files("liver_hpc.dashboard")
    root = fromstring(beside.joinpath("dashboard.html").read_text(encoding="utf-8"))
    parts = {element.get("id"): element for element in root.iter()}
    style = asset("page.css") + beside.joinpath("dashboard.css").read_text(encoding="utf-8")
    script = "\n".join(beside.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts["style"].text, parts["script"].text = style, script
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    text = "<!doctype html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
    return text.encode(), policy


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
