"""The run's secret: made once, private, refused when anybody else could have read it."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.run.secret import create_secret, read_secret


def test_read_returns_what_create_returned(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = create_secret(path)
    assert len(secret) == 32
    assert read_secret(path) == secret


def test_two_secrets_differ(tmp_path: Path) -> None:
    assert create_secret(tmp_path / "a") != create_secret(tmp_path / "b")


def test_created_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0)
    try:
        create_secret(tmp_path / "secret")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600


def test_create_never_replaces_a_secret(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    secret = create_secret(path)
    with pytest.raises(ConfigError, match="exists already"):
        create_secret(path)
    assert read_secret(path) == secret


def test_create_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        create_secret(tmp_path / "secret")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_read_refuses_a_file_that_others_may_open(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=rf"mode {mode:04o} lets others in; wanted 0600"):
        read_secret(path)


def test_read_refuses_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    create_secret(path)
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(ConfigError, match=r"belongs to user .*, this is user "):
        read_secret(path)


@pytest.mark.parametrize("text", ["", "xyz", "00" * 31, "00" * 33, "é" * 32, "0" * 1000])
def test_read_refuses_what_is_no_secret(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text, encoding="utf-8")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="wanted 64 hex digits"):
        read_secret(path)


def test_read_refuses_a_link_a_pipe_a_directory_and_nothing(tmp_path: Path) -> None:
    create_secret(tmp_path / "secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "directory").mkdir(0o700)
    for name in ("link", "pipe", "directory", "nothing"):
        with pytest.raises(ConfigError, match=f"secret {tmp_path / name}: "):
            read_secret(tmp_path / name)


def test_a_created_file_is_private_whatever_its_directory_has_it_inherit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inheritable ACLs of NFSv4 (OneFS, ZFS, GPFS) beat the mode that a file is opened with."""
    open_before = os.open

    def inherits(path: Path, flags: int, mode: int = 0o777, **more: Any) -> int:
        descriptor = open_before(path, flags, mode, **more)
        if flags & os.O_CREAT:
            os.chmod(path, mode | 0o060)
        return descriptor

    monkeypatch.setattr(os, "open", inherits)
    secret = create_secret(tmp_path / "secret")
    assert read_secret(tmp_path / "secret") == secret
