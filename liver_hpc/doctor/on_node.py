"""What a node tells of itself: versions, limits, names, and what it sees of the run directory."""

from __future__ import annotations

import fcntl
import importlib.metadata
import platform
import resource
import signal
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from liver_hpc.cluster.network import control_interface, node_facts
from liver_hpc.config.schema import NetworkSection
from liver_hpc.errors import ConfigError

PACKAGES = ("liver_hpc", "torch", "megatron-core", "mpi4py")
ASKERS_TOKEN = "asker"
LOCK_FILE = "lock"

Say = Callable[..., None]
"""Prints one line of JSON with these fields."""


def versions() -> dict[str, str]:
    """Of Python and of what has to be the same everywhere."""
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def tell_facts(say: Say, directory: Path, names: Sequence[str], network: NetworkSection) -> None:
    """All that takes no other node; leaves a token of its own beside the asker's."""
    facts = node_facts()
    try:
        interface, trouble = control_interface(network, "slurm", facts), ""
    except ConfigError as error:
        interface, trouble = None, str(error)
    say(
        host=facts.host,
        versions=versions(),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        hca_ports=[f"{port}/{port.link_layer}" for port in facts.hca_ports],
        interface=interface,
        address=facts.interfaces.get(interface or "", ""),
        trouble=trouble,
        resolves={name: _resolved(name) for name in names},
        **_tokens(directory, facts.host),
    )


def _resolved(name: str) -> str:
    """Its first address; empty where the name means nothing here."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return ""


def _tokens(directory: Path, host: str) -> dict[str, Any]:
    """What the asker wrote, as read here; and whether this node's answer could be written."""
    try:
        token = (directory / ASKERS_TOKEN).read_text(encoding="ascii")
        (directory / host).write_text(token, encoding="ascii")
    except OSError as error:
        return {"token": "", "token_trouble": f"{error.filename}: {error.strerror}"}
    return {"token": token, "token_trouble": ""}


def hold_lock(say: Say, directory: Path) -> None:
    """Holds the lock until SIGTERM."""
    with (directory / LOCK_FILE).open("ab") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        say(held=True)
        signal.sigwait({signal.SIGTERM})


def try_lock(directory: Path) -> bool:
    """Whether the lock can be had here; it is let go at once."""
    with (directory / LOCK_FILE).open("ab") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        with suppress(OSError):
            fcntl.lockf(file, fcntl.LOCK_UN)
        return True


def block_termination() -> None:
    """SIGTERM from now on waits until it is asked for."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
