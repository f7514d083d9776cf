"""The coordinator in a child of a process that hears what Slurm's signals announce, and that starts
another one where it is killed.

Python runs signal handlers in the main thread. Here it does nothing but wait, and holds no lock.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands, SlurmError
from liver_hpc.config.schema import SlurmSection
from liver_hpc.coordinator.connections import Control
from liver_hpc.errors import LiverError
from liver_hpc.host.child import end_with_parent
from liver_hpc.host.process import drop_unwritable_output, quiet_thread
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.specs import code_of_spec
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.epoch import NotTakenOver, Superseded, newest_epoch
from liver_hpc.run.events import EndNear, StopSignalled
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome

log = logging.getLogger(__name__)

MOST_KILLED_IN_VAIN = 3
"""So often another coordinator is started without a step done meanwhile."""
END_REASON = "its job is about to end"
OUT_OF_TIME = "its job's time was up before its state was on disk"
_CODE = "liver_hpc.coordinator.main"
_ASK_S = 2.0
_REQUEUE_S = 3.0
"""Of the time that is left, so much is kept for leaving and being queued again."""
_REQUEUE_SHARE = 0.25
_LOOK_S = 0.5
_NOT_TAKEN_OVER = 75
"""Exit code of a child that leaves to the next one what it could not take over."""
_AGAIN_S = 1.0
_MOST_SAID_BYTES = 2**16
_MOST_REASON = 2**12
"""Characters; the outcome's file has all of them."""

_HEARD = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

Found = TypeVar("Found")


@contextlib.contextmanager
def _unheard() -> Iterator[None]:
    """What handles a signal may wait for the next coordinator, which nobody else starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class HostedCoordinator:
    """A run's coordinator in a child of this process, which ends with it. Everything may be called
    from a signal handler.

    A child that is killed, or could not take over from one, is followed by another one, which takes
    over what the first has left. One whose run another coordinator has taken over ends, and the end
    of the run is waited for, or that somebody has this process `take_over` again.

    started: whether it was. is_superseded: whether another coordinator has the run. outcome: how it
    ended, as soon as that is known. turns: how often the child has turned its loop, as it said
    last; 0 while it begins, and while it ends.
    """

    def __init__(self, run_directory: Path) -> None:
        self.started = self.is_superseded = False
        self.outcome: Outcome | None = None
        self.turns = 0
        self._run = RunDirectory(run_directory)
        self._said: list[dict[str, Any]] = []
        self._line: socket.socket | None = None  # to the child that there is
        self._patience_s = 0.0
        self._pid = 0
        self._epoch = 0  # the number that the child takes
        self._steps_done = 0
        self._killed_in_vain = 0
        self._ended = False

    def start(self) -> None:
        """Once. All that a coordinator needs is imported before it is forked, the run's recipe too:
        the next one, which takes over, is of the same text, also where another was installed, or
        the recipe was edited, meanwhile.

        From now on what this process prints, and nobody reads, is dropped: it is there to start the
        next one. Likewise the file system is asked again for as long as a run goes on without a
        coordinator."""
        # Of OpenBLAS there is one in numpy and one in scipy: each would start a thread per core.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS") or "1")
        importlib.import_module(_CODE)
        drop_unwritable_output()
        config = self._run.config()
        with contextlib.suppress(Exception):  # the coordinator fails for it, too, and says so
            code_of_spec(type(load_recipe(config)))
        self._patience_s = config.deadlines.successor_s
        self.started = True
        self._fork()

    def stop(self, why: str, checkpoint: bool = False) -> None:
        """The run is to stop at its next step boundary; `checkpoint`: with one. Where another
        coordinator has it, this process alone ends: that one may be gone without a word."""
        self._ended |= self.is_superseded
        self._say({"stop": [why, checkpoint]})

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The coordinator's job ends at `deadline_s` (epoch): state to disk, to go on in another
        job."""
        self._say({"end_near": [reason, SystemClock().now_s(), deadline_s]})

    def wait(self, limit_s: float | None = None) -> bool:
        """Whether the coordinator has ended, after at most so many seconds."""
        end_s = None if limit_s is None else time.monotonic() + limit_s
        while not self._ended:
            left_s = None if end_s is None else max(0.0, end_s - time.monotonic())
            if self.is_superseded:
                time.sleep(_LOOK_S if left_s is None else min(_LOOK_S, left_s))
                with contextlib.suppress(LiverError, OSError):  # it is looked for again
                    self.outcome = self._run.last_outcome()
                self._ended = self.outcome is not None
            elif (line := self._line) is not None:
                # No lock: a handler may wait for the end while the code that it interrupted does,
                # too, and hear for both.
                readable, _, _ = select.select([line], [], [], left_s)
                if readable:
                    self._hear(line)
            if left_s == 0.0:
                break
        return self._ended

    def give_up(self) -> None:
        """The time is up, and the job is not queued again: the outcome of a coordinator that has
        not ended says so, and the process ends now."""
        if self.outcome is None:
            self.outcome = Outcome("failed", OUT_OF_TIME, self._steps_done)
            with contextlib.suppress(OSError):  # a full disk must not hold up the end
                self.outcome.write(self._run.path)
                (self._run.path / COORDINATOR_FILE).unlink(missing_ok=True)

    def _say(self, words: dict[str, Any]) -> None:
        self._said.append(words)
        self._tell(words)

    def _tell(self, words: dict[str, Any]) -> None:
        if self._line is not None:
            with contextlib.suppress(OSError):  # it has ended
                self._line.send(json.dumps(words).encode())

    def _hear(self, line: socket.socket) -> None:
        try:
            said = line.recv(_MOST_SAID_BYTES, socket.MSG_DONTWAIT)
        except (BlockingIOError, ConnectionResetError):
            # A handler has heard it; or the child has ended and not heard all, and what it had
            # said itself is heard next.
            return
        if not said:
            if line is self._line:
                self._child_ended()
            return
        words = json.loads(said)
        if "outcome" in words:
            self.outcome = Outcome(**words["outcome"])
        elif line is not self._line:
            return  # a handler has heard its end
        elif "superseded" in words:
            self.is_superseded = True
        else:
            self.turns = words["turns"]
            if words["steps"] > self._steps_done:
                self._steps_done, self._killed_in_vain = words["steps"], 0

    def kill_stuck(self) -> None:
        """The child that does not say any more that its loop turns: another one follows it. One
        that waits for a disk, or for Lustre, which is idle, is left to go on when that does: it
        could not be killed."""
        with _unheard(), contextlib.suppress(psutil.NoSuchProcess):
            if self._line is not None:
                child = psutil.Process(self._pid)
                if child.status() not in (psutil.STATUS_DISK_SLEEP, psutil.STATUS_IDLE):
                    print("the coordinator stands still", file=sys.stderr, flush=True)
                    child.kill()

    @_unheard()
    def take_over(self) -> None:
        """From the coordinator that had taken over, and that is gone."""
        if not self.is_superseded or self._ended:
            return
        if self._line is not None:  # ours does nothing more, but may not have ended
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        self.is_superseded = False
        self._fork()

    @_unheard()
    def _child_ended(self) -> None:
        self._line = None
        _, status = os.waitpid(self._pid, 0)
        if self.is_superseded:
            return
        newest = self._asked(lambda: newest_epoch(self._run.path))
        if newest > self._epoch:
            self.is_superseded = True  # and does not know it yet
            return
        if self.outcome is None and newest == self._epoch:
            # It had begun, so that the file is its own: killed before its word of it was heard.
            self.outcome = self._asked(self._run.last_outcome)
        code = os.waitstatus_to_exitcode(status)
        if self.outcome is None and (code < 0 or code == _NOT_TAKEN_OVER):
            self._killed_in_vain += 1
            killed = f"was killed by signal {-code}"
            how = f"the coordinator {killed if code < 0 else 'could not take over, see its log'}"
            if self._killed_in_vain <= MOST_KILLED_IN_VAIN:
                print(f"{how}: another one takes over", file=sys.stderr, flush=True)
                self._fork()
                return
            print(f"{how}, {self._killed_in_vain} times in vain", file=sys.stderr, flush=True)
        self._ended = True

    @_unheard()
    def _fork(self) -> None:
        # Unheard: what a handler says before there is a line would reach nobody, and it would wait
        # for an answer until the time is up.
        # What a killed one has left would send operators astray while this one boots.
        with contextlib.suppress(OSError):
            (self._run.path / COORDINATOR_FILE).unlink(missing_ok=True)
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        self._epoch = self._asked(lambda: newest_epoch(self._run.path)) + 1
        self._pid = os.fork()
        if self._pid == 0:
            _coordinate(self._run.path, theirs, ours, parent)
        theirs.close()
        self._line, self.turns = ours, 0
        for words in self._said:
            self._tell(words)

    def _asked(self, ask: Callable[[], Found]) -> Found:
        """What the run directory says, once it can be read. Raises OSError where it never can."""
        limit = Deadline.after(SystemClock(), self._patience_s, "the run directory")
        while True:
            try:
                return ask()
            except OSError:
                if limit.expired():
                    raise
            time.sleep(_LOOK_S)


def _coordinate(
    run_directory: Path, line: socket.socket, not_ours: socket.socket, parent: int
) -> NoReturn:
    """The child, which hears from the parent what signals have told that one, and passes on those
    that it gets itself."""
    code = 1
    try:
        for number in _HEARD:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: os.kill(parent, number))
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # a handler may have started this one
        end_with_parent(parent)
        not_ours.close()
        code = _run(run_directory, line)
    except BaseException:
        log.exception("the coordinator failed")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run(run_directory: Path, line: socket.socket) -> int:
    from liver_hpc.coordinator.main import run_coordinator

    control = Control()

    def listen() -> None:
        turns, ended = 0, False
        while True:
            if control.turns != turns:
                turns = control.turns
                line.send(json.dumps({"turns": turns, "steps": control.steps_done}).encode())
            if control.outcome is not None and not ended:
                ended = True  # while its metrics are being written, which takes a while
                line.send(_told(control.outcome))
            if select.select([line], [], [], _LOOK_S)[0]:
                said = line.recv(_MOST_SAID_BYTES)
                if not said:
                    return  # the parent ends, and this process with it
                words = json.loads(said)
                stop = words.get("stop")
                control.say(StopSignalled(*stop) if stop else EndNear(*words["end_near"]))

    quiet_thread(listen, "parent")
    try:
        outcome = run_coordinator(run_directory, control=control)
    except Superseded:
        line.send(b'{"superseded": true}')
    except NotTakenOver:  # what was in its way may be over by then
        threading.Event().wait(_AGAIN_S)
        return _NOT_TAKEN_OVER
    else:
        if outcome is not None:
            line.send(_told(outcome))
    return 0


def _told(outcome: Outcome) -> bytes:
    """One message, whatever the reason."""
    short = replace(outcome, reason=outcome.reason[:_MOST_REASON])
    return json.dumps({"outcome": asdict(short)}).encode()


def checkpoint_in_time(hosted: HostedCoordinator, slurm: SlurmSection, job_id: str) -> None:
    """Tells a coordinator that its job ends, and returns when it has ended for that, or when only
    the time to be queued again is left."""
    clock = SystemClock()
    # Before Slurm is asked for how long: agents that boot are ended by then, and would be missed.
    hosted.end_near(END_REASON, clock.now_s() + slurm.end_window_s)
    left_s = _left_s(slurm, job_id, clock.now_s())
    left_s -= min(_REQUEUE_S, _REQUEUE_SHARE * left_s)
    if hosted.started:
        hosted.wait(left_s)


def requeue(slurm: SlurmSection, job_id: str) -> None:
    """Has the job that this process runs in begin again, which ends it now."""
    SlurmCommands(slurm.command_s, slurm.unreachable_s).requeue(job_id)


def _left_s(slurm: SlurmSection, job_id: str, now_s: float) -> float:
    """Seconds until Slurm ends a job: the window that was asked for, less where squeue says so.

    A job that is preempted has its grace time, whatever the window.
    """
    commands = SlurmCommands(min(_ASK_S, slurm.command_s), unreachable_s=0.0)
    try:
        info = commands.jobs([job_id]).get(job_id)
    except SlurmError:
        info = None
    if info is None or info.ends_s is None:
        return slurm.end_window_s
    return max(0.0, min(slurm.end_window_s, info.ends_s - now_s))
