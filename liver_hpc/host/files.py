"""Files that readers find whole or not at all, that survive a loss of power; and whose they are."""

from __future__ import annotations

import os
import pwd
import secrets
from pathlib import Path


def write_whole(path: Path, data: str | bytes, mode: int = 0o666, sync: bool = False) -> None:
    """Puts a new file in the place of `path`; a reader, and a writer that is killed, finds all of
    it or what was there before.

    mode: what the umask takes its bits from. sync: return once the file is on the disk with its
    name. Raises OSError, and then leaves what was there before.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            if sync:
                os.fsync(descriptor)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        flush_to_disk(path.parent)


def flush_to_disk(path: Path) -> None:
    """Returns once a file's bytes, or a directory's entries, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def whose(status: os.stat_result) -> str:
    """ "belongs to user ann, this is user bob" of a file that is not this user's; else empty."""
    if status.st_uid == os.geteuid():
        return ""
    return f"belongs to user {_name(status.st_uid)}, this is user {_name(os.geteuid())}"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
