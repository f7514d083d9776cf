"""The `liver doctor` command: this host, then nodes, then two of them; its lines, its exit code."""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType
from typing import NoReturn

from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.doctor.checks import Examination, Finding, Level, Order, failed, passed, skipped
from liver_hpc.doctor.login import LOGIN_CHECKS, Login
from liver_hpc.doctor.nodes import NODE_CHECKS, PAIR_CHECKS, Nodes, own_directory
from liver_hpc.doctor.step import probes_on_nodes
from liver_hpc.errors import LiverError

_NEEDED = ("commands", "controller", "partitions", "run directory")
_LEAST = {
    "train": {"steps": 1, "global_batch": 1},
    "workers": {"initial": 1, "max": 1},
    "layouts": {1: {"dp": 1}},
}
"""A run file that asks a cluster for what the defaults do."""


def run(options: argparse.Namespace) -> int:
    """Prints findings as they are made; 1 when a check has failed, else 0."""
    has_failed = False
    with closing(examine(_order(options))) as findings:
        for name, result in findings:
            print(json.dumps(result.json(name)) if options.json else result.line(name), flush=True)
            has_failed |= result.level is Level.FAIL
    return int(has_failed)


def _order(options: argparse.Namespace) -> Order:
    config = (
        load_run(options.config, options.set)
        if options.config
        else RunConfig.model_validate(_LEAST)
    )
    if options.runs_directory is not None:
        config = config.model_copy(update={"runs_directory": options.runs_directory})
    names = ("nodes", "partition", "account", "gpus_per_node", "grant_s")
    given = {name: getattr(options, name) for name in names}
    return Order(config, **{name: value for name, value in given.items() if value is not None})


def examine(order: Order) -> Generator[Finding, None, None]:
    """Yields findings as they are made; nothing of the examination is left afterwards.

    To be called in the main thread, and to be closed. SIGTERM and SIGHUP end it as Ctrl-C does:
    nodes are given back.
    """
    login, examination = Login(order), Examination()
    with _terminated_as_interrupted():
        yield from examination.run(LOGIN_CHECKS, login)
        if not order.nodes and "SLURM_JOB_ID" not in os.environ:
            yield "nodes", skipped("not asked for; --nodes 2 takes an allocation for them")
        elif obstacle := examination.obstacle(_NEEDED):
            yield "nodes", obstacle
        else:
            yield from _on_nodes(login, examination)


def _on_nodes(login: Login, examination: Examination) -> Iterator[Finding]:
    try:
        with ExitStack() as stack:
            directory = stack.enter_context(own_directory(login.runs_directory))
            started = probes_on_nodes(login.order, login.commands, directory)
            probes, greetings = stack.enter_context(started)
            names = tuple(sorted(greetings))
            nodes = Nodes(probes, names, directory)
            job = greetings[names[0]]["job"]
            kind = "around this process" if job == os.environ.get("SLURM_JOB_ID") else "of its own"
            yield "nodes", passed(f"job {job} {kind}: {', '.join(names)} answer")
            yield from examination.run(NODE_CHECKS, nodes)
            if len(names) > 1:
                yield from examination.run(PAIR_CHECKS, nodes)
            else:
                yield "pairs", skipped("clocks, meeting and bandwidth need two nodes")
    except LiverError as error:
        yield "allocation", failed(str(error), "see `squeue` and `sinfo`; ask for fewer nodes")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = {one: signal.signal(one, interrupt) for one in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
