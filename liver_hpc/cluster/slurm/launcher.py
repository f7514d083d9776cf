"""Agents as steps of Slurm jobs: one srun for every agent, a child of this process.

srun is only the messenger, and outlives a coordinator that is killed. Whether an agent has ended is
asked of Slurm too: a step outlives a killed srun, and srun calls the loss of a node success.
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import AGENT_MODULE, KILLED, LaunchedAgent, Launcher, agent_options
from liver_hpc.cluster.slurm.commands import RUNNING, SlurmCommands
from liver_hpc.cluster.slurm.container import step_words
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Command
from liver_hpc.run.actions import LaunchAgent

_IMMEDIATE_S = 5
_CLOSE_MARGIN_S = 10.0
_SRUN_END_S = 5.0
_LOOK_S = 0.2
_ADOPTED_LOOK_S = 2.0
_CREATE_S = 60.0
_RETRY_S = 5.0
_STEP_GRACE_S = 2.0
_CANCEL_AGAIN_S = 15.0

# Only srun's and slurmstepd's own words count, not what a task prints.
_LOST = re.compile(rb"^(srun|slurmstepd[^:]*): .*(node failure|node fail)", re.I | re.M)
_TASK_ENDED = re.compile(rb"^srun: error: \S+: task 0: ", re.M)
_UNREACHABLE = re.compile(
    rb"^srun: error: .*(Unable to contact slurm controller|Socket timed out"
    rb"|Zero Bytes were transmitted|Connection refused|Slurm temporarily unable)",
    re.M,
)
# A controller that has just come back knows its nodes only by name for a while.
_NOT_CREATED = re.compile(
    rb"^srun: error: Unable to (create step|confirm allocation) for job", re.M
)

_log = logging.getLogger(__name__)


def slurm_launcher(
    run_directory: Path,
    config: RunConfig,
    commands: SlurmCommands,
    use: Callable[[str], Allocation],
    program: Sequence[str] = (),
    task: Sequence[str] = (),
) -> Launcher:
    """Runs agents on the nodes of Slurm jobs.

    use: the allocation of a node that is held; raises LiverError for another one. program: what a
    step runs, to which the agent's options are added; without it the agent. task: a module and its
    arguments that run in an agent's place. What srun prints, and an agent before it has a log of
    its own, goes to logs/srun-NAME.log of the run directory.
    """
    slurm, directory = config.cluster.slurm, run_directory.absolute()
    step = step_words(config, directory)
    program = program or (*step.python, AGENT_MODULE)

    def prepare(launch: LaunchAgent) -> Step:
        held, name = use(launch.seat.node), f"liver-{launch.agent}"
        agent = [*program, *agent_options(launch, directory, config.workers.warm), "--warnings"]
        agent = [*step.python, *task] if task else agent
        command = Command(
            f"srun of agent {launch.agent}",
            [*srun_words(held, name, launch.seat.node), *step.options, *agent],
            orphan_signal=None,  # the agent ends it, if no other coordinator takes over
            log=directory / "logs" / f"srun-{launch.agent}.log",
            apart="session",
        )
        return Step(launch.agent, command, name, held.job, commands.once(), slurm.unreachable_s)

    return Launcher(prepare, slurm.unreachable_s + slurm.command_s + _CLOSE_MARGIN_S)


def srun_words(held: Allocation, name: str, node: str) -> list[str]:
    """A step of one task on `node`, which sees all of it, whatever else runs there, and outlives
    the loss of another one. What the task runs follows."""
    words = ["srun", f"--jobid={held.job}"]
    if held.het is not None:
        leader, index = held.het
        words = ["srun", f"--jobid={leader}", f"--het-group={index}"]
    words += [f"--job-name={name}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    words += ["--overlap", "--cpu-bind=none", "--input=none", "--no-kill"]
    words += ["--kill-on-bad-exit=0", "--unbuffered"]
    # Left alone, an srun that has to wait asks again only after a minute.
    words += [f"--immediate={_IMMEDIATE_S}", "--mpi=none"]
    if held.gpus_per_node:
        words.append(f"--gpus-per-node={held.gpus_per_node}")
    return words


class Step(LaunchedAgent):
    """From the srun to the moment at which Slurm knows of no such step any more.

    command: the srun's, with a log. name: the step's, unique in the run. job: under its id squeue
    lists the step.
    """

    def __init__(
        self,
        agent: str,
        command: Command,
        name: str,
        job: str,
        commands: SlurmCommands,
        unreachable_s: float,
    ) -> None:
        super().__init__(agent, command, _SRUN_END_S)
        assert command.log is not None
        self._log_path = command.log
        self._log_start = 0
        self._adopted = False
        self._name = name
        self._job = job
        self._commands = commands
        self._unreachable_s = unreachable_s

    def _spawn(self) -> None:
        self._log_start = self._log_path.stat().st_size if self._log_path.exists() else 0
        super()._spawn()

    def _find(self, host: str, pid: int) -> bool:
        """Whether Slurm has the step."""
        self._adopted = bool(self._commands.steps(self._job, self._name))
        return self._adopted

    # ---- in the killer's thread

    def _end(self) -> None:
        """The step first: without its srun nobody would tell it to end."""
        try:
            self._cancel_steps()
        except LiverError as error:
            _log.warning("agent %s: its step cannot be cancelled yet: %s", self.agent, error)
        if not self.join(_STEP_GRACE_S) and not self._adopted:
            super()._end()

    # ---- in the keeper's thread

    def _bury(self) -> int:
        return self._await_adopted() if self._adopted else self._await_step(self._run())

    def _await_adopted(self) -> int:
        """Its srun, where it still runs, is another process's: Slurm is asked. How the agent ended
        is not known."""
        pause = threading.Event()
        unheard = Deadline.after(SystemClock(), self._unreachable_s, "the controller")
        while not unheard.expired():
            try:
                if not self._commands.steps(self._job, self._name):
                    return KILLED
                unheard = Deadline.after(SystemClock(), self._unreachable_s, "the controller")
            except LiverError as error:
                _log.warning("agent %s: does its step run? %s", self.agent, error)
            pause.wait(_ADOPTED_LOOK_S)
        return KILLED

    def _run(self) -> int:
        """srun's exit code; srun is repeated where no controller let it begin."""
        clock = SystemClock()
        unreachable = Deadline.after(clock, self._unreachable_s, "the controller")
        refused = Deadline.after(
            clock, min(_CREATE_S, self._unreachable_s), "the step to be created"
        )
        while True:
            code = self._child.wait()
            said = self._printed()
            again = (_UNREACHABLE.search(said) and not unreachable.expired()) or (
                _NOT_CREATED.search(said) and not refused.expired() and self._job_lasts()
            )
            if code == 0 or not again or self._killed.wait(_RETRY_S):
                return code
            _log.warning("agent %s: srun could not begin, and is repeated", self.agent)
            self._spawn()
            if self._killed.is_set():  # the killer may have seen the srun before
                self._child.send_signal(signal.SIGTERM)

    def _job_lasts(self) -> bool:
        """Whether the job is there, or may be."""
        try:
            info = self._commands.jobs([self._job]).get(self._job)
        except LiverError:
            return True
        return info is not None and info.state == RUNNING

    def _printed(self) -> bytes:
        """What srun has said; nothing where its log cannot be read any more."""
        try:
            with self._log_path.open("rb") as log:
                log.seek(self._log_start)
                return log.read()
        except OSError as error:
            _log.warning("agent %s: %s", self.agent, error)
            return b""

    def _await_step(self, code: int) -> int:
        """Waits until Slurm knows of no step either; how the agent really ended."""
        said = self._printed()
        if _LOST.search(said):
            return KILLED  # with its node
        seen = code == 0 or _TASK_ENDED.search(said) is not None
        clock = SystemClock()
        limit = Deadline.after(clock, self._unreachable_s, f"step {self._name} to end")
        own_end = Deadline.after(clock, _STEP_GRACE_S, "the step to end by itself")
        pause = threading.Event()
        while not limit.expired():
            try:
                if not self._commands.steps(self._job, self._name):
                    # srun calls it success when the job was taken away from under its step.
                    taken = code == 0 and (self._killed.is_set() or not self._job_lasts())
                    return KILLED if taken else code
                if own_end.expired() and not seen:
                    self._cancel_steps()
                    own_end = Deadline.after(clock, _CANCEL_AGAIN_S, own_end.waits_for)
            except LiverError as error:  # no answer, or none that makes sense
                _log.warning("agent %s: is its step left? %s", self.agent, error)
            if seen and own_end.expired():
                # Its processes are gone, srun saw that. A step that could not tell an absent
                # controller so stays listed for a minute; to cancel such a one drains the node.
                return code
            pause.wait(_LOOK_S)
        _log.error("agent %s: %s", self.agent, limit.error())
        return code or KILLED

    # ---- in either thread

    def _cancel_steps(self) -> None:
        for step_id in self._commands.steps(self._job, self._name):
            self._commands.cancel(step_id, signal="KILL")
