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
import shutil
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
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded, quiet_thread

ALLOCATION_MIN = 10
"""Time limit of the doctor's own allocation, in minutes: its end is Slurm's, whatever happens."""

START_S = 60.0
_END_S = 5.0
_KILL_S = 10.0


class ProbeFailed(LiverError):
    """A probe said that it could not look, or ended without having said anything."""


class Probes:
    """Probes on `count` nodes, behind one process here that reads requests and prints answers.

    words: its command. When this process ends, it gets SIGTERM and the end of its input.
    """

    def __init__(self, words: Sequence[str], count: int) -> None:
        self._count = count
        self._requests = 0
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._told: deque[str] = deque(maxlen=3)  # what else was printed, the end of it
        self._process = subprocess.Popen(
            guarded(words, signal.SIGTERM),
            env=clean_environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C is for this process, which ends the step
        )
        quiet_thread(self._read, "probes")

    def ask(
        self, nodes: Sequence[str], probe: str, limit_s: float, **arguments: Any
    ) -> dict[str, Said]:
        """The answer of each of `nodes` by node; without any, of all that there are.

        Raises ProbeFailed when a node could not look or there is none any more, DeadlineError
        when one is late.
        """
        self._requests += 1
        request = {"number": self._requests, "nodes": nodes, "probe": probe, "with": arguments}
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of the answers says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        waits_for = f"the {probe} probe on {', '.join(nodes) or f'{self._count} nodes'}"
        deadline = Deadline.after(SystemClock(), limit_s, waits_for)
        answers: dict[str, Said] = {}
        while len(answers) < (len(nodes) or self._count):
            said = self._next(deadline, answers)
            if said["number"] != self._requests:
                continue  # of an earlier request, too late
            if "error" in said:
                raise ProbeFailed(f"the {probe} probe on {said['node']}: {said['error']}")
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
                ended = f"it ended with exit code {self._process.wait(_END_S)} and said nothing"
                raise ProbeFailed(f"{deadline.waits_for}: {' | '.join(self._told) or ended}")
            if line.startswith(ANSWER):
                return dict(json.loads(line.removeprefix(ANSWER)))
            self._told.append(line.strip())

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in filter(str.strip, lines):
                self._lines.put(line)
        self._lines.put(None)

    def close(self) -> None:
        """The probes end with their input; what has not ended then is made to."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        # None: it ends by itself. SIGTERM: srun passes it on, or takes its request back.
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                os.killpg(self._process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
                break


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
            commands.cancel_named(name, retry=False)


def _srun(order: Order, count: int, name: str, around: str) -> list[str]:
    program, limiter = map(shutil.which, ("srun", "timeout"))
    if program is None or limiter is None:
        raise LiverError(f"{'timeout' if program else 'srun'} is not on the path")
    longest_s = order.grant_s + 60 * ALLOCATION_MIN
    words = [limiter, f"--kill-after={_KILL_S:g}", f"{longest_s:g}"]  # it passes a SIGTERM on
    words += [program, f"--job-name={name}", f"--nodes={count}", f"--ntasks={count}"]
    words += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--mpi=none"]
    if around:
        words += [f"--jobid={around}", "--overlap"]
    else:
        account = order.account or order.config.cluster.slurm.account
        words += [f"--time={ALLOCATION_MIN}"]
        words += [f"--partition={order.partition}"] if order.partition else []
        words += [f"--account={account}"] if account else []
    return words + ([f"--gres=gpu:{order.gpus_per_node}"] if order.gpus_per_node else [])


def _greetings(probes: Probes, order: Order, commands: SlurmCommands, name: str) -> dict[str, Said]:
    """name: of the job, if it is the doctor's own, which may still have to be granted."""
    try:
        return probes.ask((), "hello", order.grant_s)
    except DeadlineError as error:
        waiting = [job for job in commands.named(name, retry=False).values() if not job.nodes]
        if waiting:
            where = f"partition {order.partition}" if order.partition else "the default partition"
            raise DeadlineError(
                f"waited {order.grant_s:g} s for {order.nodes} nodes of {where} (the request is "
                f"{waiting[0].state.lower()}, {waiting[0].reason})"
            ) from error
    return probes.ask((), "hello", START_S)
