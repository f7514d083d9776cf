"""Files that readers find whole or not at all, that survive a loss of power; whose they are; and
locks on them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import ConfigError

_TRY_S = 0.5
"""So often a lock is asked for: of a shared file system, by all workers that wait for the first."""
LOCK_LIMIT_S = 300.0
"""The longest wait for a lock: whoever holds it is tokenizing text or shuffling samples."""


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
            if not mode & 0o077:
                os.fchmod(descriptor, mode)  # what a directory has others inherit beats `mode`
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


def look_anew(directory: Path) -> None:
    """Has an NFS client ask what is in a directory, as opening it does: of a name that was not
    there it believes so for up to a minute. It costs a question to the server; where there is no
    such directory, nothing is done."""
    with contextlib.suppress(OSError):
        os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def make_directory(path: Path, mode: int = 0o755) -> None:
    """Makes a directory where there is none, and those above it that are missing: into none of them
    does anybody else write, whatever the umask. Raises OSError."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(mode, exist_ok=True)


@contextlib.contextmanager
def file_lock(path: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """Holds an exclusive lock on `path`, which is created and left behind.

    The lock ends with its process, however that ends. Raises DeadlineError after `limit_s`, and
    ConfigError where the file cannot be made, is a link, or its file system has no locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In a directory where others may write, they may have put something else there.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
        stream = os.fdopen(os.open(path, flags, 0o666), "ab")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    with stream:

        def taken() -> bool:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            except OSError as error:
                why = f"cannot be locked: {error.strerror}; its file system wants flock"
                raise ConfigError(f"{path}: {why}") from error
            return True

        deadline = Deadline.after(SystemClock(), limit_s, f"the process that has locked {path}")
        poll_until(taken, deadline, _TRY_S)
        look_anew(path.parent)  # for what whoever had it before has left there
        yield


@contextlib.contextmanager
def first_alone(mark: Path, limit_s: float = LOCK_LIMIT_S) -> Iterator[None]:
    """What one process must have done before others may do it side by side: the body is under a
    lock beside `mark` until it has once ended without an error, which the file `mark` tells.

    Raises what `file_lock` raises.
    """
    with contextlib.ExitStack() as held:
        if not mark.exists():
            held.enter_context(file_lock(mark.with_name(f"{mark.name}.lock"), limit_s))
            if mark.exists():  # whoever had the lock before has done it
                held.close()
        yield
        if not mark.exists():
            mark.touch()


@contextlib.contextmanager
def locked_alone(path: Path) -> Iterator[None]:
    """Holds a lock on `path`, a file of this user alone that is there while it is held, and lies on
    where its process is killed. The lock ends with its process, however that ends.

    Raises BlockingIOError where another process has it, OSError where it cannot be had.
    """
    made = not path.parent.exists()
    make_directory(path.parent)
    try:
        with _locked(path):
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
    finally:
        if made:
            with contextlib.suppress(OSError):  # others have put something there
                path.parent.rmdir()


def _locked(path: Path) -> IO[bytes]:
    """Opened, and under a lock; whoever had it before may have removed the file meanwhile."""
    while True:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.ExitStack() as held:
            stream = held.enter_context(os.fdopen(os.open(path, flags, 0o600), "r+b"))
            status = os.fstat(stream.fileno())
            if why := whose(status):
                raise PermissionError(errno.EPERM, why)
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(status, path.lstat()):
                    held.pop_all()
                    return stream


def whose(status: os.stat_result) -> str:
    """ "belongs to user ann, this is user bob" of a file that is not this user's; else empty."""
    if status.st_uid == os.geteuid():
        return ""
    return f"belongs to user {_name(status.st_uid)}, this is user {_name(os.geteuid())}"


def shared_with(status: os.stat_result) -> str:
    """Why others than this user may change what lies in a directory; else empty."""
    if not stat.S_ISDIR(status.st_mode):
        return "is no directory"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written to by others (mode {stat.S_IMODE(status.st_mode):o})"
    return whose(status)


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
