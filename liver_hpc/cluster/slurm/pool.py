"""The nodes of a run on Slurm: its own job's components and its burst allocations, watched."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.pool import NodePool
from liver_hpc.cluster.slurm.burst_jobs import BurstJobs
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.holdings import Holding, Holdings, Place
from liver_hpc.cluster.slurm.replies import JobInfo, PartitionInfo, parse_setting_s
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.run.events import PoolEvent, PoolNote

_ANSWER_S = 2.0
"""How long a warning may wait for Slurm's word before the worst is assumed."""
_KILL_WAIT_S = 30.0
"""Slurm's default, where it does not say."""
_NODES_EVERY = 3
"""Polls of jobs for one of node states."""
_THREAD_END_S = 5.0
_GIVEN_BACK = "given back"

_log = logging.getLogger(__name__)

_Warning = tuple[str, str, float]


class SlurmPool(NodePool):
    """Tells of the nodes of the own job and of burst allocations, and asks for the latter.

    One thread polls, submits and cancels; a second one finds out what signals mean, so that a
    controller that does not answer holds up none of them. While it does not answer nothing
    changes; what was to be done is done when it answers again.
    """

    def __init__(
        self,
        config: RunConfig,
        commands: SlurmCommands,
        own: Sequence[Holding],
        run_directory: Path,
        clock: Clock,
    ) -> None:
        self._config = config
        self._slurm = config.cluster.slurm
        self._commands = commands
        self._once = commands.once()
        self._own = own
        self._clock = clock
        self._burst: BurstJobs | None = None
        if (burst := self._slurm.burst) is not None:
            self._burst = BurstJobs(config, burst, commands, run_directory, clock, self._note)
        self._partitions: dict[str, PartitionInfo] = {}
        self._lock = threading.RLock()
        self._holdings = Holdings(self._slurm.end_window_s, _KILL_WAIT_S)
        self._returning: dict[str, str] = {}  # jobs to be cancelled, and why
        self._warnings: queue.SimpleQueue[_Warning | None] = queue.SimpleQueue()
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._unreachable = False
        self._threads: list[threading.Thread] = []
        self._tell: Callable[[PoolEvent], None] = lambda event: None

    # ---- for the run

    def start(self, tell: Callable[[PoolEvent], None]) -> None:
        self._tell = tell
        try:
            self._partitions = self._commands.partitions()
            kill_s = parse_setting_s(self._commands.setting("KillWait"), _KILL_WAIT_S)
            self._holdings = Holdings(self._slurm.end_window_s, kill_s)
        except LiverError as error:
            self._note(f"Slurm's partitions are unknown: {error}")
        self._enter_own()
        if self._burst is not None:
            try:
                self._burst.open()
            except (LiverError, OSError) as error:
                self._note(f"no burst nodes will be asked for: {error}")
                self._burst = None
        for target, name in ((self._watch, "slurm-pool"), (self._explain, "slurm-warnings")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def place_of(self, node: str) -> Place:
        """Where steps on a held node belong. Raises LiverError for another one."""
        with self._lock:
            return self._holdings.place_of(node)

    def warned(self, node: str, signal: str, at_s: float) -> None:
        self._warnings.put((node, signal, at_s))

    def want(self, workers: int) -> None:
        if self._burst is not None:
            self._burst.policy.want(workers)
            self._wake.set()

    def give_back(self, node: str) -> None:
        with self._lock:
            job = self._holdings.give_back(node)
            if job is not None:
                self._returning[job] = _GIVEN_BACK
        self._wake.set()

    def avoid(self, node: str) -> None:
        if self._burst is not None:
            self._burst.avoided |= {node}

    def readmit(self, node: str) -> None:
        if self._burst is not None:
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
        if self._burst is not None:
            self._burst.close()
        late = [thread.name for thread in self._threads if thread.is_alive()]
        if late:
            raise DeadlineError(f"waited {limit_s:g} s for threads {late} to end")

    # ---- the start

    def _enter_own(self) -> None:
        jobs: dict[str, JobInfo] | None = None
        try:
            jobs = self._commands.jobs([holding.job for holding in self._own])
        except LiverError as error:
            self._note(f"the own job is taken as it was submitted: {error}")
        for holding in self._own:
            info = jobs.get(holding.job) if jobs is not None else None
            if jobs is not None and not holding.own and (info is None or info.over):
                self._note(f"component {holding.name} has ended before")
                continue
            holding.grace_s = self._grace_s(holding.partition)
            if info is not None:
                holding.ends_s = info.ends_s
                holding.nodes = info.nodes or holding.nodes
            self._tell_all(self._holdings.enter(holding))
        if jobs is not None:
            self._observe(jobs)

    def _grace_s(self, partition: str) -> float | None:
        """None where nobody is preempted, as far as is known."""
        known = self._partitions.get(partition)
        if known is None or known.preempt_mode == "OFF":
            return None
        return known.grace_s

    # ---- the watching thread

    def _watch(self) -> None:
        next_poll_s = self._clock.now_s() + self._slurm.poll_s
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
            except LiverError as error:
                self._note(str(error))
            except OSError as error:
                self._note(f"the run directory: {error}")

    def _pause_s(self, next_poll_s: float) -> float:
        until_s = next_poll_s
        if self._burst is not None and not self._unreachable:
            after_refusal_s = self._burst.policy.next_request_s
            if after_refusal_s > self._clock.now_s():
                until_s = min(until_s, after_refusal_s)
        return max(0.0, until_s - self._clock.now_s())

    def _poll(self, with_nodes: bool) -> None:
        with self._lock:
            ids = self._holdings.jobs
            nodes = self._holdings.node_names()
        if self._burst is not None:
            ids += self._burst.policy.pending
        jobs = self._once.jobs(ids)
        self._observe(jobs)
        if with_nodes and nodes:
            states = self._once.node_states(nodes)
            with self._lock:
                events = self._holdings.observe_nodes(states, self._clock.now_s())
            self._tell_all(events)
        if self._unreachable:
            self._unreachable = False
            self._note("the Slurm controller answers again")

    def _observe(self, jobs: dict[str, JobInfo]) -> None:
        with self._lock:
            before = set(self._holdings.burst_jobs())
            events = self._holdings.observe(jobs, self._clock.now_s())
            ended = before - set(self._holdings.burst_jobs())
        if self._burst is not None:
            for job in ended:
                self._burst.ended(job, by_us=False)
            for info in self._burst.observe(jobs):
                with self._lock:
                    shared = sorted({*info.nodes} & {*self._holdings.node_names()})
                    if shared:
                        self._returning[info.job_id] = f"on nodes that are held already: {shared}"
                    else:
                        events += self._holdings.enter(self._granted(info))
                if shared:
                    self._note(
                        f"burst job {info.job_id} goes back: {', '.join(shared)} held already; "
                        "cluster.slurm.burst.options wants exclusive: true"
                    )
        self._tell_all(events)

    def _granted(self, info: JobInfo) -> Holding:
        burst = self._slurm.burst
        assert burst is not None
        return Holding(
            name=f"burst-{info.job_id}",
            place=Place(info.job_id, burst=True, gpus_per_node=burst.gpus_per_node),
            nodes=info.nodes,
            slots=self._config.cluster.slots(burst),
            grace_s=self._grace_s(burst.partition),
            ends_s=info.ends_s,
        )

    def _return(self) -> None:
        """Cancels what nobody needs any more."""
        with self._lock:
            returning = dict(self._returning)
        for job, reason in returning.items():
            self._once.cancel(job)
            with self._lock:
                self._returning.pop(job, None)
                events = self._holdings.strike(job, reason)
            if self._burst is not None:
                self._burst.ended(job, by_us=reason == _GIVEN_BACK)
            self._tell_all(events)

    def _ask_for_more(self) -> None:
        if self._burst is None or self._unreachable:
            return
        now_s = self._clock.now_s()
        if self._burst.policy.exhausted:
            with self._lock:
                deadline_s = now_s + self._config.policy.drain_window_s
                events = self._holdings.spent(now_s, deadline_s)
            self._tell_all(events)
        self._burst.act()

    # ---- the explaining thread

    def _explain(self) -> None:
        commands = self._commands.once(_ANSWER_S)
        ending = False
        while not ending:
            came = [self._warnings.get()]
            while not self._warnings.empty():
                came.append(self._warnings.get())
            ending = None in came
            self._explain_all(commands, [warning for warning in came if warning is not None])

    def _explain_all(self, commands: SlurmCommands, warnings: list[_Warning]) -> None:
        """Asks one question for all: their windows are too short for one each."""
        with self._lock:
            held = {node: self._holdings.of(node) for node, _, _ in warnings}
        asked = {node: holding.job for node, holding in held.items() if holding is not None}
        jobs: dict[str, JobInfo] | None = None
        try:
            jobs = commands.jobs(sorted(set(asked.values())))
        except LiverError as error:
            _log.warning("what signals on %s mean is not known: %s", sorted(asked), error)
        for node, signal, at_s in warnings:
            if node not in asked:
                continue
            with self._lock:
                if jobs is None:
                    events = self._holdings.unanswered(node, at_s)
                else:
                    events = self._holdings.signalled(node, signal, at_s, jobs.get(asked[node]))
            self._tell_all(events)

    def _note(self, text: str) -> None:
        self._tell(PoolNote(text))

    def _tell_all(self, events: Iterable[PoolEvent]) -> None:
        for event in events:
            self._tell(event)
