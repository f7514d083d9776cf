"""`python -m liver_hpc.doctor.probe NAME ...`: one look at or between nodes, told in JSON lines.

Started by `liver doctor` as a step of Slurm. What it finds goes to standard output; a reason why
it could not look is a line {"error": ...} and exit code 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from pathlib import Path
from typing import Any, NoReturn

from liver_hpc.config.schema import NetworkSection
from liver_hpc.doctor import on_node

log = logging.getLogger(__name__)


def say(**fields: Any) -> None:
    """One line, and at once."""
    os.write(1, json.dumps(fields).encode() + b"\n")


def _facts(options: argparse.Namespace) -> None:
    on_node.tell_facts(say, options.directory, options.name, options.network)


def _hold_lock(options: argparse.Namespace) -> None:
    on_node.hold_lock(say, options.directory)


def _try_lock(options: argparse.Namespace) -> None:
    say(free=on_node.try_lock(options.directory))


def _serve_clock(options: argparse.Namespace) -> None:
    from liver_hpc.doctor.between import serve_clock

    serve_clock(say, options.network)


def _compare_clock(options: argparse.Namespace) -> None:
    from liver_hpc.doctor.between import compare_clock

    compare_clock(say, options.host, options.port, options.limit_s)


def _desk(options: argparse.Namespace) -> None:
    from liver_hpc.doctor.between import open_desk

    open_desk(say, options.directory, options.network)


def _join(options: argparse.Namespace) -> None:
    from liver_hpc.doctor.between import join_desk

    join_desk(say, options.directory, options.limit_s)


def _bytes(options: argparse.Namespace) -> None:
    from liver_hpc.doctor.between import Pair, measure

    store = (options.host, options.port) if options.host else None
    pair = Pair(1 if store else 0, options.backend, store, options.limit_s)
    measure(say, pair, options.network)


PROBES = {
    "facts": _facts,
    "hold-lock": _hold_lock,
    "try-lock": _try_lock,
    "serve-clock": _serve_clock,
    "compare-clock": _compare_clock,
    "desk": _desk,
    "join": _join,
    "bytes": _bytes,
}
WAIT_FOR_THEIR_END = ("hold-lock", "serve-clock", "desk")


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="liver_hpc.doctor.probe", description=__doc__)
    parser.add_argument("probe", choices=PROBES)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--network", type=NetworkSection.model_validate_json)
    parser.add_argument("--name", action="append", default=[])
    parser.add_argument("--host", default="")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo")
    parser.add_argument("--limit-s", type=float, default=30.0)
    options = parser.parse_args()
    if options.probe in WAIT_FOR_THEIR_END:
        on_node.block_termination()
    code = 0
    try:
        PROBES[options.probe](options)
    except Exception as error:
        log.exception("the %s probe failed", options.probe)
        say(error=f"{type(error).__name__}: {error}")
        code = 1
    logging.shutdown()
    os._exit(code)  # native threads must not hold the step


if __name__ == "__main__":
    main()
