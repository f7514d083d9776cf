"""`liver dashboard`: what it prints, where it listens, and how it ends."""

from __future__ import annotations

import getpass
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from liver_hpc.cli import main as cli
from liver_hpc.cli.dashboard import forwarding, told
from liver_hpc.run.directory import RunDirectory, create_run_directory
from tests.unit.config.runs import minimal
from tests.unit.report.journals import write_journal
from tests.unit.report.run_of_everything import everything

LIMIT_S = 60.0


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    run = create_run_directory(minimal())
    write_journal(run.path, everything())
    return run


def served(run: RunDirectory, *options: str) -> tuple[str, str]:
    """The page, and all that the command has printed, once it was interrupted."""
    command = [sys.executable, "-m", "liver_hpc", "dashboard", str(run.path), *options]
    before = {*run.path.rglob("*")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        with urllib.request.urlopen(address.strip(), timeout=LIMIT_S) as answer:
            page = answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(address.partition("?")[0], timeout=LIMIT_S)
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        process.wait(LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert {*run.path.rglob("*")} == before
    return page, address + rest


def test_a_run_is_served_on_loopback_until_ctrl_c(run: RunDirectory) -> None:
    page, printed = served(run)
    assert page.startswith("<!doctype html>")
    assert printed.startswith("http://127.0.0.1:")
    assert f"follows {run} until Ctrl-C" in printed
    assert "ssh" not in printed


@pytest.mark.parametrize("kind", ["local", "slurm"])
@pytest.mark.parametrize("connection", ["", "10.0.0.9 5000 10.0.0.1 22"])
def test_who_sits_elsewhere_is_told_how_to_get_there(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, kind: str, connection: str
) -> None:
    monkeypatch.setenv("SSH_CONNECTION", connection)
    other = create_run_directory(minimal(cluster={"kind": kind}))
    is_needed = bool(connection) or kind == "slurm"
    line = f"from your own machine, first: {forwarding('127.0.0.1', 4711)}"
    assert (line in told(other, "127.0.0.1", 4711, "t")) == is_needed


def test_who_lets_others_in_is_told_so() -> None:
    lines = [*told(RunDirectory(Path("r")), "0.0.0.0", 4711, "t")]
    assert lines[1] == "others on the network can read along: nothing is encrypted"


def test_the_line_that_forwards_a_port() -> None:
    here = f"{getpass.getuser()}@{socket.gethostname()}"
    assert forwarding("127.0.0.1", 4711) == f"ssh -N -L 4711:127.0.0.1:4711 {here}"


def test_the_command_names_nobody_where_the_machine_knows_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 7)
    assert forwarding("127.0.0.1", 4711).endswith(f" {socket.gethostname()}")


def test_a_port_that_is_taken_is_said_so(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["dashboard", str(run.path), "--port", port]) == 2
    assert f"--host 127.0.0.1 --port {port}: cannot listen there: " in capsys.readouterr().err


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http"])
def test_what_is_no_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["dashboard", "latest", f"--port={port}"])
    assert f"wanted a port between 1 and 65535, got '{port}'" in capsys.readouterr().err


def test_a_host_that_is_not_here_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["dashboard", str(run.path), "--host", "192.0.2.7"]) == 2
    assert "--host 192.0.2.7: cannot listen there: " in capsys.readouterr().err


def test_a_run_without_a_journal_is_for_the_report(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    os.rename(run.path / "journal.jsonl", run.path / "metrics.h5")
    assert cli.main(["dashboard", str(run.path)]) == 2
    assert f"{run} has no journal.jsonl to follow; see `liver report {run}`" in (
        capsys.readouterr().err
    )
