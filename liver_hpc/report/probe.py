"""Whether a metrics file can be read, found out in a process that can be ended.

HDF5 may run for ever on a file with damage in its middle, or end the process; Python gets no turn
meanwhile, so that no time limit within the process would help.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from liver_hpc.errors import ConfigError
from liver_hpc.report.hdf5 import read_file

PROBE_S = 15.0
BYTES_PER_S = 20 * 2**20
"""So slowly may a file be read that is whole."""

EXIT_UNREADABLE = 1


def probe(path: Path, limit_s: float = PROBE_S) -> None:
    """Reads the file once; returns when that was possible. Allows a large file more time.

    Raises ConfigError, which names the file, when it is missing, truncated, damaged, or no metrics
    file.
    """
    if path.exists():
        limit_s += path.stat().st_size / BYTES_PER_S
    command = [sys.executable, "-P", "-m", "liver_hpc.report.probe", str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"{path} is damaged: HDF5 did not come to an end with it within {limit_s:.0f} s"
        ) from None
    if done.returncode == EXIT_UNREADABLE and done.stdout:
        raise ConfigError(done.stdout.strip())
    if done.returncode != 0:
        # h5py raises many things for bytes that make no sense, and HDF5 may crash.
        last_words = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{path} is damaged: {last_words}")


def main() -> NoReturn:
    """The process: reads the file that its only argument names."""
    path = Path(sys.argv[1])
    try:
        read_file(path)
    except ConfigError as error:
        print(error)
        sys.exit(EXIT_UNREADABLE)
    sys.exit(0)


if __name__ == "__main__":
    main()
