"""The `liver doctor` command: this host, then nodes, then two of them; its lines, its exit code."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
from dataclasses import asdict

from liver_hpc.config.schema import RunConfig
from liver_hpc.doctor.checks import Examination, Level, Order, Result, failed, passed, skipped
from liver_hpc.doctor.login import LOGIN_CHECKS
from liver_hpc.doctor.nodes import NODE_CHECKS, PAIR_CHECKS, nodes_of
from liver_hpc.errors import LiverError
from liver_hpc.recipes.completion import load_users_run

_NEEDED = ("commands", "controller", "partitions", "run directory")
_REFUSED_ACCOUNT = re.compile(r"invalid ?(account|qos)\b|(account|qos) ?not", re.IGNORECASE)
"""As srun says it, and as a reason to stay pending."""


def run(options: argparse.Namespace) -> int:
    """Prints what is found, each as soon as it is; 1 when a check has failed, else 0.

    SIGTERM and SIGHUP end it as Ctrl-C does: nothing of it is left, and nodes are given back.
    """
    levels = set[Level]()

    def tell(check: str, result: Result) -> None:
        levels.add(result.level)
        as_json = json.dumps({"check": check, **asdict(result)})
        print(as_json if options.json else result.line(check), flush=True)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    _examine(_order(options), Examination(tell))
    return int(Level.FAIL in levels)


def _order(options: argparse.Namespace) -> Order:
    defaults = RunConfig.model_construct()  # what a run file must say is nothing to the doctor
    config = load_users_run(options.config, options.set) if options.config else defaults
    if options.runs_directory is not None:
        config = config.model_copy(update={"runs_directory": options.runs_directory.absolute()})
    names = ("nodes", "partition", "account", "gpus_per_node", "grant_s")
    given = {name: getattr(options, name) for name in names}
    return Order(config, **{name: value for name, value in given.items() if value is not None})


def _examine(order: Order, examination: Examination) -> None:
    examination.run(LOGIN_CHECKS, order)
    if not order.nodes and "SLURM_JOB_ID" not in os.environ:
        text = "not asked for; --nodes 2 takes an allocation for them"
        examination.tell("nodes", skipped(text))
    elif obstacle := examination.obstacle(_NEEDED):
        examination.tell("nodes", obstacle)
    else:
        try:
            _examine_nodes(order, examination)
        except LiverError as error:
            examination.tell("allocation", failed(str(error), _advice(str(error))))


def _advice(refusal: str) -> str:
    if _REFUSED_ACCOUNT.search(refusal):
        return (
            "see `sacctmgr show associations`; name an account with --account, or `account` and "
            "`qos` in cluster.slurm or in the options of the component or burst in that partition"
        )
    return "see `squeue` and `sinfo`; ask for fewer nodes"


def _examine_nodes(order: Order, examination: Examination) -> None:
    with nodes_of(order) as (nodes, job):
        kind = "around this process" if job == os.environ.get("SLURM_JOB_ID") else "of its own"
        examination.tell("nodes", passed(f"job {job} {kind}: {', '.join(nodes.names)} answer"))
        examination.run(NODE_CHECKS, nodes)
        if len(nodes.names) > 1:
            examination.run(PAIR_CHECKS, nodes)
        else:
            text = "clocks, meeting and bandwidth need two nodes"
            examination.tell("pairs", skipped(text))
