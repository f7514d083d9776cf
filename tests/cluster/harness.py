"""A test cluster as a test uses it: by its command line, with a deadline on everything."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slurm.testbed.settings import STATE_ROOT, Place

REPOSITORY = Path(__file__).parents[2]


def command_line(name: str, *words: str) -> list[str]:
    return [sys.executable, "-m", "slurm.testbed", "--name", name, *words]


@dataclass(frozen=True)
class SlurmCluster:
    """One cluster; `shared` is a directory that all its nodes see."""

    name: str
    shared: Path
    grace_s: int = 4
    kill_wait_s: int = 5

    @property
    def place(self) -> Place:
        return Place(self.name, STATE_ROOT)

    def fresh(self, name: str) -> Path:
        """An empty directory on all nodes; each call makes another one, as a test may be tried
        again."""
        return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.shared))

    def up(self, nodes: int, limit_s: float = 110.0) -> None:
        options = ["--nodes", str(nodes), "--grace-s", str(self.grace_s)]
        options += ["--kill-wait-s", str(self.kill_wait_s)]
        self.testbed(
            *("up", *options, "--slurmd-timeout-s", "5", "--share", str(self.shared)),
            limit_s=limit_s,
        )

    def testbed(self, *words: str, limit_s: float = 60.0) -> str:
        """Output of one command of the testbed; fails the test with its complaint."""
        done = self.attempt(command_line(self.name, *words), limit_s)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    def run(self, *words: str, limit_s: float = 30.0) -> str:
        """Output of a command on the control host: `run("srun", "-N2", "hostname")`."""
        return self.testbed("exec", "--", *words, limit_s=limit_s)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """The same, not waited for; what still runs at the test's end goes with its job."""
        return subprocess.Popen(
            command_line(self.name, "exec", "--", *words),
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @staticmethod
    def attempt(command: list[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
