"""One step of Slurm with a probe on each node that is examined, and the line on which to ask them.

The step is in the job around this process, or srun takes an allocation of its own for it. srun
hands what it reads to all probes; what they say comes back as lines of JSON (see `probe`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.doctor.checks import Order
from liver_hpc.doctor.probe import ANSWER, Said
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.process import quiet_thread

ALLOCATION_MIN = 10
"""Time limit of the doctor's own allocation, in minutes: its end is Slurm's, whatever happens."""

START_S = 60.0
_END_S = 5.0
_KILL_S = 10.0


class Probes:
    """Probes on `count` nodes, behind one process here that reads requests and prints answers.

    words: its command. When this process ends, it gets SIGTERM and the end of its input.
    """

    def __init__(self, words: Sequence[str], count: int) -> None:
        self._count = count
        self._requests = 0
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._told: deque[str] = deque(maxlen=3)  # what else was printed, the end of it
        self._child = Child(
            Command(
                "the doctor's step",
                words,
                orphan_signal=signal.SIGTERM,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                apart="session",  # Ctrl-C is for this process, which ends the step
            )
        )
        quiet_thread(self._read, "probes")

    def ask(
        self, nodes: Sequence[str], probe: str, limit_s: float, **arguments: Any
    ) -> dict[str, Said]:
        """The answer of each of `nodes` by node; without any, of all that there are.

        Raises LiverError when a node could not look or there is none any more, DeadlineError
        when one is late.
        """
        self._requests += 1
        request = {"number": self._requests, "nodes": nodes, "probe": probe, "with": arguments}
        with contextlib.suppress(BrokenPipeError):  # the end of the answers says why
            self._child.stdin.write(json.dumps(request) + "\n")
            self._child.stdin.flush()
        waits_for = f"the {probe} probe on {', '.join(nodes) or f'{self._count} nodes'}"
        deadline = Deadline.after(SystemClock(), limit_s, waits_for)
        answers: dict[str, Said] = {}
        while len(answers) < (len(nodes) or self._count):
            said = self._next(deadline, answers)
            if said["number"] != self._requests:
                continue  # of an earlier request, too late
            if "error" in said:
                raise LiverError(f"the {probe} probe on {said['node']}: {said['error']}")
            answers[said["node"]] = said
        return answers

    def _next(self, deadline: Deadline, answers: dict[str, Said]) -> Said:
        while True:
            try:
                line = self._lines.get(timeout=max(0.001, deadline.remaining_s()))
            except queue.Empty:
                only = [f"only {', '.join(answers)} answered"] if answers else []
                said = "; ".join([str(deadline.error()), *only, *self._told])
                raise DeadlineError(said) from None
            if line is None:
                self._lines.put(None)
                self._child.wait(_END_S)
                told = " | ".join(self._told) or f"it said nothing ({self._child.how()})"
                raise LiverError(f"{deadline.waits_for}: {told}")
            if line.startswith(ANSWER):
                return dict(json.loads(line.removeprefix(ANSWER)))
            self._told.append(line.strip())

    def _read(self) -> None:
        with self._child.stdout as lines:
            for line in filter(str.strip, lines):
                self._lines.put(line)
        self._lines.put(None)

    def close(self) -> None:
        """The probes end with their input; what has not ended then is made to."""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        with contextlib.suppress(DeadlineError):
            self._child.wait(_END_S)
        self._child.end(_END_S)  # SIGTERM: srun passes it on, or takes its request back


@contextlib.contextmanager
def probes_on_nodes(
    order: Order, commands: SlurmCommands, directory: Path
) -> Iterator[tuple[Probes, dict[str, Said]]]:
    """Probes, and how each node greets; neither they nor nodes taken for them are left afterwards.

    Raises LiverError when nodes are refused, DeadlineError when they are not granted in
    `order.grant_s` or Python does not start there.
    """
    name, around = f"liver-doctor-{secrets.token_hex(4)}", os.environ.get("SLURM_JOB_ID", "")
    count = order.nodes or int(os.environ["SLURM_JOB_NUM_NODES"])
    probe = ["-P", "-m", "liver_hpc.doctor.probe", str(directory)]
    probe += [order.config.network.model_dump_json()]
    python = python_words(order.config.cluster)
    probes = Probes([*_srun(order, count, name, around), *python, *probe], count)
    try:
        yield probes, _greetings(probes, order, commands, name)
    finally:
        probes.close()
        if not around:
            commands.cancel_named(name)


def _srun(order: Order, count: int, name: str, around: str) -> list[str]:
    longest_s = order.grant_s + 60 * ALLOCATION_MIN
    words = ["timeout", f"--kill-after={_KILL_S:g}", f"{longest_s:g}"]  # it passes a SIGTERM on
    words += ["srun", f"--job-name={name}", f"--nodes={count}", f"--ntasks={count}"]
    words += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--mpi=none"]
    wanted: dict[str, Any] = {"gres": order.gpus_per_node and f"gpu:{order.gpus_per_node}"}
    if around:
        wanted["jobid"] = around
        words.append("--overlap")
    else:
        wanted |= {"time": ALLOCATION_MIN, "partition": order.partition}
        wanted["account"] = order.account or order.config.cluster.slurm.account
    return words + [f"--{option}={value}" for option, value in wanted.items() if value]


def _greetings(probes: Probes, order: Order, commands: SlurmCommands, name: str) -> dict[str, Said]:
    """name: of the job, if it is the doctor's own, which may still have to be granted."""
    try:
        return probes.ask((), "hello", order.grant_s)
    except DeadlineError as error:
        waiting = [job for job in commands.named(name).values() if not job.nodes]
        if waiting:
            where = f"partition {order.partition}" if order.partition else "the default partition"
            raise DeadlineError(
                f"waited {order.grant_s:g} s for {order.nodes} nodes of {where} (the request is "
                f"{waiting[0].state.lower()}, {waiting[0].reason})"
            ) from error
    return probes.ask((), "hello", START_S)
