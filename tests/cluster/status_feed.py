"""Prints a run's status as a line of JSON, again and again: `... status_feed RUN INTERVAL_S`.

One process for a whole run, since starting `liver status` costs more than the answer. Between two
lives of a run, and after its end, it prints {}.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from liver_hpc.cli.client import Watch
from liver_hpc.errors import LiverError
from liver_hpc.run.directory import RunDirectory


def main() -> None:
    watch, interval_s = Watch(RunDirectory(Path(sys.argv[1]))), float(sys.argv[2])
    pause = threading.Event()
    while True:
        try:
            snapshot = watch.snapshot()
        except LiverError:  # a coordinator that was killed a moment ago
            snapshot = None
        print(snapshot.model_dump_json() if snapshot is not None else "{}", flush=True)
        pause.wait(interval_s)


if __name__ == "__main__":
    main()
