"""A real browser without a screen: Debian's chromium."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 60.0
INSTALL_S = 300.0
NAMES = ("chromium", "chromium-browser", "google-chrome")


class NoBrowser(Exception):
    """There is none, and it may not be installed."""


@dataclass(frozen=True)
class View:
    """How a page is looked at. width, height: of the window, in CSS pixels."""

    width: int
    height: int
    dark: bool


def find_browser(install: bool) -> str:
    """The path of a browser; installs Debian's where it is missing and `install` says so.

    Raises NoBrowser, which says why, where there is none in the end.
    """
    for _ in range(2):
        for name in NAMES:
            if path := shutil.which(name):
                return path
        if not install:
            raise NoBrowser("chromium is not installed: apt-get install chromium")
        _install()
        install = False
    raise NoBrowser("chromium is not there after its installation")


def _install() -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise NoBrowser("chromium can be installed as root on Debian or Ubuntu only")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (
        ["apt-get", "update", "-qq"],
        ["apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"],
    ):
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
        if done.returncode != 0:
            raise NoBrowser(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")


def flags(profile: Path, view: View) -> list[str]:
    """With which a browser shows a page without a screen, and reaches nothing but this machine."""
    return [
        "--headless=new",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        f"--window-size={view.width},{view.height}",
        f"--blink-settings=preferredColorScheme={0 if view.dark else 1}",
        # No name but this machine's own resolves.
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]


def browse(browser: str, address: str, view: View, *action: str) -> tuple[str, str]:
    """Opens an address and does one thing with it, as `--dump-dom`; returns stdout and stderr."""
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *flags(Path(profile), view), "--virtual-time-budget=3000"]
        command += ["--enable-logging=stderr", *action, address]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd=Path(profile)
        )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr
