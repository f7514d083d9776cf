"""The `liver` command. Each command imports what it needs when it runs, so `--help` is quick.

Exit codes: 0 done, 1 the run failed or does not answer, 2 bad input, 3 refused by the coordinator,
130 interrupted (a launched run goes on).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from liver_hpc import __version__
from liver_hpc.cli.arguments import count, seconds, worker_id
from liver_hpc.cli.doctor_options import add_options as add_doctor_options
from liver_hpc.errors import ConfigError, LiverError, RequestRefused
from liver_hpc.report.command import add_options as add_report_options

if TYPE_CHECKING:
    from liver_hpc.protocol.messages import FromOperator
    from liver_hpc.run.directory import RunDirectory
    from liver_hpc.run.outcome import Outcome

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130

_FOLLOW_INTERVAL_S = 0.2


class _Parser(argparse.ArgumentParser):
    """Every error starts with `liver: error:`, whichever command it is about."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_BAD_INPUT, f"liver: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.command(options))
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


# ---- the command line


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="liver",
        description="Train on a Slurm cluster (or this machine), and reshape the job as it runs.",
    )
    parser.add_argument("--version", action="version", version=f"liver {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    submit = commands.add_parser("submit", help="check a run file and launch the run")
    _add_run_file(submit, required=False)
    submit.add_argument(
        "--resume",
        metavar="RUN",
        help="instead of --config: an ended run goes on from its newest checkpoint",
    )
    submit.add_argument(
        "--runs-directory", type=Path, default=Path("runs"), metavar="DIR", help=argparse.SUPPRESS
    )
    submit.add_argument(
        "--cluster", choices=("local", "slurm", "auto"), help="where to run; beats the run file"
    )
    submit.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved run with its sizes, and what Slurm would get; launch nothing",
    )
    submit.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        help="watch the run until it ends (the default in a terminal)",
    )
    submit.set_defaults(command=_submit)

    run = commands.add_parser("run", help="live a run in this process, in a batch job of one's own")
    _add_run_file(run)
    run.set_defaults(command=_run)

    status = _add_run_command(commands, "status", "what a run is doing")
    status.add_argument("--json", action="store_true", help="the snapshot, for programs")
    status.set_defaults(command=_status)

    resize = _add_run_command(commands, "resize", "give a running job another shape")
    shape = resize.add_mutually_exclusive_group(required=True)
    shape.add_argument("--layout", metavar="tp=A,pp=B,dp=C", help="the layout to change to")
    shape.add_argument(
        "--workers", type=count, metavar="N", help="take the preferred layout of N workers"
    )
    resize.set_defaults(command=_resize)

    replace = _add_run_command(commands, "replace", "put a fresh worker in the place of another")
    replace.add_argument("--worker", type=worker_id, required=True, metavar="W", help="its id")
    replace.set_defaults(command=_replace)

    drain = _add_run_command(commands, "drain", "leave a node live, so that it can be taken away")
    drain.add_argument("node", metavar="NODE", help="the node's name, as `liver status` has it")
    how = drain.add_mutually_exclusive_group()
    how.add_argument(
        "--within-s", type=seconds, metavar="S", help="the window (default: the run file's)"
    )
    how.add_argument("--undo", action="store_true", help="a node that was drained is used again")
    drain.set_defaults(command=_drain)

    stop = _add_run_command(commands, "stop", "end a run at its next step boundary")
    stop.add_argument(
        "--timeout-s", type=seconds, metavar="S", help="wait at most this long for the end"
    )
    stop.add_argument(
        "--checkpoint",
        action="store_true",
        help="write the state to disk first, so that the run can go on from there",
    )
    stop.set_defaults(command=_stop)

    report = _add_run_command(commands, "report", "what a run's reconfigurations cost")
    add_report_options(report)
    report.set_defaults(command=_report)

    doctor = commands.add_parser("doctor", help="whether this cluster has what a run needs")
    add_doctor_options(doctor)
    doctor.set_defaults(command=_doctor)

    prepare = commands.add_parser("prepare-data", help="tokenize the text that a run file names")
    _add_run_file(prepare)
    prepare.set_defaults(command=_prepare_data)
    return parser


def _add_run_file(parser: argparse.ArgumentParser, required: bool = True) -> None:
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


def _add_run_command(
    commands: argparse._SubParsersAction[_Parser], name: str, text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text)
    parser.add_argument("run", metavar="RUN", help="a run directory, its name, or `latest`")
    parser.add_argument(
        "--runs-directory", type=Path, default=Path("runs"), metavar="DIR", help="default: runs"
    )
    return parser


# ---- commands


def _submit(options: argparse.Namespace) -> int:
    from liver_hpc.cli.submission import checked_run, submit_run
    from liver_hpc.config.load import load_run

    if (options.config is None) == (options.resume is None):
        raise ConfigError("submit wants either --config FILE or --resume RUN")
    if options.resume is not None:
        return _resume(options)
    config = load_run(options.config, options.set)
    if options.dry_run:
        from liver_hpc.cli.dry_run import describe_run

        print(describe_run(*checked_run(config, options.cluster)))
        return EXIT_OK
    follow = sys.stdout.isatty() if options.follow is None else options.follow
    run = submit_run(config, options.cluster)
    if not follow:
        print(run)
        return EXIT_OK
    print(f"run {run}", flush=True)
    return _follow(run)


def _resume(options: argparse.Namespace) -> int:
    from liver_hpc.cli.resume import resume_run
    from liver_hpc.run.directory import find_run

    if options.set or options.cluster or options.dry_run:
        raise ConfigError("--resume takes the run as it is: neither --set, --cluster nor --dry-run")
    run = find_run(options.resume, options.runs_directory)
    step = resume_run(run)
    print(f"run {run} goes on from step {step}", flush=True)
    follow = sys.stdout.isatty() if options.follow is None else options.follow
    return _follow(run) if follow else EXIT_OK


def _follow(run: RunDirectory) -> int:
    """Watches a run to its end; its outcome as the exit code. Ctrl-C leaves the run alone."""
    from rich.console import Console

    from liver_hpc.cli.client import Watch, begins_again, final_outcome
    from liver_hpc.cli.follow import follow
    from liver_hpc.cli.submission import await_coordinator
    from liver_hpc.report.command import show

    watch = Watch(run)
    try:
        while True:
            await_coordinator(run, lambda text: print(text, flush=True))
            follow(watch.snapshot, Console(), _FOLLOW_INTERVAL_S)
            outcome = final_outcome(run)
            if outcome is not None or not begins_again(run):
                break
    except KeyboardInterrupt:
        print(f"\nrun {run} goes on; see `liver status {run}`, end it with `liver stop {run}`")
        return EXIT_INTERRUPTED
    finally:
        watch.close()
    try:
        show(run.path)
    except ConfigError as error:  # a run may end before it has figures, or on a broken disk
        print(f"no report: {error}", file=sys.stderr)
    if outcome is None:
        raise LiverError(f"run {run} ended without an outcome; {run.where_logs_are()}")
    return _tell_outcome(run)


def _tell_outcome(run: RunDirectory) -> int:
    outcome = run.outcome()
    assert outcome is not None
    return _tell(run, outcome)


def _tell(run: RunDirectory, outcome: Outcome) -> int:
    from liver_hpc.run.directory import outcome_text

    print(f"run {run}: {outcome_text(outcome)}")
    if outcome.state != "failed":
        return EXIT_OK
    print(run.where_logs_are())
    return EXIT_FAILED


def _find(options: argparse.Namespace) -> RunDirectory:
    from liver_hpc.run.directory import find_run

    return find_run(options.run, options.runs_directory)


def _request(run: RunDirectory, message: FromOperator) -> int:
    from liver_hpc.cli.client import request

    print(request(run, message).text)
    return EXIT_OK


def _run(options: argparse.Namespace) -> int:
    from liver_hpc.cli.run_here import run_here

    run, outcome = run_here(options.config, options.set, lambda text: print(text, flush=True))
    if outcome is None:
        print(f"run {run} goes on when its job starts again")
        return EXIT_OK
    return _tell(run, outcome)


def _status(options: argparse.Namespace) -> int:
    from liver_hpc.cli.client import RunWaits, request
    from liver_hpc.cli.status_text import status_text
    from liver_hpc.protocol.messages import StatusRequest
    from liver_hpc.protocol.status import StatusSnapshot

    run = _find(options)
    if (outcome := run.outcome()) is not None:
        if not options.json:
            return _tell_outcome(run)
        print(json.dumps(asdict(outcome)))
        return EXIT_FAILED if outcome.state == "failed" else EXIT_OK
    try:
        snapshot = StatusSnapshot.model_validate(request(run, StatusRequest()).data)
    except RunWaits as waits:
        print(json.dumps({"state": "waiting", "reason": str(waits)}) if options.json else waits)
        return EXIT_OK
    print(snapshot.model_dump_json() if options.json else status_text(snapshot))
    return EXIT_OK


def _resize(options: argparse.Namespace) -> int:
    from liver_hpc.layout.coordinates import Layout
    from liver_hpc.protocol.messages import ResizeRequest

    layout = None if options.layout is None else str(Layout.parse(options.layout))
    return _request(_find(options), ResizeRequest(layout=layout, workers=options.workers))


def _replace(options: argparse.Namespace) -> int:
    from liver_hpc.protocol.messages import ReplaceRequest

    return _request(_find(options), ReplaceRequest(replace=options.worker))


def _drain(options: argparse.Namespace) -> int:
    from liver_hpc.protocol.messages import DrainRequest

    drain = DrainRequest(node=options.node, within_s=options.within_s, undo=options.undo)
    return _request(_find(options), drain)


def _stop(options: argparse.Namespace) -> int:
    from liver_hpc.cli.client import stop

    run = _find(options)
    stop(run, options.timeout_s, options.checkpoint)
    return _tell_outcome(run)


def _report(options: argparse.Namespace) -> int:
    from liver_hpc.report.command import report

    report(_find(options).path, options)
    return EXIT_OK


def _doctor(options: argparse.Namespace) -> int:
    from liver_hpc.doctor.command import run

    try:
        return run(options)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing of the examination is left", EXIT_INTERRUPTED)


def _prepare_data(options: argparse.Namespace) -> int:
    from liver_hpc.cli.submission import prepare_data
    from liver_hpc.config.load import absolute_paths, load_run

    config = load_run(options.config, options.set)
    if config.data is None or config.data.text is None:
        raise ConfigError(f"{options.config}: data.text is not given; there is nothing to prepare")
    print(prepare_data(absolute_paths(config)))
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
