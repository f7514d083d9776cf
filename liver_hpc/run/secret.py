"""The secret of a run: 32 random bytes in a file that only its owner may read."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from liver_hpc.errors import ConfigError
from liver_hpc.host.files import whose, write_whole

SECRET_BYTES = 32


def create_secret(path: Path) -> bytes:
    """Writes a fresh secret as hex to a new file of mode 0600 and returns its bytes.

    Raises ConfigError if the file exists already or cannot be written.
    """
    if os.path.lexists(path):
        raise ConfigError(f"secret {path}: exists already; a run makes its own")
    secret = secrets.token_bytes(SECRET_BYTES)
    try:
        write_whole(path, secret.hex() + "\n", mode=0o600, sync=True)
    except OSError as error:
        raise ConfigError(f"secret {path}: {error.strerror}") from error
    return secret


def read_secret(path: Path) -> bytes:
    """The bytes of the secret in `path`.

    Raises ConfigError unless it is a regular file of this user that nobody else can read, and
    holds what `create_secret` writes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"secret {path}: {error.strerror}") from error
    try:
        _check_private(path, os.fstat(descriptor))
        text = os.read(descriptor, 4 * SECRET_BYTES)
    except OSError as error:
        raise ConfigError(f"secret {path}: {error.strerror}") from error
    finally:
        os.close(descriptor)
    try:
        secret = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        secret = b""
    if len(secret) != SECRET_BYTES:
        raise ConfigError(f"secret {path}: wanted {2 * SECRET_BYTES} hex digits")
    return secret


def _check_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"secret {path}: not a regular file")
    if whose(status):
        raise ConfigError(f"secret {path}: {whose(status)}")
    if mode & 0o077:
        raise ConfigError(
            f"secret {path}: mode {mode:04o} lets others in; wanted 0600 (chmod 600 it, or start "
            "a new run if somebody may have read it)"
        )
