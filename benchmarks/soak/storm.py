"""One run on four nodes, struck again and again: whatever a volatile cluster does, at random."""

from __future__ import annotations

import contextlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

from benchmarks.processes import own_bytes, send_signal
from benchmarks.soak.coordinator import NodeBook
from benchmarks.soak.journal import Tail
from liver_hpc.cli.client import answers, stop
from liver_hpc.cli.submission import checked_run, new_run
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import DeadlineError, LiverError

HOME, OTHERS = "n1", ("n2", "n3", "n4")
"""Nothing ever befalls the first node; its worker and its agent are those whose memory is told."""
APART_S = (1.5, 6.0)
"""From one event to the next."""
WINDOW_S = (6.0, 30.0)
STALL_S = (0.5, 8.0)
DOWN_S = (0.2, 3.0)
WHOLE_STEPS = 4
"""A world has copies of all its state once it has done so many steps."""
HANG_S = 60.0
"""Longer than any of the run's deadlines: without a step for so long it hangs."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Held:
    """What the worker and the agent of the first node hold, at a quiet moment after an event."""

    event: int
    generation: int
    pid: int
    memory_bytes: int
    descriptors: int
    threads: int


@dataclass
class Log:
    """events: what was done, and when in seconds from the first. hangs: what was waited for in
    vain."""

    events: list[tuple[float, str, str]] = field(default_factory=list)
    held: dict[str, list[Held]] = field(default_factory=lambda: {"worker": [], "agent": []})
    hangs: list[str] = field(default_factory=list)


class Storm:
    """The run, its nodes, and what befalls them. A context manager: the run has ended behind it."""

    def __init__(self, config: RunConfig, seed: int) -> None:
        self.run = new_run(*checked_run(config))
        self.log = Log()
        self._chance = random.Random(seed)
        self._book = NodeBook(self.run.path)
        self._tail = Tail(self.run.path)
        self._warned: dict[str, float] = {}
        self._held = {HOME, OTHERS[0]}
        self._asleep: list[tuple[float, list[psutil.Process]]] = []
        self._last_s, self._last_step = time.time(), -1
        self._begun_s = time.time()
        self._coordinator: subprocess.Popen[bytes]

    def __enter__(self) -> Storm:
        for node in sorted(self._held):
            self._book.grant(node)
        self._start_coordinator()
        return self

    def __exit__(self, *error: object) -> None:
        for _, processes in self._asleep:
            send_signal(processes, signal.SIGCONT)
        with contextlib.suppress(LiverError):
            stop(self.run)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._coordinator.wait(30.0)

    def _start_coordinator(self) -> None:
        command = [sys.executable, "-m", "benchmarks.soak.coordinator", str(self.run.path)]
        self._coordinator = subprocess.Popen(command, start_new_session=True)

    # ---- the events

    def strike(self, events: int) -> None:
        """So many, each as soon as it makes sense. Raises LiverError where the run has ended."""
        self._await(lambda: self._tail.step >= WHOLE_STEPS, "the first steps")
        self._begun_s = time.time()
        while len(self.log.events) < events:
            name = self._chance.choice(_DRAWN)
            try:
                what = _EVENTS[name](self)
            except psutil.NoSuchProcess:  # it has ended by itself meanwhile
                continue
            if what is not None:
                self.log.events.append((time.time() - self._begun_s, name, what))
                self._go_on(self._chance.uniform(*APART_S))
                self._look(len(self.log.events))
        self._settle()

    def grant(self) -> str | None:
        """A node comes, or its warning is lifted."""
        free = [node for node in OTHERS if node not in self._held or node in self._warned]
        if not free:
            return None
        node = self._chance.choice(free)
        self._warned.pop(node, None)
        self._held.add(node)
        self._book.grant(node)
        return node

    def warn(self) -> str | None:
        """A node is to be left within some seconds; what is still there is killed then."""
        safe = sorted(self._held - {HOME} - self._warned.keys())
        if not safe:
            return None
        node, window_s = self._chance.choice(safe), self._chance.uniform(*WINDOW_S)
        now_s = time.time()
        self._warned[node] = now_s + window_s
        self._book.warn(node, now_s, now_s + window_s)
        return f"{node}, {window_s:.0f} s"

    def kill_worker(self) -> str | None:
        return self._strike_worker(signal.SIGKILL)

    def stall_worker(self) -> str | None:
        """For less or longer than silence is borne."""
        return self._strike_worker(signal.SIGSTOP)

    def _strike_worker(self, signum: signal.Signals) -> str | None:
        workers = self._workers_elsewhere() if self._has_copies() else []
        if not workers:
            return None
        worker = self._chance.choice(workers)
        process = psutil.Process(self._tail.pids[worker])
        send_signal([process], signum)
        return f"worker {worker}{self._wakes([process], signum)}"

    def kill_agent(self) -> str | None:
        return self._strike_agent(signal.SIGKILL, with_workers=False)

    def stall_agent(self) -> str | None:
        return self._strike_agent(signal.SIGSTOP, with_workers=False)

    def lose_node(self) -> str | None:
        """All that runs there is killed at once; the pool says so later."""
        return self._strike_agent(signal.SIGKILL, with_workers=True)

    def _strike_agent(self, signum: signal.Signals, with_workers: bool) -> str | None:
        nodes = sorted(self._held - {HOME}) if self._has_copies() else []
        found = {node: self._agents(node) for node in nodes}
        struck = [node for node in nodes if found[node]]
        if not struck:
            return None
        node = self._chance.choice(struck)
        agents = found[node]
        victims = agents if not with_workers else _with_children(agents)
        send_signal(victims, signum)
        if with_workers:
            self._leave(node)
        return f"{node}{self._wakes(victims, signum)}"

    def kill_coordinator(self) -> str:
        self._coordinator.kill()
        self._coordinator.wait()
        down_s = self._chance.uniform(*DOWN_S)
        time.sleep(down_s)
        self._start_coordinator()
        self._await(lambda: answers(self.run), "another coordinator")
        return f"for {down_s:.1f} s"

    def _wakes(self, processes: list[psutil.Process], signum: signal.Signals) -> str:
        if signum is signal.SIGKILL:
            return ""
        still_s = self._chance.uniform(*STALL_S)
        self._asleep.append((time.time() + still_s, processes))
        return f", {still_s:.1f} s"

    # ---- who is there

    def _has_copies(self) -> bool:
        """Nobody else is being lost, and each share is held twice."""
        self._tail.read()
        return not self._asleep and self._tail.whole >= WHOLE_STEPS

    def _agents(self, node: str) -> list[psutil.Process]:
        names = {agent for agent, its in self._tail.nodes.items() if its == node}
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            name = words[words.index("--agent") + 1] if "--agent" in words else ""
            if str(self.run.path) in words and name in names and _is_agent(process):
                found.append(process)
        return found

    def _workers_elsewhere(self) -> list[int]:
        home = {process.pid for process in _with_children(self._agents(HOME))}
        return [
            worker
            for worker, pid in sorted(self._tail.pids.items())
            if pid not in home and _is_of(pid, str(self.run.path))
        ]

    # ---- time passes

    def _go_on(self, seconds: float) -> None:
        end_s = time.time() + seconds
        while time.time() < end_s:
            self._tend()
            time.sleep(_POLL_S)

    def _await(self, holds: Callable[[], bool], what: str) -> None:
        def met() -> bool:
            self._tend()
            return holds()

        poll_until(met, Deadline.after(SystemClock(), 2 * HANG_S, f"{what} of {self.run}"), _POLL_S)

    def _tend(self) -> None:
        """What the cluster does by itself; a run that makes no step hangs."""
        now_s = time.time()
        for wakes_s, processes in [*self._asleep]:
            if wakes_s <= now_s:
                send_signal(processes, signal.SIGCONT)
                self._asleep.remove((wakes_s, processes))
        left = [node for node in self._book.given_back() if node in self._warned]
        over = [node for node, deadline_s in self._warned.items() if deadline_s <= now_s]
        for node in {*left, *over}:
            send_signal(_with_children(self._agents(node)), signal.SIGKILL)
            self._leave(node)
        self._tail.read()
        if (outcome := self.run.outcome()) is not None:
            raise LiverError(f"{self.run} ended: {outcome}; {self.run.where_logs_are()}")
        if self._tail.step != self._last_step:
            self._last_s, self._last_step = now_s, self._tail.step
        elif now_s - self._last_s > HANG_S:
            self.log.hangs.append(f"step {self._tail.step}, event {len(self.log.events)}")
            self._last_s = now_s

    def _leave(self, node: str) -> None:
        self._warned.pop(node, None)
        self._held.discard(node)
        self._book.take(node)

    def _settle(self) -> None:
        """Until nothing is under way."""
        try:
            self._await(lambda: not self._asleep and not self._warned, "the last event's end")
            quiet_from = self._tail.step
            self._await(lambda: self._tail.step >= quiet_from + 3 * WHOLE_STEPS, "some more steps")
        except DeadlineError as error:
            self.log.hangs.append(str(error))

    def _look(self, event: int) -> None:
        """Only where the world stands that has been there for a while."""
        if self._tail.whole < WHOLE_STEPS:
            return
        for kind, processes in self._of_home().items():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess, OSError), process.oneshot():
                    held = (process.num_fds(), process.num_threads())
                    memory_bytes = own_bytes(process.pid)
                    told = Held(event, self._tail.generation, process.pid, memory_bytes, *held)
                    self.log.held[kind].append(told)

    def _of_home(self) -> dict[str, list[psutil.Process]]:
        agents = self._agents(HOME)
        workers = {*self._tail.pids.values()}
        return {
            "worker": [each for each in _with_children(agents) if each.pid in workers],
            "agent": agents,
        }


_EVENTS: dict[str, Callable[[Storm], str | None]] = {
    "grant": Storm.grant,
    "warning": Storm.warn,
    "worker killed": Storm.kill_worker,
    "worker stalled": Storm.stall_worker,
    "agent killed": Storm.kill_agent,
    "agent stalled": Storm.stall_agent,
    "node lost": Storm.lose_node,
    "coordinator killed": Storm.kill_coordinator,
}
_WEIGHTS = {"grant": 5, "warning": 3, "worker killed": 2, "worker stalled": 2}
_DRAWN = [name for name in _EVENTS for _ in range(_WEIGHTS.get(name, 1))]


def _is_agent(process: psutil.Process) -> bool:
    """Not one that it has forked, which has its command line."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return parent is None or "--agent" not in parent.cmdline()
    return False


def _is_of(pid: int, path: str) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        family = [process, *process.parents()]
        return any(path in " ".join(each.cmdline()) for each in family)
    return False


def _with_children(processes: list[psutil.Process]) -> list[psutil.Process]:
    found = [*processes]
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += process.children(recursive=True)
    return found
