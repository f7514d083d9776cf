"""One page over HTTP, for who has the token: `GET /metrics`, and nothing else."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from http import HTTPStatus

from liver_hpc.errors import LiverError
from liver_hpc.host.http_server import Asked, HttpServer, Refused
from liver_hpc.host.process import quiet_thread

PATH = "/metrics"
CLOSE_S = 10.0


class Endpoint(HttpServer):
    """Listens from its making until `close`, in a thread of its own. address: where. page: makes
    the answer, in any thread. Raises LiverError where it cannot listen."""

    says_why = False

    def __init__(
        self, address: tuple[str, int], token: str, page: Callable[[], bytes], content_type: str
    ) -> None:
        super().__init__({"WWW-Authenticate": "Bearer"})
        self._wanted = f"Bearer {token}"
        self._page = page
        self._content_type = content_type
        self._closing = asyncio.Event()
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)  # none of this thread
        try:
            self.address = self._runner.run(self.listen(*address))
        except OSError as error:
            self._runner.close()
            where = f"{address[0]}, port {address[1]}"
            raise LiverError(f"cannot listen on {where}: {error.strerror}") from error
        self._thread = quiet_thread(self._run, "metrics")

    def _run(self) -> None:
        with self._runner:
            self._runner.run(self._closing.wait())
            super().close()

    def close(self) -> None:
        """Nobody is answered any more once it returns."""
        self._runner.get_loop().call_soon_threadsafe(self._closing.set)
        self._thread.join(CLOSE_S)

    async def answer(
        self, asked: Asked, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Who has no token learns nothing, not even which paths there are."""
        given = asked.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), self._wanted.encode()):
            raise Refused(HTTPStatus.UNAUTHORIZED, "wanted the token")
        if asked.method != "GET":
            raise Refused(HTTPStatus.METHOD_NOT_ALLOWED, "wanted GET")
        if asked.path != PATH:
            raise Refused(HTTPStatus.NOT_FOUND, "there is nothing here")
        text = await asyncio.to_thread(self._page)
        await self.send(writer, HTTPStatus.OK, self._content_type, text)
