"""The nodes of a run on Slurm: its own job's components and its burst allocations, watched."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.pool import Adopted, NodePool
from liver_hpc.cluster.slurm.burst_jobs import BurstJobs
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.holdings import GIVEN_BACK, REASONS, Allocation, Holdings
from liver_hpc.cluster.slurm.replies import JobInfo
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.process import start_thread
from liver_hpc.run.events import BurstOver, PoolEvent, PoolNote

_ANSWER_S = 2.5
"""How long a warning may wait for Slurm's word before the worst is assumed."""
_KILL_WAIT_S = 30.0
"""Slurm's default, where it does not say."""
_NODES_EVERY = 3
"""Polls of jobs for one of node states."""
_THREAD_END_S = 5.0

_log = logging.getLogger(__name__)

_Warning = tuple[str, str, float]


class SlurmPool(NodePool):
    """Tells of the nodes of the own job and of burst allocations, and asks for the latter.

    One thread polls, submits and cancels; a second one finds out what signals mean, so that a
    controller that does not answer holds up none of them. While it does not answer nothing
    changes; what was to be done is done when it answers again. squeue: asked by the launcher too.
    """

    def __init__(
        self,
        config: RunConfig,
        commands: SlurmCommands,
        squeue: Squeue,
        own: Sequence[Allocation],
        run_directory: Path,
        clock: Clock,
    ) -> None:
        self._slurm = config.cluster.slurm
        self._drain_window_s = config.policy.drain_window_s
        self._commands = commands
        self._once = commands.once()
        self._squeue = squeue
        self._own = own
        self._clock = clock
        self._burst = BurstJobs(config, commands, run_directory, clock, self._note)
        self._asks = self._is_over = False  # for burst nodes; told that none will be asked for
        self._lock = threading.RLock()  # of the holdings, and so of the order of what is told
        self._holdings = Holdings(self._slurm.end_window_s, _KILL_WAIT_S)
        self._warnings: queue.SimpleQueue[_Warning | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._unreachable = self._has_learned = False
        self._threads: list[threading.Thread] = []
        self._tell: Callable[[PoolEvent], None] = lambda event: None

    # ---- for the run

    def start(self, tell: Callable[[PoolEvent], None], adopt: Adopted | None = None) -> None:
        self._tell = tell
        if adopt is None:
            with suppress(ControllerUnreachable):  # it is asked again
                self._learn(self._commands)
            self._enter_own()
        else:  # workers wait for a word; the watching thread asks Slurm
            for held in self._own:
                self._enter_known(held, adopt)
        if self._slurm.burst is not None:
            try:
                for held in self._burst.open(adopt is not None):
                    # Of one that was granted just before, the run has not heard.
                    is_known = adopt is not None and not {*adopt}.isdisjoint(held.nodes)
                    self._enter_known(held, adopt if is_known else None)
                self._asks = True
            except (LiverError, OSError) as error:
                self._tell(BurstOver(str(error)))
            if adopt is None:  # else requests may stand that are found once Slurm is asked
                self._tell_if_over()
        watch = partial(self._watch, at_once=adopt is not None)
        for target, name in ((watch, "slurm-pool"), (self._explain, "slurm-warnings")):
            self._threads.append(start_thread(target, name))

    def use(self, node: str) -> Allocation:
        """Where steps on a held node belong. Raises LiverError for another one."""
        with self._lock:
            return self._holdings.use(node)

    def warned(self, node: str, signal: str, at_s: float) -> None:
        # A node's clock may be ahead: what Slurm ends is not to seem to end later for that.
        self._warnings.put((node, signal, min(at_s, self._clock.now_s())))

    def want(self, workers: int) -> None:
        self._burst.policy.want(workers)
        self._wake.set()

    def give_back(self, node: str) -> None:
        with self._lock:
            self._holdings.give_back(node)
        self._wake.set()

    def reject(self, node: str, why: str) -> None:
        self._burst.reject(node)
        with self._lock:
            self._tell_all(self._holdings.reject(node, why))
        self._wake.set()

    def avoid(self, node: str) -> None:
        self._burst.avoided |= {node}

    def readmit(self, node: str) -> None:
        self._burst.avoided -= {node}

    def close(self) -> None:
        if self._ending.is_set():
            return
        self._ending.set()
        self._wake.set()
        self._warnings.put(None)
        limit_s = self._slurm.command_s + _THREAD_END_S
        deadline = Deadline.after(self._clock, limit_s, "the pool's threads to end")
        for thread in self._threads:
            thread.join(deadline.remaining_s())
        self._burst.close()
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            raise DeadlineError(f"waited {limit_s:g} s for threads {late} to end")

    # ---- the start

    def _learn(self, commands: SlurmCommands) -> None:
        """What there is to know of partitions, once. Raises ControllerUnreachable."""
        try:
            found = commands.partitions().values()
            kill_wait, *_ = commands.setting("KillWait").split()  # "30 sec"
            kill_s = float(kill_wait)
        except ControllerUnreachable:
            raise
        except (LiverError, ValueError) as error:
            self._note(f"Slurm's partitions are unknown: {error}")
        else:
            preempted = [partition for partition in found if partition.preempt_mode != "OFF"]
            grace_s = {partition.name: partition.grace_s for partition in preempted}
            with self._lock:
                self._holdings.learn(kill_s, grace_s)
        self._has_learned = True

    def _enter_known(self, held: Allocation, known: Adopted | None) -> None:
        """Of an allocation, the nodes that the run has not lost, with what they were warned of."""
        held.nodes = tuple(node for node in held.nodes if known is None or node in known)
        warnings = [(known or {}).get(node) for node in held.nodes]
        held.warned = {each.node: each for each in warnings if each and each.reason in REASONS}
        self._tell_all(self._holdings.enter(held))

    def _enter_own(self) -> None:
        jobs: dict[str, JobInfo] = {}
        try:
            jobs = self._commands.jobs([held.job for held in self._own])
        except LiverError as error:
            self._note(f"the own job is taken as it was submitted: {error}")
        for held in self._own:
            info = jobs.get(held.job)
            if jobs and not held.own and (info is None or info.over):
                self._note(f"component {held.name} has ended before")
                continue
            if info is not None:
                held.ends_s, held.nodes = info.ends_s, info.nodes or held.nodes
            self._tell_all(self._holdings.enter(held))
        if jobs:
            self._observe(jobs)

    # ---- the watching thread

    def _watch(self, at_once: bool) -> None:
        next_poll_s = self._clock.now_s() + (0.0 if at_once else self._slurm.poll_s)
        polls = 0
        while not self._ending.is_set():
            self._wake.wait(self._pause_s(next_poll_s))
            self._wake.clear()
            if self._ending.is_set():
                return
            poll = self._clock.now_s() >= next_poll_s
            try:
                if poll:
                    next_poll_s = self._clock.now_s() + self._slurm.poll_s
                    self._poll(with_nodes=polls % _NODES_EVERY == 0)
                    polls += 1
                self._return()
                self._ask_for_more()
            except ControllerUnreachable as error:
                if not self._unreachable:
                    self._note(f"the Slurm controller does not answer: {error}")
                self._unreachable = True
                if self._asks:
                    self._burst.may_come_late()
            except LiverError as error:
                self._note(str(error))
            except OSError as error:
                self._note(f"the run directory: {error}")

    def _pause_s(self, next_poll_s: float) -> float:
        now_s, after_refusal_s = self._clock.now_s(), self._burst.policy.not_before_s
        if not self._unreachable and after_refusal_s > now_s:
            next_poll_s = min(next_poll_s, after_refusal_s)
        return max(0.0, next_poll_s - now_s)

    def _poll(self, with_nodes: bool) -> None:
        with self._lock:
            jobs, nodes = self._holdings.jobs, self._holdings.node_names()
        if not self._has_learned:  # what a job's end means, too
            self._learn(self._once)
        self._observe(self._squeue.jobs([*jobs, *self._burst.policy.pending]))
        if with_nodes and nodes:
            states = self._once.node_states(nodes)
            with self._lock:
                self._tell_all(self._holdings.observe_nodes(states, self._clock.now_s()))
        if self._unreachable:
            self._unreachable = False
            self._note("the Slurm controller answers again")

    def _observe(self, jobs: dict[str, JobInfo]) -> None:
        with self._lock:
            self._tell_all(self._holdings.observe(jobs, self._clock.now_s()))
            ended = self._burst.policy.held.keys() - self._holdings.jobs
        for job in ended:
            self._burst.ended(job, by_us=False)
        granted = self._burst.observe(jobs)
        with self._lock:
            for new in granted:
                self._tell_all(self._holdings.enter(new))

    def _return(self) -> None:
        """Cancels what nobody needs any more."""
        with self._lock:
            returning = self._holdings.returning()
        for held in returning:
            self._once.cancel(held.job)
            self._burst.ended(held.job, by_us=held.returning == GIVEN_BACK)
            with self._lock:
                self._tell_all(self._holdings.strike(held.job, held.returning))

    def _ask_for_more(self) -> None:
        if self._unreachable or not self._asks:
            return
        now_s = self._clock.now_s()
        if self._burst.policy.exhausted:
            with self._lock:
                self._tell_all(self._holdings.spent(now_s, now_s + self._drain_window_s))
        with self._lock:
            useful = self._holdings.useful(self._burst.avoided)
        self._burst.policy.note_useful(useful)
        self._burst.act()
        self._tell_if_over()

    def _tell_if_over(self) -> None:
        """Once."""
        if self._asks and not self._is_over and (why := self._burst.policy.over):
            self._is_over = True
            self._tell(BurstOver(why))

    # ---- the explaining thread

    def _explain(self) -> None:
        while not self._ending.is_set():
            came = [self._warnings.get()]
            while not self._warnings.empty():
                came.append(self._warnings.get())
            self._explain_all([warning for warning in came if warning is not None])

    def _explain_all(self, warnings: list[_Warning]) -> None:
        """Asks one question for all: their windows are too short for one each."""
        with self._lock:
            held = {node: self._holdings.of(node) for node, _, _ in warnings}
        asked = {node: one.job for node, one in held.items() if one is not None}
        jobs: dict[str, JobInfo] | None = None
        try:
            jobs = self._squeue.jobs(sorted(set(asked.values())), urgent_s=_ANSWER_S)
        except LiverError as error:
            _log.warning("what signals on %s mean is not known: %s", sorted(asked), error)
        with self._lock:
            for node, signal, at_s in warnings:
                if node in asked:
                    self._tell_all(self._holdings.signalled(node, signal, at_s, jobs))

    def _note(self, text: str) -> None:
        self._tell(PoolNote(text))

    def _tell_all(self, events: Iterable[PoolEvent]) -> None:
        for event in events:
            self._tell(event)
