"""The `liver` command: its commands, their options, and what each of them does.

Each command imports what it needs when it runs, so `--help` is quick. Exit codes: 0 done, 1 the run
failed or does not answer, 2 bad input, 3 refused by the coordinator, 130 interrupted (a launched
run goes on).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from liver_hpc import __version__
from liver_hpc.cli.dashboard import add_options as add_dashboard_options
from liver_hpc.errors import ConfigError, LiverError, RequestRefused
from liver_hpc.report.command import add_options as add_report_options

if TYPE_CHECKING:
    from liver_hpc.run.directory import RunDirectory
    from liver_hpc.run.outcome import Outcome

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130

_FOLLOW_INTERVAL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = new_parser().parse_args(arguments)
    try:
        return int(options.do(options))
    except ConfigError as error:
        return _complain(error, EXIT_BAD_INPUT)
    except RequestRefused as error:
        return _complain(error, EXIT_REFUSED)
    except LiverError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return _complain("interrupted; a run that was launched goes on", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from failing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OK


def _complain(error: object, code: int) -> int:
    print(f"liver: error: {error}", file=sys.stderr)
    return code


# ---- commands

_Command = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Every error starts with `liver: error:`, whichever command it is about."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"liver: error: {message}\n")


def new_parser() -> argparse.ArgumentParser:
    """Parses to one command's options, and `do`, which takes them and returns the exit code."""
    parser = _Parser(
        prog="liver",
        description="Train on a Slurm cluster (or this machine), and reshape the job as it runs.",
    )
    parser.add_argument("--version", action="version", version=f"liver {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name: str, do: _Command, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text)
        added.set_defaults(do=do)
        return added

    def of_run(name: str, do: _Command, text: str) -> argparse.ArgumentParser:
        added = command(name, do, text)
        added.add_argument("run", metavar="RUN", help="a run directory, its name, or `latest`")
        _directory(added, "default: runs", Path("runs"))
        return added

    _submit_options(command("submit", _submit, "check a run file and launch the run"))
    _run_file(command("run", _run, "run in this process, in a batch job of one's own"))
    of_run("coordinate", _coordinate, "take over a run whose coordinator is gone, in this process")
    status = of_run("status", _status, "what a run is doing")
    status.add_argument("--json", action="store_true", help="the snapshot, for programs")
    resize = of_run("resize", _ask, "give a running job another shape")
    add = resize.add_mutually_exclusive_group(required=True).add_argument
    add("--layout", metavar="tp=A,pp=B,dp=C", help="the layout to change to")
    add("--workers", type=_count, metavar="N", help="take the preferred layout of N workers")
    replace = of_run("replace", _ask, "put a fresh worker in the place of another")
    replace.add_argument("--worker", type=_worker_id, required=True, metavar="W", help="its id")
    drain = of_run("drain", _ask, "leave a node live, so that it can be taken away")
    drain.add_argument("node", metavar="NODE", help="the node's name, as `liver status` has it")
    add = drain.add_mutually_exclusive_group().add_argument
    add("--within-s", type=_seconds, metavar="S", help="the window (default: the run file's)")
    add("--undo", action="store_true", help="a node that was drained is used again")
    add = of_run("stop", _stop, "end a run at its next step boundary").add_argument
    add("--timeout-s", type=_seconds, metavar="S", help="wait at most this long for the end")
    text = "write the state to disk first, so that the run can go on from there"
    add("--checkpoint", action="store_true", help=text)
    add_dashboard_options(of_run("dashboard", _dashboard, "a page that follows a run, live"))
    add_report_options(of_run("report", _report, "what a run's reconfigurations cost"))
    _doctor_options(command("doctor", _doctor, "whether this cluster has what a run needs"))
    _run_file(command("prepare-data", _prepare_data, "tokenize the text that a run file names"))
    _check_model_options(
        command("check-model", _check_model, "whether the model is the same in all layouts")
    )
    return parser


# ---- options


def _run_file(parser: argparse.ArgumentParser, required: bool = True) -> None:
    add = parser.add_argument
    add("--config", type=Path, required=required, metavar="FILE", help="the run file")
    text = "a value in YAML that beats the run file's; may be given several times"
    add("--set", action="append", default=[], metavar="KEY.SUB=VALUE", help=text)


def _check_model_options(parser: argparse.ArgumentParser) -> None:
    _run_file(parser)
    text = "instead: how long the layers take here, as the run file has it (model.layer_times)"
    parser.add_argument("--times", action="store_true", help=text)


def _directory(parser: argparse.ArgumentParser, text: str, default: Path | None) -> None:
    parser.add_argument("--runs-directory", type=Path, default=default, metavar="DIR", help=text)


def _submit_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _run_file(parser, required=False)
    text = "instead of --config: an ended run goes on from its newest checkpoint"
    add("--resume", metavar="RUN", help=text)
    _directory(parser, argparse.SUPPRESS, Path("runs"))
    kinds = ("local", "slurm", "auto")
    add("--cluster", choices=kinds, help="where to run; beats the run file")
    text = "print the resolved run with its sizes, and what Slurm would get; launch nothing"
    add("--dry-run", action="store_true", help=text)
    text = "watch the run until it ends (the default in a terminal)"
    add("--follow", action=argparse.BooleanOptionalAction, help=text)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    _run_file(parser, required=False)
    add("--nodes", type=_count, metavar="N", help="also examine N nodes: takes them for a minute")
    add("--partition", metavar="P", help="take them from this partition")
    add("--account", metavar="A", help="take them on this account")
    add("--gpus-per-node", type=_count, metavar="G", help="take nodes with GPUs, for NCCL")
    add("--grant-s", type=_seconds, metavar="S", help="wait at most this long for the nodes")
    _directory(parser, "where runs are to be (default: runs)", None)
    add("--json", action="store_true", help="one JSON object a line")


def _value(wanted: str, kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """What takes a number from the command line; below `least` there is none."""

    def value(text: str) -> Any:
        try:
            if least <= kind(text) < math.inf:
                return kind(text)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"wanted {wanted}, got {text!r}")

    return value


_count = _value("a whole number of at least 1", int, 1)
_worker_id = _value("a worker id such as 3", int, 0)
_seconds = _value("a number of seconds above 0", float, sys.float_info.min)


# ---- what they do


def _submit(options: argparse.Namespace) -> int:
    from liver_hpc.cli.submission import checked_run, resume_run, submit_run
    from liver_hpc.recipes.completion import load_users_run

    if (options.config is None) == (options.resume is None):
        raise ConfigError("submit wants either --config FILE or --resume RUN")
    follow = sys.stdout.isatty() if options.follow is None else options.follow
    if options.resume is not None:
        if options.set or options.cluster or options.dry_run:
            raise ConfigError(
                "--resume takes the run as it is: neither --set, --cluster nor --dry-run"
            )
        run = _find(options.resume, options)
        print(f"run {run} goes on from step {resume_run(run)}", flush=True)
        return _follow(run) if follow else EXIT_OK
    config = load_users_run(options.config, options.set)
    if options.dry_run:
        from liver_hpc.cli.dry_run import describe_run

        print(describe_run(*checked_run(config, options.cluster)))
        return EXIT_OK
    run = submit_run(config, options.cluster)
    print(f"run {run}" if follow else run, flush=True)
    return _follow(run) if follow else EXIT_OK


def _follow(run: RunDirectory) -> int:
    """Watches a run to its end; its outcome as the exit code. Ctrl-C leaves the run alone."""
    from rich.console import Console

    from liver_hpc.cli.client import Watch, await_coordinator, goes_on
    from liver_hpc.cli.follow import follow
    from liver_hpc.report.command import show

    watch = Watch(run)
    try:
        is_awaited = True
        while is_awaited:
            await_coordinator(run)
            follow(watch.snapshot, Console(), _FOLLOW_INTERVAL_S)
            is_awaited = goes_on(run)
    except KeyboardInterrupt:
        print(f"\nrun {run} goes on; see `liver status {run}`, end it with `liver stop {run}`")
        return EXIT_INTERRUPTED
    finally:
        watch.close()
    try:
        show(run.path)
    except ConfigError as error:  # a run may end before it has figures, or on a broken disk
        print(f"no report: {error}", file=sys.stderr)
    if (outcome := run.outcome()) is None:
        raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
    return _tell(run, outcome)


def _tell(run: RunDirectory, outcome: Outcome) -> int:
    print(f"run {run}: {outcome}")
    if outcome.state != "failed":
        return EXIT_OK
    print(run.where_logs_are())
    return EXIT_FAILED


def _find(name: str, options: argparse.Namespace) -> RunDirectory:
    from liver_hpc.run.directory import find_run

    return find_run(name, options.runs_directory)


def _run(options: argparse.Namespace) -> int:
    from liver_hpc.cli.launch import run_here

    run, outcome = run_here(options.config, options.set)
    if outcome is None:
        print(f"run {run} goes on when its job starts again")
        return EXIT_OK
    return _tell(run, outcome)


def _coordinate(options: argparse.Namespace) -> int:
    from liver_hpc.cli.launch import coordinate_here

    run = _find(options.run, options)
    outcome = coordinate_here(run)
    if outcome is None:
        print(f"run {run} goes on when its job starts again")
        return EXIT_OK
    return _tell(run, outcome)


def _status(options: argparse.Namespace) -> int:
    from liver_hpc.cli.client import RunWaits, request
    from liver_hpc.cli.follow import status_text
    from liver_hpc.protocol.messages import StatusRequest
    from liver_hpc.protocol.status import StatusSnapshot

    run = _find(options.run, options)
    if (outcome := run.outcome()) is not None:
        if not options.json:
            return _tell(run, outcome)
        print(json.dumps(asdict(outcome)))
        return EXIT_FAILED if outcome.state == "failed" else EXIT_OK
    try:
        snapshot = StatusSnapshot.model_validate(request(run, StatusRequest()).data)
    except RunWaits as waits:
        print(json.dumps({"state": "waiting", "reason": str(waits)}) if options.json else waits)
        return EXIT_OK
    print(snapshot.model_dump_json() if options.json else status_text(snapshot))
    return EXIT_OK


def _ask(options: argparse.Namespace) -> int:
    from liver_hpc.cli.client import request
    from liver_hpc.layout.coordinates import Layout
    from liver_hpc.protocol.messages import (
        DrainRequest,
        FromOperator,
        ReplaceRequest,
        ResizeRequest,
    )

    message: FromOperator
    if options.command == "resize":
        layout = None if options.layout is None else str(Layout.parse(options.layout))
        message = ResizeRequest(layout=layout, workers=options.workers)
    elif options.command == "replace":
        message = ReplaceRequest(replace=options.worker)
    else:
        message = DrainRequest(node=options.node, within_s=options.within_s, undo=options.undo)
    print(request(_find(options.run, options), message).text)
    return EXIT_OK


def _stop(options: argparse.Namespace) -> int:
    from liver_hpc.cli.client import stop

    run = _find(options.run, options)
    return _tell(run, stop(run, options.timeout_s, options.checkpoint))


def _report(options: argparse.Namespace) -> int:
    from liver_hpc.report.command import report

    report(_find(options.run, options).path, options)
    return EXIT_OK


def _dashboard(options: argparse.Namespace) -> int:
    from liver_hpc.cli.dashboard import dashboard

    dashboard(_find(options.run, options), options)
    return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    from liver_hpc.doctor.command import run

    try:
        return run(options)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing of the examination is left", EXIT_INTERRUPTED)


def _prepare_data(options: argparse.Namespace) -> int:
    from liver_hpc.config.load import absolute_paths
    from liver_hpc.recipes.completion import load_users_run
    from liver_hpc.recipes.text_data import prepare

    data = absolute_paths(load_users_run(options.config, options.set)).data
    if data is None or data.text is None:
        raise ConfigError(f"{options.config}: data.text is not given; there is nothing to prepare")
    held = prepare(data)
    print(f"{held.prefix}: {held.documents} documents, {held.tokens} tokens of {held.token_type}")
    return EXIT_OK


def _check_model(options: argparse.Namespace) -> int:
    from liver_hpc.cli.check_model import check_model, measured_times
    from liver_hpc.recipes.completion import load_users_run

    config = load_users_run(options.config, options.set)
    if options.times:
        print(measured_times(config))
        return EXIT_OK
    equal = check_model(config, partial(print, flush=True))
    return EXIT_OK if equal else EXIT_FAILED
