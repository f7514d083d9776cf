"""PMI-1 for one process: what makes it a world of its own to MPI, without an mpiexec.

The process inherits one end of a socketpair; its parent answers at the other. So nothing listens,
and nobody else can speak for either. Without a process manager two processes cannot meet over MPI,
which takes them for one world: hence a random name for each.

Lines of text, `cmd=NAME key=value ...`, one reply to each; see Flux RFC 13.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
from pathlib import Path

from liver_hpc.errors import MeetingError

MAX_LINE_BYTES = 4096
MAX_MESSAGE_BYTES = 64 * 1024
"""Of what an MPI process hears from its parent or from its peer."""
FAILED = b"\0failed: "
"""What an MPI process's last word begins with that is its error; nothing else that is said does."""

_REPLIES = {
    "get_maxes": "cmd=maxes rc=0 kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum rc=0 appnum=0",
    "get_universe_size": "cmd=universe_size rc=0 size=1",
    "barrier_in": "cmd=barrier_out rc=0",
    "finalize": "cmd=finalize_ack rc=0",
}

_log = logging.getLogger(__name__)


class PmiError(MeetingError):
    """What an MPI process said to its process manager is not PMI-1."""


class PmiServer:
    """The process manager of one process, without any I/O.

    world: the random name of the process's MPI world, and of its key-value store.
    """

    def __init__(self) -> None:
        self.world = f"liver_{secrets.token_hex(8)}"
        self._values: dict[str, str] = {}

    def answer(self, line: str) -> str:
        """The reply to a line. Raises PmiError for what is no line of PMI-1."""
        fields = _fields(line)
        match fields["cmd"]:
            case "init":
                rc = 0 if fields.get("pmi_version") == "1" else -1
                said = f"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc={rc}"
            case "get_my_kvsname":
                said = f"cmd=my_kvsname rc=0 kvsname={self.world}"
            case "put" | "get" as verb if fields.get("kvsname") != self.world:
                said = f"cmd={verb}_result rc=-1 msg=kvs_not_found"
            case "put":
                self._values[fields.get("key", "")] = fields["value"]
                said = "cmd=put_result rc=0 msg=success"
            case "get" if (value := self._values.get(fields.get("key", ""))) is not None:
                said = f"cmd=get_result rc=0 msg=success value={value}"
            case "get":
                said = "cmd=get_result rc=-1 msg=key_not_found value=unknown"
            case "abort":
                return ""  # the process ends now, and reads no more
            case other:
                said = _REPLIES.get(other, f"cmd={other}_result rc=-1 msg=not_supported")
        return f"{said}\n"


def _fields(line: str) -> dict[str, str]:
    """Keys and values of a line. A `value`, always the last one, may have spaces."""
    text = line.removesuffix("\n")
    head, _, value = text.partition(" value=")
    fields = dict(word.split("=", 1) for word in head.split() if "=" in word)
    name = fields.get("cmd", "").replace("_", "")
    if text == line or not (text.isascii() and text.isprintable() and name.isalnum()):
        raise PmiError(f"not a line of PMI-1: {line[:40]!r}")
    return {**fields, "value": value}


def serve(server: PmiServer, process: socket.socket) -> None:
    """Answers a process until it has ended; hangs up on one that says something else."""
    with (
        contextlib.suppress(OSError),  # it was killed with a reply unread
        process,
        process.makefile("rwb") as lines,
    ):
        try:
            while line := lines.readline(MAX_LINE_BYTES):
                lines.write(server.answer(line.decode("ascii", errors="replace")).encode("ascii"))
                lines.flush()
        except PmiError as error:
            _log.warning("hanging up on an MPI process: %s", error)


def shared_memory_of(world: str) -> Path:
    """The segment that MPICH makes for such a world: named by FNV-1a, 32 bits, of its name."""
    number = 0x811C9DC5
    for byte in world.encode("ascii"):
        number = (number ^ byte) * 0x01000193 % 2**32
    return Path(f"/dev/shm/mpich_shm_{number:x}_0")
