"""`liver dashboard`: a page that follows a run, and the way to it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from liver_hpc.errors import ConfigError, LiverError

if TYPE_CHECKING:
    from liver_hpc.protocol.status import HandoffStatus
    from liver_hpc.run.directory import RunDirectory

LOOPBACK = "127.0.0.1"


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes besides its run. Imports nothing, so that `--help` is quick."""
    text = "where to listen (default: one that is free)"
    parser.add_argument("--port", type=_port, default=0, metavar="P", help=text)
    text = f"an address of this machine (default: {LOOPBACK}, which only this machine reaches)"
    parser.add_argument("--host", default=LOOPBACK, metavar="H", help=text)


def _port(text: str) -> int:
    if text.isdecimal() and 0 < int(text) < 2**16:
        return int(text)
    raise argparse.ArgumentTypeError(f"wanted a port between 1 and 65535, got {text!r}")


def dashboard(run: RunDirectory, options: argparse.Namespace) -> None:
    """Serves the page of a run until Ctrl-C. Raises ConfigError where it cannot, and for a run
    that has no journal."""
    import asyncio

    from liver_hpc.cli.client import Watch
    from liver_hpc.dashboard.server import serve
    from liver_hpc.report.store import METRICS_FILE
    from liver_hpc.run.entries import JOURNAL_FILE

    journal = run.path / JOURNAL_FILE
    if not journal.exists() and (run.path / METRICS_FILE).exists():
        raise ConfigError(f"{run} has no {JOURNAL_FILE} to follow; see `liver report {run}`")
    host, watch = options.host, Watch(run)

    def ask() -> HandoffStatus | None:
        """Over one connection; None where nobody answers."""
        try:
            snapshot = watch.snapshot()
        except LiverError:
            return None
        return None if snapshot is None else snapshot.handoff

    def tell(port: int, token: str) -> None:
        for line in told(run, host, port, token):
            print(line, flush=True)

    try:
        asyncio.run(serve(journal, host, options.port, ask, tell))
    except KeyboardInterrupt:
        print()


def told(run: RunDirectory, host: str, port: int, token: str) -> Iterator[str]:
    """What a user is told: the address, who can reach it, and how from elsewhere."""
    from liver_hpc.host.interfaces import is_loopback

    shown = f"[{host}]" if ":" in host else host
    yield f"http://{shown}:{port}/?token={token}"
    if not is_loopback(host):
        yield "others on the network can read along: nothing is encrypted"
    elif run.config().cluster.kind == "slurm" or os.environ.get("SSH_CONNECTION"):
        yield f"from your own machine, first: {forwarding(shown, port)}"
    yield f"follows {run} until Ctrl-C, which leaves the run alone"


def forwarding(host: str, port: int) -> str:
    """The command that leads a port of another machine here, with this machine's own name for
    itself."""
    from getpass import getuser
    from socket import gethostname

    try:
        there = f"{getuser()}@{gethostname()}"
    except (KeyError, OSError):  # nobody tells of this user here, as in some images
        there = gethostname()
    return f"ssh -N -L {port}:{host}:{port} {there}"
