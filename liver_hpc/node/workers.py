"""The workers of one launch as processes: started, listened to while they boot, told, ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command, end_all, kill_left
from liver_hpc.host.process import clean_environment, kills_for_memory, quiet_thread
from liver_hpc.host.warm import ForkRefused, WarmProcess
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.local import BOOTED, AgentsEnd, Said, Way

WARNINGS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""By these Slurm announces the end of a node, to the agent and maybe to all below it."""

WORKER_WORDS = 4
"""So many words of a worker's command are Python and the module."""

_LINE = "LIVER_AGENT_FD"
_REAP_S = 1.0
_DEFAULTS = {
    # Several workers share a machine: two threads each would be slower than one.
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Threads that come and go with every handoff would each leave a heap of their own behind.
    "MALLOC_ARENA_MAX": "1",
}
_UNBOUND = {
    # A library that binds its threads binds the one that loads it, and all that this one starts, to
    # the first core of the process's: that of the node's other workers, too.
    "OMP_PROC_BIND": "false",
    "KMP_AFFINITY": "disabled",
}

log = logging.getLogger(__name__)


def workers_environment() -> dict[str, str]:
    """What all workers of this node have in their environment."""
    return {**_DEFAULTS, **clean_environment(os.environ), **_UNBOUND}


class BootError(LiverError):
    """A worker of a launch did not get through its boot."""

    def __init__(self, launch: str, what: str) -> None:
        super().__init__(what)
        self.launch = launch


@dataclass(frozen=True)
class WorkerPlan:
    """What is started: `command` for each of `slots`, which is its LIVER_LOCAL_RANK.

    launch: its name; that of the agent is the first one's. sheltered: warnings do not reach the
    workers; they are in process groups of their own, and ignore them.
    """

    run_directory: Path
    launch: str
    slots: tuple[int, ...]
    command: tuple[str, ...]
    sheltered: bool

    def log_of(self, index: int) -> Path:
        return self.run_directory / "logs" / f"worker-{self.launch}-{index}.log"


@dataclass
class _Worker:
    """One worker: its process, and the agent's end of its line. number: its id, once it has one.
    error: why it fails, once it has said so. over: its end was heard of."""

    index: int
    process: Child
    line: AgentsEnd
    booted: bool = False
    number: int | None = None
    error: str = ""
    over: bool = False


class NodeWorkers:
    """Registers what is to be waited for with `selector`, with a function to be called then.

    These raise BootError as long as no ids were handed out. From then on `report` is called for
    every worker that ends, with its id and how it ended, and before that `relay` for what it says:
    with its id. All in one thread.

    cold: called with the reason where a warm process does not fork. polite: the signal by which
    workers are asked to end.
    """

    def __init__(
        self,
        plan: WorkerPlan,
        selector: selectors.BaseSelector,
        report: Callable[[int, str], None],
        relay: Callable[[int, Said], None],
        cold: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._selector = selector
        self._report = report
        self._relay = relay
        self._cold = cold
        self.polite = signal.SIGHUP if plan.sheltered else signal.SIGTERM
        self._ending = False
        self._workers: list[_Worker] = []
        self._killed_before = kills_for_memory()

    def start(self, warm: WarmProcess | None) -> None:
        """Has them forked from a warm process where there is one that can. Raises LiverError."""
        for index in range(len(self._plan.slots)):
            self._workers.append(self._spawn(index, warm))

    def booting(self) -> list[int]:
        """Those that have not booted yet, by their places in the launch."""
        return [worker.index for worker in self._workers if not worker.booted]

    def living(self) -> list[str]:
        """Their names: by id, once they have one."""
        processes = (worker.process for worker in self._workers)
        return [process.name for process in processes if process.exit_code() is None]

    def all_over(self) -> bool:
        """Whether the end of each was heard of: with an id, all that it said was relayed before."""
        return all(worker.over for worker in self._workers)

    def worst(self) -> int:
        """The highest exit code of those that have ended; for a death by signal n, 128 + n."""
        return max((worker.process.exit_code() or 0 for worker in self._workers), default=0)

    def hand_out(self, answer: Answer) -> None:
        """Tells every worker its id and where the coordinator listens."""
        for worker, number in zip(self._workers, answer.worker_ids, strict=True):
            worker.number, worker.process.name = number, f"worker {number}"
            told = {"worker": number, "host": answer.control_host}
            self._write(worker, json.dumps(told).encode())

    def pass_on(self, number: int, data: bytes) -> None:
        """What the coordinator tells a worker, by id, if it is one of these; to all without data,
        which says that the connection has broken."""
        for worker in self._workers:
            if worker.number is not None and (worker.number == number or not data):
                self._write(worker, data)

    def kill(self, number: int) -> None:
        """One of them, by id; its end is reported as any other."""
        for worker in self._workers:
            if worker.number == number:
                worker.process.send_signal(signal.SIGKILL)

    def tell_to_end(self) -> None:
        """Asks the living to end; from then on nothing is said of them."""
        self._ending = True
        for worker in self._workers:
            if worker.number is None:
                self._heard_of(worker.line)
            worker.process.send_signal(self.polite)

    def end(self, exit_s: float) -> None:
        """Tells the living to end, kills those that live on after `exit_s`; nothing is left."""
        for worker in self._workers:
            self._heard_of(worker.line)
            self._heard_of(worker.process)
            worker.line.close()
        try:
            end_all([worker.process for worker in self._workers], exit_s, self.polite)
        except DeadlineError as error:
            log.error("%s", error)

    # ---- one worker

    def _spawn(self, index: int, warm: WarmProcess | None) -> _Worker:
        ours, workers_end = socket.socketpair()
        line = AgentsEnd(ours)
        with workers_end:
            worker = _Worker(index, self._process(index, workers_end.fileno(), warm), line)
        self._selector.register(line, selectors.EVENT_READ, partial(self._listen, worker))
        self._selector.register(worker.process, selectors.EVENT_READ, partial(self._ended, worker))
        return worker

    def _process(self, index: int, line: int, warm: WarmProcess | None) -> Child:
        plan = self._plan
        told = {"LIVER_LOCAL_RANK": str(plan.slots[index]), _LINE: str(line)}
        command = Command(
            f"worker {index} of agent {plan.launch}",
            plan.command,
            environment={**workers_environment(), **told},
            log=plan.log_of(index),
            pass_fds=(line,),
            apart="group" if plan.sheltered else None,
            ignored=WARNINGS if plan.sheltered else (),
        )
        if warm is None or not warm.ready:
            return Child(command)
        try:
            fork = replace(command, environment=told)  # the rest it has as we do
            return warm.fork(fork, plan.command[WORKER_WORDS:], {_LINE: line})
        except ForkRefused as error:
            self._cold(str(error))
            return Child(command)

    def _listen(self, worker: _Worker) -> None:
        """Takes what a worker says: first that it has booted, or why it has not."""
        said = worker.line.read()
        if worker.line.ended:
            self._heard_of(worker.line)
        if not worker.booted:
            first = said.pop(0).data if said else b""
            worker.booted = first == BOOTED
            if not worker.booted and (first or worker.line.ended):
                told = first.decode(errors="replace")
                why = f"failed in boot: {told}" if told else "ended in boot"
                raise BootError(self._plan.launch, self._obituary(worker, why))
        if worker.number is not None:
            for each in said:
                if each.way is Way.OWN:
                    worker.error = each.data.decode(errors="replace") + "; "
                else:
                    self._relay(worker.number, each)

    def _write(self, worker: _Worker, data: bytes) -> None:
        if not worker.line.write(data):
            events = selectors.EVENT_READ | selectors.EVENT_WRITE
            with contextlib.suppress(KeyError, ValueError):  # it has ended
                self._selector.modify(worker.line, events, partial(self._listen_and_flush, worker))

    def _listen_and_flush(self, worker: _Worker) -> None:
        if worker.line.flush():
            self._selector.modify(worker.line, selectors.EVENT_READ, partial(self._listen, worker))
        self._listen(worker)

    def _ended(self, worker: _Worker) -> None:
        code = worker.process.exit_code()
        if code is None:
            return
        worker.over = True
        self._heard_of(worker.process)
        if worker.number is not None or not self._ending:
            self._listen(worker)  # its last words
        self._heard_of(worker.line)
        if self._ending:
            return
        if worker.number is None:
            raise BootError(self._plan.launch, self._obituary(worker, "ended in boot"))
        log.info("%s ended: %s", worker.process.name, worker.process.how())
        self._end_what_is_left(worker)
        name = self._plan.log_of(worker.index).name
        self._report(worker.number, f"{worker.error}{self._how(worker)}; see logs/{name}")

    def _end_what_is_left(self, worker: _Worker) -> None:
        """Of what one had started itself, while its siblings go on."""
        name = worker.process.name

        def end() -> None:
            try:
                if killed := kill_left(worker.process.mark):
                    log.info("%s had left processes %s: killed", name, killed)
            except DeadlineError as error:
                log.error("%s: %s", name, error)

        try:
            quiet_thread(end, f"left by {name}")
        except LiverError as error:
            log.warning("%s: it is ended with the launch", error)

    def _heard_of(self, waited_for: AgentsEnd | Child) -> None:
        """Nothing more is to be heard of it."""
        with contextlib.suppress(KeyError, ValueError, OSError):  # it is not waited for, or is gone
            self._selector.unregister(waited_for)

    def _obituary(self, worker: _Worker, what: str) -> str:
        with contextlib.suppress(DeadlineError):
            worker.process.wait(_REAP_S)
        return (
            f"{worker.process.name} {what} ({self._how(worker)}); "
            f"see {self._plan.log_of(worker.index)}"
        )

    def _how(self, worker: _Worker) -> str:
        how, killed = worker.process.how(), kills_for_memory() - self._killed_before
        if how != f"signal {signal.SIGKILL:d}" or killed < 1:
            return how
        return f"{how}; since the launch the kernel's memory killer has ended {killed} on this node"
