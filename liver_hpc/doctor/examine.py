"""The whole examination: this host, then nodes, then pairs of them."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NoReturn

from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.doctor.allocation import Allocation, job_around, taken
from liver_hpc.doctor.findings import Examination, Finding, failed, skipped
from liver_hpc.doctor.login import LOGIN_CHECKS, Login
from liver_hpc.doctor.nodes import NODE_CHECKS, PAIR_CHECKS, Nodes
from liver_hpc.doctor.order import Order
from liver_hpc.doctor.steps import Steps
from liver_hpc.errors import LiverError

_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
_NEEDED = ("commands", "controller", "partitions", "run directory")


def examine(order: Order) -> Generator[Finding, None, None]:
    """Yields findings as they are made; nothing of the examination is left afterwards.

    To be called in the main thread, and to be closed. SIGTERM and SIGHUP end it as Ctrl-C does:
    nodes are given back.
    """
    login, examination = Login(order), Examination[Any]()
    with _terminated_as_interrupted():
        yield from examination.run(LOGIN_CHECKS, login)
        around = job_around(login.commands)
        if not order.nodes and around is None:
            yield Finding("nodes", skipped("not asked for; --nodes 2 takes an allocation for them"))
            return
        obstacles = [name for name in _NEEDED if not examination.is_well(name)]
        if obstacles:
            yield Finding("nodes", skipped(f"needs the check of {obstacles[0]}, which failed"))
            return
        try:
            with ExitStack() as stack:
                allocation = around or stack.enter_context(taken(order, login.commands))
                yield from _on_nodes(login, examination, allocation)
        except LiverError as error:
            yield Finding(
                "allocation", failed(str(error), "see `squeue` and `sinfo`; ask for fewer nodes")
            )


def _on_nodes(
    login: Login, examination: Examination[Any], allocation: Allocation
) -> Iterator[Finding]:
    order = login.order
    count = order.nodes or len(allocation.nodes)
    if len(allocation.nodes) < count:
        raise LiverError(f"job {allocation.job} has {len(allocation.nodes)} nodes, not {count}")
    allocation = Allocation(allocation.job, allocation.nodes[:count], allocation.own)
    steps = Steps(allocation, tuple(python_words(order.cluster)), order.gpus_per_node)
    nodes = Nodes(order, steps, login.runs_directory / f".doctor-{secrets.token_hex(4)}")
    try:
        nodes.prepare()
        yield from examination.run(NODE_CHECKS, nodes)
        if count > 1:
            yield from examination.run(PAIR_CHECKS, nodes)
        else:
            yield Finding("pairs", skipped("clocks, meeting and bandwidth need two nodes"))
    finally:
        nodes.clear_up()


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
