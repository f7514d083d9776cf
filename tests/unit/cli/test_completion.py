"""What a shell offers when TAB is pressed, by the protocol of argcomplete."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from liver_hpc.run.directory import create_run_directory, point_latest
from tests.unit.config.runs import minimal


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(repository))


def offered(line: str) -> list[str]:
    """Behind a line, in the order of the alphabet."""
    asked = {
        "_ARGCOMPLETE": "3",  # so many words are the command: python -m liver_hpc
        "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": "offered",
        "_ARGCOMPLETE_SUPPRESS_SPACE": "1",
        "COMP_LINE": f"python -m liver_hpc {line}",
        "COMP_POINT": str(len(f"python -m liver_hpc {line}")),
        "COMP_TYPE": "9",
    }
    command = [sys.executable, "-m", "liver_hpc"]
    subprocess.run(command, env=os.environ | asked, check=True, timeout=60)
    return sorted(Path("offered").read_text().split("\n"))


def test_commands_options_and_runs_are_offered() -> None:
    for name in ("demo-1", "demo-2", "other"):
        point_latest(create_run_directory(minimal(), name))
    (Path("runs") / "no-run").mkdir()
    assert offered("sta") == ["status"]
    assert offered("submit --cluster s") == ["slurm"]
    assert offered("status ")[:4] == ["--help", "--json", "--runs-directory", "-h"]
    assert offered("logs demo") == ["demo-1", "demo-2"]
    assert offered("logs --runs-directory elsewhere la") == [""]
