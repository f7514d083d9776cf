"""The page over HTTP: a document, and a stream of events to each browser that shows it.

Whoever asks has to know the token, which stands in the address that is printed and nowhere else. It
is no cookie: a browser sends it to nobody by itself, to no other port of this machine and from no
other page. A name that is not this machine's is refused, so that no foreign name can be made to
lead here. There are two things to GET and no other way to ask.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Callable
from http import HTTPStatus
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree.ElementTree import fromstring, tostring

from liver_hpc.clock import Clock, SystemClock
from liver_hpc.dashboard.follower import Ask, Follower
from liver_hpc.dashboard.page import Page
from liver_hpc.errors import ConfigError
from liver_hpc.host.http_server import Asked, HttpServer, Refused, put
from liver_hpc.report.page.parts import asset

SIGN_OF_LIFE_S = 15.0
SCRIPTS = ("drawing.js", "curve.js", "lanes.js", "dashboard.js")

_HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
_HEADERS |= {"X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}


async def serve(
    journal: Path, host: str, port: int, ask: Ask, tell: Callable[[int, str], None]
) -> None:
    """Follows a journal, and serves its page meanwhile, until it is cancelled. port: 0 for one that
    the kernel chooses. tell: called with the port and the token once the page is there.

    Raises ConfigError where that port cannot be had.
    """
    token, page = secrets.token_urlsafe(32), Page()
    server = Server(page, SystemClock(), token, host)
    try:
        _, listens_at = await server.listen(host, port)
    except OSError as error:
        where = f"--host {host}" + (f" --port {port}" if port else "")
        raise ConfigError(f"{where}: cannot listen there: {error.strerror}") from error
    try:
        tell(listens_at, token)
        await Follower(journal, page, ask).follow()
    finally:
        server.close()


class Server(HttpServer):
    def __init__(self, page: Page, clock: Clock, token: str, host: str) -> None:
        """host: a name or an address of this machine."""
        self._document, policy = document()
        super().__init__({**_HEADERS, "Content-Security-Policy": policy})
        self._page = page
        self._clock = clock
        self._token = token
        self._names = {name.lower() for name in ("localhost", host, socket.gethostname())}

    async def answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._check(asked)
        if asked.path == "/":
            await self.send(writer, HTTPStatus.OK, "text/html; charset=utf-8", self._document)
        elif asked.path == "/events":
            await self._stream(asked, reader, writer)
        else:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")

    def _check(self, asked: Asked) -> None:
        """Raises Refused where somebody must not ask, or not so."""
        if not self._is_here(asked.headers.get("host", "")):
            raise Refused(HTTPStatus.MISDIRECTED_REQUEST, "this name is not served here")
        if not hmac.compare_digest(asked.token.encode(), self._token.encode()):
            words = "wanted the address with the token that was printed"
            raise Refused(HTTPStatus.FORBIDDEN, words)
        if asked.method != "GET":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "wanted GET")

    def _is_here(self, host: str) -> bool:
        """Whether a Host is an address, or a name of this machine; at whatever port, as the browser
        may sit at the other end of a tunnel."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False

    async def _stream(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """What there is, then whatever is new, until the browser goes."""
        await self.send(writer, HTTPStatus.OK, "text/event-stream")
        page, known = self._page, self._page.known_to(asked.headers.get("last-event-id", ""))
        is_new = True
        gone = asyncio.ensure_future(reader.read(1))  # it has nothing more to say
        try:
            while not gone.done():
                changed = page.changed
                if is_new or page.version > known:
                    event = page.event(known, self._clock.now_s())
                    known, is_new = page.version, False
                    await put(writer, event)
                    continue
                awaited: set[asyncio.Future[Any]] = {changed, gone}
                done, _ = await asyncio.wait(
                    awaited, timeout=SIGN_OF_LIFE_S, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await put(writer, b": still here\n\n")
        finally:
            gone.cancel()


def document() -> tuple[bytes, str]:
    """The page, with the report's style sheet, and the policy under which it is shown: what stands
    in it, by digest, and the stream from here, is all that it may use."""
    beside = files("liver_hpc.dashboard")
    root = fromstring(beside.joinpath("dashboard.html").read_text(encoding="utf-8"))
    parts = {element.get("id"): element for element in root.iter()}
    style = asset("page.css") + beside.joinpath("dashboard.css").read_text(encoding="utf-8")
    scripts = (beside.joinpath(name).read_text(encoding="utf-8") for name in SCRIPTS)
    script = "\n".join([asset("cursor.js"), *scripts])
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
