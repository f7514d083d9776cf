"""One page over HTTP, for who has the token: `GET /metrics`, and nothing else.

Each connection is one request. It has `LIMIT_S` in all, however slowly it comes, and `MOST_BYTES`;
so many as `THREADS` are served at once, and `WAITING` more may wait.
"""

from __future__ import annotations

import hmac
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from http import HTTPStatus

from liver_hpc.errors import LiverError
from liver_hpc.host.process import quiet_thread

log = logging.getLogger(__name__)

PATH = "/metrics"
LIMIT_S = 5.0
MOST_BYTES = 8192
THREADS = 4
WAITING = 16
AGAIN_S = 0.1
_END = b"\r\n\r\n"


class Endpoint:
    """Listens from its making until `close`. address: where. page: makes the answer, in any of
    its threads. Raises LiverError where it cannot listen."""

    def __init__(
        self, address: tuple[str, int], token: str, page: Callable[[], bytes], content_type: str
    ) -> None:
        self._wanted = f"Bearer {token}".encode()
        self._page = page
        self._content_type = content_type
        self._came: queue.Queue[socket.socket | None] = queue.Queue(WAITING)
        self._closing = threading.Event()
        try:
            self._listener = socket.create_server(address, backlog=WAITING)
        except OSError as error:
            where = f"{address[0]}, port {address[1]}"
            raise LiverError(f"cannot listen on {where}: {error.strerror}") from error
        host, port = self._listener.getsockname()[:2]
        self.address = str(host), int(port)
        self._threads = [quiet_thread(self._serve, f"metrics-{n}") for n in range(THREADS)]
        self._threads.append(quiet_thread(self._accept, "metrics"))

    def close(self) -> None:
        """Nobody is answered any more once it returns."""
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(2 * LIMIT_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                came, _ = self._listener.accept()
            except OSError as error:  # out of descriptors, or closing
                if not self._closing.is_set():
                    log.warning("who asks for metrics is not heard: %s", error.strerror)
                    self._closing.wait(AGAIN_S)
                continue
            try:
                self._came.put_nowait(came)
            except queue.Full:
                came.close()
        for _ in range(THREADS):
            self._came.put(None)

    def _serve(self) -> None:
        while (came := self._came.get()) is not None:
            with came:
                until_s = time.monotonic() + LIMIT_S
                try:
                    status, text = self._answer(_head(came, until_s))
                    came.settimeout(max(0.01, until_s - time.monotonic()))
                    came.sendall(_response(status, text, self._content_type))
                except OSError as error:
                    log.debug("who asks for metrics is gone: %s", error)

    def _answer(self, head: bytes) -> tuple[HTTPStatus, bytes]:
        """Who has no token learns nothing, not even which paths there are."""
        first, *rest = head.split(b"\r\n")
        words = first.split(b" ")
        if not head.endswith(_END) or len(words) != 3 or not words[2].startswith(b"HTTP/1."):
            return HTTPStatus.BAD_REQUEST, b""
        fields = (line.partition(b":") for line in rest if line)
        given = [value.strip() for name, _, value in fields if name.lower() == b"authorization"]
        if len(given) != 1 or not hmac.compare_digest(given[0], self._wanted):
            return HTTPStatus.UNAUTHORIZED, b""
        if words[0] != b"GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, b""
        if words[1] != PATH.encode():
            return HTTPStatus.NOT_FOUND, b""
        return HTTPStatus.OK, self._page()


def _head(came: socket.socket, until_s: float) -> bytes:
    """What was said up to the end of the head; less where that is too long. Raises OSError for who
    leaves or is late."""
    said = b""
    while not said.endswith(_END) and len(said) < MOST_BYTES:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("it is late")
        came.settimeout(left_s)
        part = came.recv(MOST_BYTES - len(said))
        if not part:
            raise ConnectionResetError("it has left")
        said += part
    return said


def _response(status: HTTPStatus, text: bytes, content_type: str) -> bytes:
    lines = [f"HTTP/1.1 {status.value} {status.phrase}", f"Content-Length: {len(text)}"]
    if status is HTTPStatus.OK:
        lines.append(f"Content-Type: {content_type}")
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        lines.append("Allow: GET")
    lines.append("Connection: close")
    return "\r\n".join(lines).encode() + _END + text
