"""Nodes with a probe on each, the line on which to ask them, and the checks of what they answer.

The probes are one step of Slurm, in the job around this process, or srun takes an allocation of its
own for it. srun hands what it reads to all probes; what they say comes back as lines of JSON (see
`probe`).
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.container import step_words
from liver_hpc.cluster.slurm.script import option_words
from liver_hpc.config.schema import RunConfig, gpu_count
from liver_hpc.doctor.checks import Check, Level, Order, Result, failed, passed, skipped, warned
from liver_hpc.doctor.probe import ANSWER, ASKERS_TOKEN, Said, versions
from liver_hpc.errors import ConfigError, DeadlineError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.files import make_directory
from liver_hpc.host.process import clean_environment, quiet_thread
from liver_hpc.recipes.specs import NOT_INSTALLED
from liver_hpc.rendezvous.channel import connect
from liver_hpc.run.secret import create_secret, read_secret

ALLOCATION_MIN = 10
"""Time limit of the doctor's own allocation, in minutes: its end is Slurm's, whatever happens."""
MOST_SKEW_S = 0.5

_AS_THE_RUN = (
    *("account", "qos", "constraint", "exclusive", "reservation"),
    *("mem", "mem-per-cpu", "mem-per-gpu"),
)
"""Options of sbatch that the doctor's own allocation has of the run's part in that partition."""
_START_S = 60.0
_END_S = 5.0
_KILL_S = 10.0
_NODE_S = 30.0
_MEET_S = 60.0
_REACH_S = 10.0
_BYTES_S = 120.0
_SEEN_S = 15.0


class Nodes:
    """`count` nodes with a probe on each, behind one process here that reads requests and prints
    answers.

    words: its command, which is `told` more in its environment. When this process ends, it gets
    SIGTERM and the end of its input. directory: the doctor's own, in the runs directory.
    versions: of this host, those that the nodes must have too. names: the nodes', once they have
    greeted. workers: as many as one of them is to have.
    """

    def __init__(
        self,
        words: Sequence[str],
        count: int,
        directory: Path,
        versions: Mapping[str, str],
        told: Mapping[str, str] | None = None,
    ) -> None:
        self.directory = directory
        self.versions = versions
        self.names: list[str] = []
        self.workers = 1
        self._count = count
        self._requests = 0
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._told: deque[str] = deque(maxlen=3)  # what else was printed, the end of it
        self._child = Child(
            Command(
                "the doctor's step",
                words,
                orphan_signal=signal.SIGTERM,
                environment={**clean_environment(os.environ), **(told or {})},
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

    def one(self, node: str, probe: str, limit_s: float, **arguments: Any) -> Said:
        return self.ask([node], probe, limit_s, **arguments)[node]

    def each(self, probe: str, **arguments: Any) -> Result:
        """The worst of what the nodes find about themselves, and who says what."""
        answers = self.ask(self.names, probe, _NODE_S, **arguments)
        results = [
            (name, Result(Level(said["level"]), said["found"], said["advice"]))
            for name, said in sorted(answers.items())
        ]
        worst = max((result for _, result in results), key=lambda r: list(Level).index(r.level))
        who: dict[str, list[str]] = {}
        for name, result in results:
            if result.level is worst.level:
                who.setdefault(result.found, []).append(name)
        told = [f"{', '.join(names)}: {found}" for found, names in who.items()]
        return replace(worst, found="; ".join(told))

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
def nodes_of(order: Order) -> Iterator[tuple[Nodes, str]]:
    """The nodes, and the job that they are of; neither probes, nor nodes taken for them, nor what
    they wrote is left afterwards.

    Raises LiverError when nodes are refused, DeadlineError when they are not granted in
    `order.grant_s` or Python does not start there.
    """
    name, around = f"liver-doctor-{secrets.token_hex(4)}", os.environ.get("SLURM_JOB_ID", "")
    count = order.nodes or _nodes_around(os.environ)
    with own_directory(order.runs_directory) as directory:
        step = step_words(_as_it_is_now(order.config), directory)
        words = [*_srun(order, count, name, around), *step.options, *step.python]
        words += ["liver_hpc.doctor.probe", str(directory), order.config.network.model_dump_json()]
        words = _behind_setup(order.slurm.setup, words, directory)
        told = {**step.environment, "SLURM_JOB_ID": around} if around else step.environment
        nodes = Nodes(words, count, directory, _versions_wanted(order), told)
        cluster = order.config.cluster
        slots = [*map(cluster.slots, cluster.parts), gpu_count(order.gpus_per_node)]
        nodes.workers = max(1, *slots)
        try:
            greetings = _greetings(nodes, order, name)
            nodes.names = sorted(greetings)
            yield nodes, greetings[nodes.names[0]]["job"]
        finally:
            nodes.close()
            if not around:
                order.commands.cancel_named(name)


def _as_it_is_now(config: RunConfig) -> RunConfig:
    """Without directories of checkpoints that are not there, as a run makes its own: what is not
    there cannot be mounted."""
    if config.cluster.slurm.container is None:
        return config
    names = ("directory", "load", "weights")
    paths = {name: getattr(config.checkpoint, name) for name in names}
    missing = [name for name, path in paths.items() if path and not path.expanduser().exists()]
    checkpoint = config.checkpoint.model_copy(update=dict.fromkeys(missing))
    return config.model_copy(update={"checkpoint": checkpoint})


def _nodes_around(environment: Mapping[str, str]) -> int:
    """How many nodes the job has that this process is in; of a heterogeneous one, its first
    component, which is where a step goes that names none. Raises ConfigError."""
    for name in ("SLURM_JOB_NUM_NODES", "SLURM_JOB_NUM_NODES_HET_GROUP_0"):
        if environment.get(name, "").isdecimal():
            return int(environment[name])
    raise ConfigError("the job around this process says of no nodes; --nodes N says how many")


def _versions_wanted(order: Order) -> dict[str, str]:
    """What an environment has that is shared by all hosts, this one among them, which may have the
    core alone; of an image that it is of the same liver_hpc."""
    own = versions()
    if order.slurm.container is not None:
        return {"liver_hpc": own["liver_hpc"]}
    return {package: version for package, version in own.items() if version != NOT_INSTALLED}


def _srun(order: Order, count: int, name: str, around: str) -> list[str]:
    longest_s = order.grant_s + 60 * ALLOCATION_MIN
    words = ["timeout", f"--kill-after={_KILL_S:g}", f"{longest_s:g}"]  # it passes a SIGTERM on
    words += ["srun", f"--job-name={name}", f"--nodes={count}", f"--ntasks={count}"]
    words += ["--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0", "--mpi=none"]
    gpus = order.gpus_per_node
    wanted: dict[str, Any] = {"gres": f"gpu:{gpus}" if gpus else None}
    if around:
        wanted["jobid"] = around
        words.append("--overlap")
    else:
        wanted |= {"time": ALLOCATION_MIN, "partition": order.partition}
        given: dict[str, Any] = {"account": order.slurm.account, "qos": order.slurm.qos}
        parts = (part for part in order.config.cluster.parts if part.partition == order.partition)
        if (part := next(parts, None)) is not None:
            given |= part.options
            wanted["cpus-per-task"] = part.cpus_per_node
        wanted |= {name: given.get(name) for name in _AS_THE_RUN}
        wanted["account"] = order.account or given["account"]
    return words + option_words({name: v for name, v in wanted.items() if v is not None})


def _behind_setup(setup: Sequence[str], words: Sequence[str], directory: Path) -> list[str]:
    """The words of a command, behind the lines that a run's batch scripts begin with. These stand
    in a file, as others see command lines; what is said to the command is not for them."""
    if not setup:
        return [*words]
    script = directory / "setup.sh"
    script.write_text("\n".join(["{ :", *setup, "} < /dev/null", 'exec "$@"', ""]), "utf-8")
    return ["bash", str(script), *words]


def _greetings(nodes: Nodes, order: Order, name: str) -> dict[str, Said]:
    """name: of the job, if it is the doctor's own, which may still have to be granted."""
    try:
        return nodes.ask((), "hello", order.grant_s)
    except DeadlineError as error:
        waiting = [job for job in order.commands.named(name).values() if not job.nodes]
        if waiting:
            where = f"partition {order.partition}" if order.partition else "the default partition"
            raise DeadlineError(
                f"waited {order.grant_s:g} s for {order.nodes} nodes of {where} (the request is "
                f"{waiting[0].state.lower()}, {waiting[0].reason})"
            ) from error
    return nodes.ask((), "hello", _START_S)


@contextlib.contextmanager
def own_directory(runs_directory: Path) -> Iterator[Path]:
    """A private directory with a secret; afterwards there is neither it nor one made for it."""
    made = not runs_directory.exists()
    try:
        make_directory(runs_directory)
        own = TemporaryDirectory(prefix=".doctor-", dir=runs_directory)
    except OSError as error:
        raise LiverError(f"{error.filename} cannot be made: {error.strerror}") from error
    try:
        with own:
            create_secret(Path(own.name) / "secret")
            yield Path(own.name)
    finally:
        if made:
            with contextlib.suppress(OSError):  # something else has come into it
                runs_directory.rmdir()


# ---- checks


def _shared(nodes: Nodes) -> Result:
    token = secrets.token_hex(16)
    (nodes.directory / ASKERS_TOKEN).write_text(token, encoding="ascii")
    result = nodes.each("shared", token=token)
    if result.level is Level.PASS:
        waits_for = f"what the nodes wrote into {nodes.directory} to be seen here"
        written = [nodes.directory / name for name in nodes.names]
        deadline = Deadline.after(SystemClock(), _SEEN_S, waits_for)
        poll_until(lambda: all(path.exists() for path in written), deadline)
    return result


def _locks(nodes: Nodes) -> Result:
    """One node holds a lock, and the others ask for it."""
    first, *others = nodes.names
    nodes.one(first, "lock", _NODE_S)
    answers = nodes.ask(others, "lock", _NODE_S) if others else {}
    alone = sorted(name for name, said in answers.items() if said["taken"])
    if alone:
        held = f"what {first} has locked {', '.join(alone)} could lock, too"
        return failed(f"a lock holds on one node alone: {held}", _LOCKS)
    return passed(f"{first} can lock a file" + (", and no other node then" if others else ""))


def _clocks(nodes: Nodes) -> Result:
    """All are asked at once: what they say is apart by no more than their clocks and the wait."""
    began_s = time.monotonic()
    answers = nodes.ask(nodes.names, "now", _NODE_S)
    wait_s = time.monotonic() - began_s
    said = sorted((said["s"], name) for name, said in answers.items())
    (slow_s, slow), (fast_s, fast) = said[0], said[-1]
    found = f"{fast} is {1e3 * (fast_s - slow_s):.1f} ms before {slow}, or {1e3 * wait_s:.1f} less"
    if fast_s - slow_s - wait_s > MOST_SKEW_S:
        return warned(found, _CLOCKS)
    return passed(found)


def _meeting(nodes: Nodes) -> Result:
    first, second = nodes.names[:2]
    at = nodes.one(first, "rendezvous", _MEET_S)
    said = nodes.one(second, "join", _MEET_S, within_s=_MEET_S / 2)
    found = f"{second} met {first} ({at['host']}) in {said['took_s']:.2f} s"
    try:
        secret = read_secret(nodes.directory / "secret")
        connect((at["host"], at["port"]), secret, _REACH_S, first).close()
    except LiverError as error:
        return warned(f"{found}; this host does not come there: {error}", _FROM_HERE)
    return passed(found)


def _bandwidth(backend: str, nodes: Nodes) -> Result:
    first, second = pair = nodes.names[:2]
    opened = nodes.ask(pair, "store", _BYTES_S, within_s=_BYTES_S / 2)
    lacking = [name for name in pair if backend == "nccl" and not opened[name]["cuda"]]
    if lacking == pair:
        return skipped(f"not applicable: no CUDA device on {first} and {second}")
    if lacking:
        return failed(f"of {first} and {second} only {lacking[0]} has no CUDA device", _LINK)
    asked = {"rank_0": first, "backend": backend, "within_s": _BYTES_S / 2}
    asked["at"] = opened[first]["at"]
    said = nodes.ask(pair, "measure", _BYTES_S, **asked)[second]
    return passed(
        f"{said['megabytes_per_s']:.0f} MB/s from {first} to {second} by {said['transport']}"
    )


_LINK = "see that nodes reach each other on the interface above; name another in network"
_FROM_HERE = (
    "name an interface in network.interface that this host reaches, too, or give `liver status`, "
    "`resize` and `stop` on a node (`srun --jobid=JOB --overlap liver status RUN`)"
)
_MOUNT = "put it on a file system that all nodes mount"
_LOCKS = (
    "have it mounted with flock across nodes (Lustre: -o flock; BeeGFS: tuneUseGlobalFileLocks), "
    "or put runs_directory elsewhere"
)
_CLOCKS = (
    "have chrony or ntpd started: a run compares times of its nodes, and leaves one that is warned "
    "by way of the disk where handoffs seem to take too long"
)

NODE_CHECKS: tuple[Check[Nodes], ...] = (
    Check("versions", lambda nodes: nodes.each("same_versions", wanted=nodes.versions)),
    Check("locked memory", lambda nodes: nodes.each("locked_memory")),
    Check("threads", lambda nodes: nodes.each("threads", workers=nodes.workers)),
    Check("interfaces", lambda nodes: nodes.each("interfaces")),
    Check("shared directory", _shared, (), _MOUNT),
    Check("file locks", _locks, ("shared directory",), _LOCKS),
)
PAIR_CHECKS: tuple[Check[Nodes], ...] = (
    Check("clocks", _clocks),
    Check("mpi meeting", _meeting, ("interfaces", "shared directory"), _LINK),
    Check("gloo", partial(_bandwidth, "gloo"), ("interfaces",), _LINK),
    Check("nccl", partial(_bandwidth, "nccl"), ("interfaces",), _LINK),
)
