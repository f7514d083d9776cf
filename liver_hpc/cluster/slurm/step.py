"""A step of agents: one srun, a child of this process, starts an agent on each of its nodes.

srun is only the messenger, and outlives a coordinator that is killed; its log says of each agent
how it has ended, while the others go on. Whether a step has ended is asked of Slurm too: it
outlives a killed srun.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import KILLED, LaunchedAgent
from liver_hpc.cluster.slurm import srun_log
from liver_hpc.cluster.slurm.replies import RUNNING
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.process import start_thread

_SRUN_END_S = 5.0
_LOOK_S = 0.25
_ADOPTED_LOOK_S = 2.0
_ADOPTED_ASK_S = 30.0
"""Nobody else says that such a step has ended whose srun is gone; it may last for weeks."""
_CREATE_S = 60.0
_RETRY_S = 5.0
_STEP_GRACE_S = 2.0
_CANCEL_AGAIN_S = 15.0
_GATHER_S = 0.1
"""Agents that are killed within so much time of each other are killed together."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlan:
    """name: the step's, unique in the run. job: under its id squeue lists the step. agents: their
    names, by node. command: the srun's, with a log. killing: the words of an srun that kills the
    tasks of the step on some of its nodes. looking: of one that prints on which nothing of the step
    is left. leads: whether it is in the first of several components."""

    name: str
    job: str
    agents: Mapping[str, str]
    command: Command
    killing: Callable[[Sequence[str]], list[str]]
    looking: Callable[[Sequence[str]], list[str]]
    leads: bool = False


class Step:
    """From the srun to the moment at which Slurm knows of no such step any more.

    agents: by name. unreachable_s: how long a controller is waited for.
    """

    def __init__(self, plan: StepPlan, squeue: Squeue, unreachable_s: float) -> None:
        assert plan.command.log is not None
        self._plan = plan
        self._squeue = squeue
        self._unreachable_s = unreachable_s
        self._on = {node: StepAgent(name, self, node) for node, name in plan.agents.items()}
        self.agents = {agent.agent: agent for agent in self._on.values()}
        self._log_path: Path = plan.command.log
        self._log_start = self._read_to = 0
        self._ends: dict[str, int] = {}  # by node: exit codes that srun has told
        self._unnamed = 0  # how many have ended of whom nobody knows on which nodes
        self._look_s = _RETRY_S  # longer with each look that explains nothing
        self._next_look = Deadline.after(SystemClock(), 0.0, "nobody")
        self._lock = threading.Lock()
        self._child: Child | None = None
        self._adopted = False
        self._doomed: set[str] = set()  # nodes
        self._killing = False  # whether there is a thread that does
        self._unkilled = False  # as there was none to be had
        self._all_doomed = threading.Event()

    def start(self) -> None:
        """With the first call all its agents are. Raises LiverError."""
        with self._lock:
            if self._child is None:
                self._run_thread("keep", self._keep)  # it begins with the lock
                self._spawn()

    def adopt(self) -> None:
        """Another process has started it. Whether Slurm still has it, its keeper finds out: who
        takes over has no time to ask about one step after the other."""
        with self._lock:
            if not self._adopted:
                self._hear()
                self._run_thread("keep", self._keep_adopted)
                self._adopted = True

    def is_told(self, node: str) -> bool:
        """Whether srun has said that the agent there has ended."""
        return node in self._ends

    def kill(self, node: str) -> None:
        with self._lock:
            self._doomed.add(node)
            if self._doomed >= self._living():
                self._all_doomed.set()
            self._have_killed()

    def _have_killed(self) -> None:
        """With the lock held. Where there is no thread that could, the keeper tries again."""
        if not self._killing:
            was_so, self._unkilled = self._unkilled, False
            try:
                self._run_thread("kill", self._kill_doomed)
                self._killing = True
            except LiverError as error:
                self._unkilled = True
                if not was_so:
                    _log.warning("step %s: agents are killed later: %s", self._plan.name, error)

    def _living(self) -> set[str]:
        return {node for node, agent in self._on.items() if agent.exit_code is None}

    # ---- in the killer's thread

    def _kill_doomed(self) -> None:
        """The step first: without its srun nobody would tell it to end."""
        pause = threading.Event()
        limit = Deadline.after(SystemClock(), self._unreachable_s, "killed agents to end")
        while not limit.expired():
            pause.wait(_GATHER_S)
            with self._lock:
                living = self._living()
                doomed = self._doomed & living
                if not doomed:
                    self._killing = False
                    return
            try:
                if doomed == living:
                    self._cancel_steps()
                else:
                    self._squeue.commands.run_step(self._plan.killing(sorted(doomed)))
            except LiverError as error:
                names = [self._on[node].agent for node in sorted(doomed)]
                _log.warning("agents %s cannot be killed yet: %s", names, error)
            grace = Deadline.after(SystemClock(), _STEP_GRACE_S, "the agents to end")
            ended = [self._on[node].join(grace.remaining_s()) for node in doomed]
            if not all(ended) and doomed == living:
                self._end_srun()
        with self._lock:
            self._killing = False
        raise limit.error()

    def _end_srun(self) -> None:
        """From 25.11 on Slurm takes an srun that kills its step in the first of several components
        for one that cancels the job, with all of them. There it is ended before it has a step."""
        if self._child is None:
            return
        if self._plan.leads:
            try:
                if self._steps():
                    return
            except LiverError as error:
                _log.warning("step %s: has it begun? %s", self._plan.name, error)
                return
        self._child.end(_SRUN_END_S)

    # ---- in the keeper's thread

    def _keep(self) -> None:
        with self._lock:
            if self._child is None:
                return  # it could not be started
        code = KILLED
        try:
            code = self._await_step(self._run())
        finally:
            self._all_ended(code)

    def _keep_adopted(self) -> None:
        """Its srun, where it still runs, is another process's, and writes to the same log; Slurm is
        asked for the end of the step."""
        try:
            self._await_adopted()
            self._hear()
        finally:
            self._all_ended(KILLED)

    def _all_ended(self, code: int) -> None:
        """code: of those of whom nothing was told."""
        for node, agent in self._on.items():
            agent.has_ended(self._ends.get(node, code))

    def _await_adopted(self) -> None:
        """A controller that does not answer says nothing: who is not to be killed goes on."""
        pause, clock = threading.Event(), SystemClock()
        unheard = Deadline.after(clock, self._unreachable_s, "the controller")
        asks = Deadline.after(clock, 0.0, "the controller's turn")
        while not (self._all_doomed.is_set() and unheard.expired()):
            told = len(self._ends) == len(self._on)
            if told or self._doomed & self._living() or asks.expired():
                try:
                    if not self._steps():
                        return
                    unheard = Deadline.after(clock, self._unreachable_s, unheard.waits_for)
                    asks = Deadline.after(clock, _ADOPTED_ASK_S, asks.waits_for)
                except LiverError as error:
                    _log.warning("step %s: does it run? %s", self._plan.name, error)
            pause.wait(_ADOPTED_LOOK_S)
            self._look()

    def _run(self) -> int:
        """srun's exit code; srun is repeated where no controller let it begin."""
        clock = SystemClock()
        unreachable = Deadline.after(clock, self._unreachable_s, "the controller")
        refused = Deadline.after(
            clock, min(_CREATE_S, self._unreachable_s), "the step to be created"
        )
        while True:
            code = self._await_srun()
            said = self._printed(self._log_start)
            again = (srun_log.found_no_controller(said) and not unreachable.expired()) or (
                srun_log.created_no_step(said) and not refused.expired() and self._job_lasts()
            )
            if code == 0 or not again or self._all_doomed.wait(_RETRY_S):
                return code
            _log.warning("step %s: srun could not begin, and is repeated", self._plan.name)
            self._spawn()
            if self._all_doomed.is_set():  # the killer may have seen the srun before
                assert self._child is not None
                self._child.send_signal(signal.SIGTERM)

    def _spawn(self) -> None:
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        self._read_to = self._log_start
        self._child = Child(self._plan.command)

    def _await_srun(self) -> int:
        assert self._child is not None
        while True:
            try:
                code = self._child.wait(_LOOK_S)
            except DeadlineError:
                self._look()
            else:
                self._child.end(0.0)
                return code

    def _look(self) -> None:
        self._hear()
        self._find_unnamed()
        with self._lock:
            if self._unkilled:
                self._have_killed()

    def _hear(self) -> None:
        """Takes in what srun has said since; of those that have ended so is told at once, unless
        they are the last ones, after whom the step itself ends."""
        said = self._printed(self._read_to)
        whole = said[: said.rfind("\n") + 1]
        try:
            for nodes, code in srun_log.task_ends(whole):
                named = self._squeue.commands.hostnames(nodes)
                self._ends.update({node: code for node in named if node in self._on})
        except LiverError as error:  # it is read again
            _log.warning("step %s: %s", self._plan.name, error)
            return
        self._read_to += len(whole.encode("latin-1"))
        self._unnamed += srun_log.unnamed_ends(whole)
        self._tell_ends()

    def _tell_ends(self) -> None:
        if len(self._ends) < len(self._on):
            for node, code in self._ends.items():
                self._on[node].has_ended(code)

    def _find_unnamed(self) -> None:
        """Takes those for ended on whose nodes nothing of the step is left, where srun has heard of
        ends that it does not tell."""
        living = sorted({*self._on} - self._ends.keys())
        if self._unnamed <= 0 or not living or not self._next_look.expired():
            return
        try:
            printed = self._squeue.commands.run_step(self._plan.looking(living))
        except LiverError as error:
            _log.warning("step %s: on which nodes is it left? %s", self._plan.name, error)
            printed = ""
        gone = {*printed.split()} & {*living}
        self._next_look = Deadline.after(SystemClock(), self._look_s, "the next look")
        self._look_s *= 2
        if 0 < len(gone) <= self._unnamed:  # of more srun is about to tell, or they are to begin
            self._look_s = _RETRY_S
            self._unnamed -= len(gone)
            self._ends |= dict.fromkeys(gone, KILLED)
            self._tell_ends()

    def _job_lasts(self) -> bool:
        """Whether the job is there, or may be."""
        try:
            info = self._squeue.jobs([self._plan.job]).get(self._plan.job)
        except LiverError:
            return True
        return info is not None and info.state == RUNNING

    def _printed(self, start: int) -> str:
        """What srun has said from there on; nothing where its log cannot be read any more."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(start)
                return log.read().decode("latin-1")
        except OSError as error:
            _log.debug("step %s: %s", self._plan.name, error)
            return ""

    def _await_step(self, code: int) -> int:
        """Waits until Slurm knows of no step either; how agents ended of whom srun has not told."""
        self._hear()
        said = self._printed(self._log_start)
        told = len(self._ends) == len(self._on)
        if srun_log.is_lost(said) and told:
            return KILLED
        if not told and code and (why := srun_log.last_error(said)):
            _log.error("step %s: srun ended with exit code %d: %s", self._plan.name, code, why)
        seen, clock = told or code == 0, SystemClock()
        limit = Deadline.after(clock, self._unreachable_s, f"step {self._plan.name} to end")
        own_end = Deadline.after(clock, _STEP_GRACE_S, "the step to end by itself")
        pause = threading.Event()
        while not limit.expired():
            try:
                if not self._steps():
                    # srun calls it success when the job was taken away from under its step.
                    taken = code == 0 and not told and (self._doomed or not self._job_lasts())
                    return KILLED if taken else code
                if own_end.expired() and not seen:
                    self._cancel_steps()
                    own_end = Deadline.after(clock, _CANCEL_AGAIN_S, own_end.waits_for)
            except LiverError as error:  # no answer, or none that makes sense
                _log.warning("step %s: is it left? %s", self._plan.name, error)
            if seen and own_end.expired():
                # Its processes are gone, srun saw that. A step that could not tell an absent
                # controller so stays listed for a minute; to cancel such a one drains the node.
                return code
            pause.wait(_LOOK_S)
        _log.error("%s", limit.error())
        return code or KILLED

    # ---- in any thread

    def _steps(self) -> list[str]:
        return self._squeue.steps(self._plan.job, self._plan.name)

    def _cancel_steps(self) -> None:
        for step_id in self._steps():
            self._squeue.commands.cancel(step_id, signal="KILL")

    def _run_thread(self, name: str, act: Callable[[], None]) -> None:
        """Raises LiverError where no thread can be started."""

        def run() -> None:
            try:
                act()
            except LiverError as error:
                _log.error("step %s: %s", self._plan.name, error)

        start_thread(run, f"{name}-{self._plan.name}")


class StepAgent(LaunchedAgent):
    """One agent of a step."""

    def __init__(self, agent: str, step: Step, node: str) -> None:
        super().__init__(agent)
        self._step = step
        self._node = node

    def start(self) -> None:
        self._step.start()

    def adopt(self, host: str, pid: int) -> bool:
        self._step.adopt()
        return self.exit_code is None and not self._step.is_told(self._node)

    def kill(self) -> None:
        if self.exit_code is None:
            self._step.kill(self._node)
