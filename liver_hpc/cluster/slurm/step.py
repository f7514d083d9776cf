"""One agent's step: its srun, kept by a thread that starts it, watches it and buries it."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import KILLED
from liver_hpc.cluster.slurm.allocation import Place
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.replies import RUNNING
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.environment import clean_environment
from liver_hpc.host.lifeline import guarded

_SPAWN_S = 30.0
_SRUN_END_S = 5.0
_LOOK_S = 0.2
_CREATE_S = 60.0
_RETRY_S = 5.0
_STEP_GRACE_S = 2.0
_CANCEL_AGAIN_S = 15.0

# Only srun's and slurmstepd's own words count, not what a task prints.
_LOST = re.compile(rb"^(srun|slurmstepd[^:]*): .*(node failure|node fail)", re.I | re.M)
_TASK_ENDED = re.compile(rb"^srun: error: \S+: task 0: ", re.M)
_AWAY = re.compile(
    rb"^srun: error: .*(Unable to contact slurm controller|Socket timed out"
    rb"|Zero Bytes were transmitted|Connection refused|Slurm temporarily unable)",
    re.M,
)
# A controller that has just come back knows its nodes only by name for a while.
_NOT_CREATED = re.compile(
    rb"^srun: error: Unable to (create step|confirm allocation) for job", re.M
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepPlan:
    """name: the step's, unique in the run. command: srun and all its words."""

    agent: str
    name: str
    place: Place
    command: tuple[str, ...]
    log: Path


class Step:
    """From the srun to the moment at which Slurm knows of no such step any more."""

    def __init__(self, plan: StepPlan, commands: SlurmCommands, unreachable_s: float) -> None:
        self._plan = plan
        self._commands = commands
        self._unreachable_s = unreachable_s
        self._spawned = threading.Event()
        self._kill = threading.Event()
        self._ended = threading.Event()
        self._srun: subprocess.Popen[bytes] | None = None
        self._failure: OSError | None = None
        self._killer: threading.Thread | None = None
        self._log_start = 0
        self.exit_code: int | None = None

    def start(self) -> None:
        """Raises LiverError when srun cannot be started."""
        name = f"step-{self._plan.agent}"
        # The srun dies with the thread that started it: this one stays until it has ended.
        threading.Thread(target=self._keep, name=name, daemon=True).start()
        if not self._spawned.wait(_SPAWN_S):
            raise DeadlineError(f"waited {_SPAWN_S:g} s for srun of {self._plan.agent} to start")
        if self._failure is not None:
            raise LiverError(f"agent {self._plan.agent}: {self._failure}") from self._failure

    def kill(self) -> None:
        """Has the step end, whatever state it is in; does not wait. Idempotent."""
        if self._kill.is_set() or self._ended.is_set():
            return
        self._kill.set()
        name = f"kill-{self._plan.agent}"
        self._killer = threading.Thread(target=self._end, name=name, daemon=True)
        self._killer.start()

    def join(self, limit_s: float) -> bool:
        """Whether the step has ended, after at most so many seconds."""
        return self._ended.wait(limit_s)

    # ---- in the killer's thread

    def _end(self) -> None:
        """The step first: without its srun nobody would tell it to end."""
        try:
            self._cancel_steps()
        except LiverError as error:
            _log.warning("agent %s: its step cannot be cancelled yet: %s", self._plan.agent, error)
        srun = self._srun
        if srun is None or self._ended.wait(_STEP_GRACE_S):
            return
        srun.terminate()
        if not self._ended.wait(_SRUN_END_S) and srun.poll() is None:
            srun.kill()

    # ---- in the keeper's thread

    def _keep(self) -> None:
        code = KILLED
        try:
            code = self._bury(self._run())
        except OSError as error:
            self._failure = error
            code = 127
        finally:
            self.exit_code = code
            self._spawned.set()
            self._ended.set()
            _log.info("agent %s ended with exit code %d", self._plan.agent, code)

    def _run(self) -> int:
        """srun's exit code; srun is repeated where no controller let it begin."""
        clock = SystemClock()
        unreachable = Deadline.after(clock, self._unreachable_s, "the controller")
        refused = Deadline.after(
            clock, min(_CREATE_S, self._unreachable_s), "the step to be created"
        )
        self._plan.log.parent.mkdir(parents=True, exist_ok=True)
        while True:
            code = self._srun_once()
            said = self._printed()
            again = (_AWAY.search(said) and not unreachable.expired()) or (
                _NOT_CREATED.search(said) and not refused.expired() and self._job_lasts()
            )
            if code == 0 or not again or self._kill.wait(_RETRY_S):
                return code if code >= 0 else 128 - code
            _log.warning("agent %s: srun could not begin, and is repeated", self._plan.agent)

    def _srun_once(self) -> int:
        with self._plan.log.open("ab") as log:
            self._log_start = log.tell()
            # SIGTERM: an orphaned srun still ends its step.
            self._srun = subprocess.Popen(
                guarded(self._plan.command, signal.SIGTERM),
                env=clean_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._spawned.set()
        if self._kill.is_set():  # the killer may have looked for an srun before there was one
            self._srun.terminate()
        return self._srun.wait()

    def _job_lasts(self) -> bool:
        """Whether the job is there, or may be."""
        try:
            return self._job_is_there()
        except LiverError:
            return True

    def _printed(self) -> bytes:
        """What srun has said; nothing where its log cannot be read any more."""
        try:
            with self._plan.log.open("rb") as log:
                log.seek(self._log_start)
                return log.read()
        except OSError as error:
            _log.warning("agent %s: %s", self._plan.agent, error)
            return b""

    def _bury(self, code: int) -> int:
        """Waits until Slurm knows of no step either; how the agent really ended."""
        said = self._printed()
        if _LOST.search(said):
            return KILLED  # with its node
        seen = code == 0 or _TASK_ENDED.search(said) is not None
        clock = SystemClock()
        limit = Deadline.after(clock, self._unreachable_s, f"step {self._plan.name} to end")
        own_end = Deadline.after(clock, _STEP_GRACE_S, "the step to end by itself")
        pause = threading.Event()
        while not limit.expired():
            try:
                if not self._step_ids():
                    return self._last_word(code)
                if own_end.expired() and not seen:
                    self._cancel_steps()
                    own_end = Deadline.after(clock, _CANCEL_AGAIN_S, own_end.waits_for)
            except LiverError as error:  # no answer, or none that makes sense
                _log.warning("agent %s: is its step left? %s", self._plan.agent, error)
            if seen and own_end.expired():
                # Its processes are gone, srun saw that. A step that could not tell an absent
                # controller so stays listed for a minute; to cancel such a one drains the node.
                return code
            pause.wait(_LOOK_S)
        _log.error("agent %s: %s", self._plan.agent, limit.error())
        return code or KILLED

    def _last_word(self, code: int) -> int:
        """srun calls it success when the job was taken away from under its step."""
        if code != 0:
            return code
        return KILLED if self._kill.is_set() or not self._job_lasts() else 0

    # ---- in either thread

    def _step_ids(self) -> list[str]:
        steps = self._commands.steps(self._plan.place.steps_of, retry=False)
        return [step.step_id for step in steps if step.name == self._plan.name]

    def _cancel_steps(self) -> None:
        for step_id in self._step_ids():
            self._commands.cancel(step_id, signal="KILL", retry=False)

    def _job_is_there(self) -> bool:
        job = self._plan.place.steps_of
        info = self._commands.jobs([job], retry=False).get(job)
        return info is not None and info.state == RUNNING
