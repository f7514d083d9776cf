"""The dashboard as a whole: a journal that is followed, and the page that is served meanwhile."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path

from liver_hpc.clock import SystemClock
from liver_hpc.dashboard.follower import Ask, Follower
from liver_hpc.dashboard.page import Page
from liver_hpc.dashboard.server import Server
from liver_hpc.errors import ConfigError


async def serve(
    journal: Path, host: str, port: int, ask: Ask, tell: Callable[[int, str], None]
) -> None:
    """Until it is cancelled. port: 0 for one that the kernel chooses. tell: called with the port
    and the token once the page is there.

    Raises ConfigError where that port cannot be had.
    """
    clock, token = SystemClock(), secrets.token_urlsafe(32)
    page = Page()
    server = Server(page, clock, token, host)
    try:
        await server.listen(port)
    except OSError as error:
        where = f"--host {host}" + (f" --port {port}" if port else "")
        raise ConfigError(f"{where}: cannot listen there: {error.strerror}") from error
    try:
        tell(server.address[1], token)
        await Follower(journal, page, ask).follow()
    finally:
        server.close()
