"""The command line: commands, their options, and what is said of values that are none. Imports
nothing that takes time."""

from __future__ import annotations

import argparse
import sys
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from liver_hpc import __version__
from liver_hpc.report.command import add_options as add_report_options

EXIT_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """Every error starts with `liver: error:`, whichever command it is about."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"liver: error: {message}\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """One command's options, and `command`, its name; exits with EXIT_BAD_INPUT for bad ones."""
    return new_parser().parse_args(arguments)


def new_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="liver",
        description="Train on a Slurm cluster (or this machine), and reshape the job as it runs.",
    )
    parser.add_argument("--version", action="version", version=f"liver {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, text: str, takes_run: bool = False) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        if takes_run:
            added.add_argument("run", metavar="RUN", help="a run directory, its name, or `latest`")
            _directory(added, "default: runs", Path("runs"))
        return added

    _submit(command("submit", "check a run file and launch the run"))
    run = command("run", "run in this process, in a batch job of one's own")
    _run_file(run)
    status = command("status", "what a run is doing", takes_run=True)
    status.add_argument("--json", action="store_true", help="the snapshot, for programs")
    _resize(command("resize", "give a running job another shape", takes_run=True))
    replace = command("replace", "put a fresh worker in the place of another", takes_run=True)
    replace.add_argument("--worker", type=worker_id, required=True, metavar="W", help="its id")
    _drain(command("drain", "leave a node live, so that it can be taken away", takes_run=True))
    _stop(command("stop", "end a run at its next step boundary", takes_run=True))
    add_report_options(command("report", "what a run's reconfigurations cost", takes_run=True))
    _doctor(command("doctor", "whether this cluster has what a run needs"))
    _run_file(command("prepare-data", "tokenize the text that a run file names"))
    _run_file(command("check-model", "compare the model's loss in all tp and pp of a run, here"))
    return parser


# ---- options


def _run_file(parser: argparse.ArgumentParser, required: bool = True) -> None:
    parser.add_argument(
        "--config", type=Path, required=required, metavar="FILE", help="the run file"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY.SUB=VALUE",
        help="a value in YAML that beats the run file's; may be given several times",
    )


def _directory(parser: argparse.ArgumentParser, text: str, default: Path | None) -> None:
    parser.add_argument("--runs-directory", type=Path, default=default, metavar="DIR", help=text)


def _submit(parser: argparse.ArgumentParser) -> None:
    _run_file(parser, required=False)
    parser.add_argument(
        "--resume",
        metavar="RUN",
        help="instead of --config: an ended run goes on from its newest checkpoint",
    )
    _directory(parser, argparse.SUPPRESS, Path("runs"))
    parser.add_argument(
        "--cluster", choices=("local", "slurm", "auto"), help="where to run; beats the run file"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved run with its sizes, and what Slurm would get; launch nothing",
    )
    parser.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="watch the run until it ends (the default in a terminal)",
    )


def _resize(parser: argparse.ArgumentParser) -> None:
    shape = parser.add_mutually_exclusive_group(required=True)
    shape.add_argument("--layout", metavar="tp=A,pp=B,dp=C", help="the layout to change to")
    shape.add_argument(
        "--workers", type=count, metavar="N", help="take the preferred layout of N workers"
    )


def _drain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("node", metavar="NODE", help="the node's name, as `liver status` has it")
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--within-s", type=seconds, metavar="S", help="the window (default: the run file's)"
    )
    how.add_argument("--undo", action="store_true", help="a node that was drained is used again")


def _stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--timeout-s", type=seconds, metavar="S", help="wait at most this long for the end"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="write the state to disk first, so that the run can go on from there",
    )


def _doctor(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _run_file(parser, required=False)
    add("--nodes", type=count, metavar="N", help="also examine N nodes: takes them for a minute")
    add("--partition", metavar="P", help="take them from this partition")
    add("--account", metavar="A", help="take them on this account")
    add("--gpus-per-node", type=count, metavar="G", help="take nodes with GPUs, for NCCL")
    add("--grant-s", type=seconds, metavar="S", help="wait at most this long for the nodes")
    _directory(parser, "where runs are to be (default: runs)", None)
    add("--json", action="store_true", help="one JSON object a line")


# ---- values


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"wanted a whole number of at least 1, got {text!r}")
    return int(text)


def worker_id(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"wanted a worker id such as 3, got {text!r}")
    return int(text)


def seconds(text: str) -> float:
    """A number above 0 with an end."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"wanted a number of seconds above 0, got {text!r}")
    return number
