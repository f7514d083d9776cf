"""What a benchmark started ends with it when it fails or is killed: `python -m benchmarks.reaper`.

Runs outlive terminals, and processes that are compared stand still while others are measured: of
a benchmark that is killed both would stay for ever. A process beside it waits for its end.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator

from liver_hpc.host.child import Child, Command
from liver_hpc.host.marks import kill_marked

MARK = "LIVER_BENCHMARK"
"""By this variable in their environment the reaper finds the benchmark's processes."""

_KILL_S = 30.0


@contextlib.contextmanager
def nothing_outlives() -> Iterator[None]:
    """What is started inside is killed when an exception leaves the block, Ctrl-C's too, or this
    process dies inside it."""
    value, before = secrets.token_hex(8), os.environ.get(MARK)
    reaper = Child(
        Command(
            "the benchmark's reaper",
            [sys.executable, "-m", "benchmarks.reaper", value],
            orphan_signal=None,
            environment={name: setting for name, setting in os.environ.items() if name != MARK},
            stdin=subprocess.PIPE,
            apart="session",
        )
    )
    os.environ[MARK] = value
    try:
        yield
    except BaseException:
        kill_marked(MARK, value, _KILL_S)
        raise
    finally:
        if before is None:
            del os.environ[MARK]
        else:
            os.environ[MARK] = before
        reaper.end(0.0)


def main() -> None:
    """Kills all that bear the mark once the benchmark, which alone holds the other end, is gone."""
    sys.stdin.buffer.read()
    kill_marked(MARK, sys.argv[1], _KILL_S)


if __name__ == "__main__":
    main()
