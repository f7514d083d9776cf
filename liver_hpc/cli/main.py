"""The `liver` command: what each of its commands does; their options are in `options.py`.

Each command imports what it needs when it runs, so `--help` is quick. Exit codes: 0 done, 1 the run
failed or does not answer, 2 bad input, 3 refused by the coordinator, 130 interrupted (a launched
run goes on).
"""
# PYTHON_ARGCOMPLETE_OK: sites where a shell completes all commands look for this word.

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from liver_hpc.cli.options import EXIT_BAD_INPUT, RUNS_DIRECTORY, new_parser
from liver_hpc.errors import ConfigError, LiverError, RequestRefused, problems_of

if TYPE_CHECKING:
    from liver_hpc.run.directory import RunDirectory
    from liver_hpc.run.outcome import Outcome

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 3
EXIT_INTERRUPTED = 130

_FOLLOW_INTERVAL_S = 0.2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default this process's; returns its exit code."""
    if arguments is None:
        _open_closed_streams()
        # Where whoever has started us ignores it, nobody learns how a child has ended.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parser = new_parser()
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what could come next
        from argcomplete import autocomplete

        autocomplete(parser)
    try:
        try:
            return _perform(parser.parse_args(arguments))
        finally:  # also of --help
            sys.stdout.flush()
    except OSError as error:
        try:
            sys.stdout.flush()
        except OSError:  # its reader has gone, or a disk is full: it is not tried again at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        is_unread = isinstance(error, BrokenPipeError)
        return EXIT_OK if is_unread else _complain(error, EXIT_FAILED)


def _open_closed_streams() -> None:
    """Has this process the null device for a standard stream that it was started without, as by
    `>&-`. Else Python has none to print to, and the next file or socket gets its number, and what
    libraries complain of."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def _perform(options: argparse.Namespace) -> int:
    """Raises OSError where nobody knew of one: above all where the output cannot be written."""
    try:
        _check_directory()
        return _COMMANDS[options.command](options) or EXIT_OK
    except ConfigError as error:
        return _complain(error, EXIT_BAD_INPUT)
    except RequestRefused as error:
        return _complain(error, EXIT_REFUSED)
    except LiverError as error:
        return _complain(error, EXIT_FAILED)
    except KeyboardInterrupt as interrupt:
        nothing = "nothing was launched" if options.command == "submit" else ""
        said = filter(None, ("interrupted", str(interrupt) or nothing))
        return _complain("; ".join(said), EXIT_INTERRUPTED)


def _check_directory() -> None:
    """Raises ConfigError where the current directory is gone: no path could be made absolute."""
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(f"the current directory: {error.strerror}; go to another one") from None


def _complain(error: object, code: int) -> int:
    print(f"liver: error: {error}", file=sys.stderr)
    return code


def _init(options: argparse.Namespace) -> None:
    from liver_hpc.cli.init import init

    init(options)


def _submit(options: argparse.Namespace) -> int:
    from liver_hpc.cli.submission import resume_run, run_to_submit, submit_run
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
    if options.runs_directory is not None:
        raise ConfigError(
            "--runs-directory says where the run of --resume is; with --config it is "
            f"--set runs_directory={options.runs_directory}"
        )
    with problems_of(options.config):
        config = load_users_run(options.config, options.set)
        if options.dry_run:
            from liver_hpc.cli.dry_run import describe_run

            print(describe_run(*run_to_submit(config, options.cluster)))
            return EXIT_OK
        run = submit_run(config, options.cluster)
    print(f"run {run}" if follow else run, flush=True)
    return _follow(run) if follow else EXIT_OK


def _follow(run: RunDirectory) -> int:
    """Watches a run to its end; its outcome as the exit code. Ctrl-C leaves the run alone."""
    from rich.console import Console

    from liver_hpc.cli.client import Watch, await_coordinator, goes_on, goes_on_text
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
        print(f"\n{goes_on_text(run)}")
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


def _tell(run: RunDirectory, outcome: Outcome | None) -> int:
    if outcome is None:
        print(f"run {run} goes on when its job starts again")
        return EXIT_OK
    print(f"run {run}: {outcome}")
    if outcome.state != "failed":
        return EXIT_OK
    print(run.where_logs_are())
    return EXIT_FAILED


def _find(name: str, options: argparse.Namespace) -> RunDirectory:
    from liver_hpc.run.directory import find_run

    return find_run(name, options.runs_directory or RUNS_DIRECTORY)


def _run(options: argparse.Namespace) -> int:
    from liver_hpc.cli.launch import run_here

    return _tell(*run_here(options.config, options.set))


def _coordinate(options: argparse.Namespace) -> int:
    from liver_hpc.cli.launch import coordinate_here

    run = _find(options.run, options)
    return _tell(run, coordinate_here(run, options.script_lost))


def _status(options: argparse.Namespace) -> int:
    from dataclasses import asdict

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


def _list(options: argparse.Namespace) -> None:
    from liver_hpc.cli.list_runs import runs_json, runs_text

    text = runs_json if options.json else runs_text
    print(text(options.runs_directory))


def _logs(options: argparse.Namespace) -> None:
    from liver_hpc.cli.logs import show_log

    show_log(_find(options.run, options), options.worker, options.agent, options.follow)


def _events(options: argparse.Namespace) -> None:
    from liver_hpc.cli.events import show_events

    show_events(_find(options.run, options), options.since, options.json, options.follow)


def _ask(options: argparse.Namespace) -> None:
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


def _stop(options: argparse.Namespace) -> int:
    from liver_hpc.checkpoint.index import newest_step
    from liver_hpc.cli.client import stop

    run = _find(options.run, options)
    outcome = stop(run, options.timeout_s, options.checkpoint)
    code = _tell(run, outcome)
    if not options.checkpoint or outcome is None or not outcome.step:
        return code
    return code if newest_step(run.checkpoints_path) >= outcome.step else EXIT_FAILED


def _report(options: argparse.Namespace) -> None:
    from liver_hpc.report.command import report

    report(_find(options.run, options).path, options)


def _dashboard(options: argparse.Namespace) -> None:
    from liver_hpc.cli.dashboard import dashboard

    dashboard(_find(options.run, options), options)


def _doctor(options: argparse.Namespace) -> int:
    from liver_hpc.doctor.command import run

    if options.set and options.config is None:
        raise ConfigError("--set changes what a run file says; name one by --config FILE")
    try:
        return run(options)
    except KeyboardInterrupt:
        return _complain("interrupted; nothing of the examination is left", EXIT_INTERRUPTED)


def _prepare_data(options: argparse.Namespace) -> None:
    from liver_hpc.config.load import absolute_paths
    from liver_hpc.recipes.completion import load_users_run
    from liver_hpc.recipes.text_data import prepare

    data = absolute_paths(load_users_run(options.config, options.set)).data
    if data is None or data.text is None:
        raise ConfigError(f"{options.config}: data.text is not given; there is nothing to prepare")
    held = prepare(data)
    print(f"{held.prefix}: {held.documents} documents, {held.tokens} tokens of {held.token_type}")


def _check_model(options: argparse.Namespace) -> int:
    from liver_hpc.cli.check_model import check_model, measured_times
    from liver_hpc.recipes.completion import load_users_run

    with problems_of(options.config):
        config = load_users_run(options.config, options.set)
        if options.times:
            print(measured_times(config))
            return EXIT_OK
        equal = check_model(config, partial(print, flush=True))
    return EXIT_OK if equal else EXIT_FAILED


def _schema(options: argparse.Namespace) -> None:
    from liver_hpc.config.load import schema_text

    print(schema_text(), end="")


_COMMANDS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "init": _init,
    "submit": _submit,
    "run": _run,
    "coordinate": _coordinate,
    "list": _list,
    "status": _status,
    "logs": _logs,
    "events": _events,
    "resize": _ask,
    "replace": _ask,
    "drain": _ask,
    "stop": _stop,
    "dashboard": _dashboard,
    "report": _report,
    "doctor": _doctor,
    "prepare-data": _prepare_data,
    "check-model": _check_model,
    "schema": _schema,
}
