"""The agent of a (virtual) node: starts its workers, meets the coordinator for them, stays.

The workers of `python -m liver_hpc.node.agent` boot at once and alone; when all have booted the
agent has a short-lived child meet the rendezvous over MPI (`joiner_process`), gives each worker
its id and the coordinator's address, and opens a control channel of its own. From then on it
waits for its workers, and ends them when the coordinator says so or is gone. Whatever ends the
agent ends its workers; one worker's end does not touch the others.

With --warnings, SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the coordinator; before the
channel stands, and without the option, they end the agent.

Exit codes: the workers' worst one (128 + n for signal n), 0 when told to end by the coordinator,
128 + n when ended by signal n (which also stands for the end of the parent), and those named below.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import queue
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import agent_log
from liver_hpc.config.load import load_run
from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.host.process import quiet_thread
from liver_hpc.layout.coordinates import Layout
from liver_hpc.node.workers import WARNINGS, BootError, NodeWorkers, WorkerPlan
from liver_hpc.protocol.messages import AgentHello, Exit, FromAgent, Warned, WorkerEnded
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.rendezvous.mpi.joiner import RendezvousLost, StuckInMpi, joiner_process, meet
from liver_hpc.rendezvous.mpi.process import MpiProcess
from liver_hpc.run.secret import read_secret

EXIT_FAILED = 1
"""The agent itself failed; its log says how."""
EXIT_BOOT = 87
"""A worker died in its boot, or did not finish it in time."""
EXIT_COORDINATOR_GONE = 89
"""The coordinator is gone, and workers had to be ended."""

EXIT_STUCK = 81
"""A call of MPI's did not come back by the deadline."""
EXIT_RENDEZVOUS_LOST = 82
"""The rendezvous ended in the middle of the meeting."""
EXIT_NOT_MET = 88
"""The rendezvous refused the agent, or did not answer in time."""

_CODES = {BootError: EXIT_BOOT, StuckInMpi: EXIT_STUCK, RendezvousLost: EXIT_RENDEZVOUS_LOST}

News = Answer | Channel | LiverError

log = logging.getLogger(__name__)


class Agent:
    """The agent from start to end, in the order of its methods; all in the main thread."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._warnings = frozenset(WARNINGS) if plan.sheltered else frozenset()
        # With warnings SIGTERM announces the node's end, and says nothing of the parent.
        self._orphaned = signal.SIGINT if plan.sheltered else signal.SIGTERM
        self._clock = SystemClock()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self._heed({signal.SIGTERM, signal.SIGINT, *self._warnings})
        self._limits = load_run(plan.run_directory / "run.yaml").deadlines
        self._secret = read_secret(plan.run_directory / "secret")
        self._held = contextlib.ExitStack()
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._met = False
        self._channel: Channel | None = None  # as long as it stands
        self._early: list[WorkerEnded] = []
        self._alone: Deadline | None = None  # once the coordinator is gone
        self._workers = NodeWorkers(self._plan, self._selector, self._worker_ended)

    def run(self) -> int:
        """The agent's exit code, or SystemExit with it where the agent is told to stop.

        Raises LiverError when its workers never got to work.
        """
        self._workers.start()
        try:
            self._watch_parent()
            self._await_boot(self._limits.boot_s)
            joiner = joiner_process()
            self._held.callback(joiner.end, 0.0)
            self._start("meet", partial(self._meet, joiner))
            return self._supervise()
        finally:
            self._workers.end(self._limits.exit_s)
            self._held.close()

    def _heed(self, signals: set[signal.Signals]) -> None:
        """From now on each of them writes its number to what the selector looks at."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        # Whoever started us may have had them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _watch_parent(self) -> None:
        """Has the parent's end taken for a signal."""
        parent = os.getppid()
        with contextlib.suppress(OSError):  # it has ended, or is outside of our PID namespace
            end = os.pidfd_open(parent)
            orphaned = partial(self._signalled, self._orphaned)
            self._selector.register(end, selectors.EVENT_READ, orphaned)
        if os.getppid() != parent:
            self._signalled(self._orphaned)

    def _turn(self, timeout_s: float | None) -> None:
        """Waits for the next events and deals with them. Raises SystemExit, BootError."""
        ready = self._selector.select(timeout_s)
        self._awake()  # a signal says more than the ends that it may have led to
        for key, _ in ready:
            key.data()

    def _await_boot(self, boot_s: float) -> None:
        deadline = Deadline.after(self._clock, boot_s, "workers to boot")
        while late := self._workers.booting():
            if deadline.expired():
                raise BootError(
                    f"waited {boot_s:g} s for workers {late} of agent {self._plan.agent} to boot; "
                    f"see {self._plan.log_of(late[0])}"
                )
            self._turn(deadline.remaining_s())
        log.info("all %d workers have booted", len(self._plan.slots))

    def _start(self, name: str, work: Callable[[], Answer | Channel]) -> None:
        """Does it in a thread: signals and workers' ends are not to wait. Its result is news."""

        def run() -> None:
            news: News = LiverError(f"{name}: the thread has failed")
            try:
                news = work()
            except LiverError as error:
                news = error
            finally:
                self._news.put(news)
                os.write(self._waker, b"\0")  # wakes like a signal's number, which it is not

        quiet_thread(run, name)

    def _meet(self, joiner: MpiProcess) -> Answer:
        plan = self._plan
        identity = Identity(
            agent=plan.agent, host=socket.gethostname(), pid=os.getpid(), workers=len(plan.slots)
        )
        return meet(joiner, plan.run_directory, identity, self._secret, self._limits.meet_s)

    def _supervise(self) -> int:
        """Until every worker has ended, by itself or because the coordinator wants it or is gone.

        Each worker notices by itself that the coordinator is gone, and is given time to end.
        """
        while self._workers.living():
            alone = self._alone
            if alone is not None and alone.expired():
                log.warning("workers %s go on without a coordinator", self._workers.living())
                return EXIT_COORDINATOR_GONE
            self._turn(None if alone is None else alone.remaining_s())
        self._turn(0.0)  # their ends, where they were not the events that woke us
        return self._workers.worst()

    # ---- what happens meanwhile

    def _stop(self, why: str, code: int) -> NoReturn:
        log.info("%s: ending workers %s", why, self._workers.living())
        sys.exit(code)

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there is nothing
            for signum in filter(None, os.read(self._woken, 4096)):
                self._signalled(signum)
        while not self._news.empty():
            self._hear_of(self._news.get())

    def _hear_of(self, news: News) -> None:
        match news:
            case Answer():
                log.info("met the rendezvous: workers %s", list(news.worker_ids))
                self._met = True
                self._workers.hand_out(news)
                address, limit_s = (news.control_host, news.control_port), self._limits.control_s
                waits_for = "the coordinator's control channel"
                self._start("dial", partial(connect, address, self._secret, limit_s, waits_for))
            case Channel():
                self._connected(news)
            case error if self._met:
                self._coordinator_gone(error)
            case error:
                raise error

    def _signalled(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if signum not in self._warnings or self._channel is None:
            self._stop(f"stopped by {name}", 128 + signum)
        log.info("warned by %s", name)
        at_s = self._clock.now_s()
        self._send(Warned(agent=self._plan.agent, signal=name.removeprefix("SIG"), at_s=at_s))

    def _connected(self, channel: Channel) -> None:
        self._channel = channel
        self._held.callback(channel.close)
        self._selector.register(channel, selectors.EVENT_READ, partial(self._hear, channel))
        hello = AgentHello(
            agent=self._plan.agent,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            step=os.environ.get("SLURM_STEP_ID", ""),
        )
        self._send(hello)
        for early in self._early:
            self._send(early)
        log.info("the channel stands")

    def _hear(self, channel: Channel) -> None:
        try:
            message = channel.receive()
        except ChannelClosed as error:
            self._coordinator_gone(error)
            return
        if isinstance(message, Exit):
            self._stop(f"told to end: {message.reason}", 0)
        log.warning("%s: unexpected %s", channel.peer, message.type)

    def _worker_ended(self, worker: int, how: str) -> None:
        ended = WorkerEnded(agent=self._plan.agent, worker=worker, how=how)
        if self._channel is None:
            self._early.append(ended)
        else:
            self._send(ended)

    def _send(self, message: FromAgent) -> None:
        if self._channel is not None:
            try:
                self._channel.send(message)
            except ChannelClosed as error:
                self._coordinator_gone(error)

    def _coordinator_gone(self, error: LiverError) -> None:
        log.info("the coordinator is gone: %s", error)
        if self._channel is not None:
            self._selector.unregister(self._channel)
            self._channel = None
        self._alone = Deadline.after(self._clock, self._limits.exit_s, "workers to end")


def parse_options(arguments: list[str] | None = None) -> WorkerPlan:
    """Reads the command line; exits with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(prog="liver_hpc.node.agent", description=__doc__)
    parser.add_argument("--run-directory", type=Path, required=True)
    parser.add_argument("--agent", required=True, help="this agent's name, used once in a run")
    parser.add_argument("--layout", required=True, help="what they rehearse, as tp2 pp1 dp2")
    parser.add_argument(
        "--slots", type=_slots, required=True, help="the node's places, one for each worker, as 2,3"
    )
    parser.add_argument(
        "--warnings", action="store_true", help="TERM, USR1 and USR2 announce the end of the node"
    )
    parser.add_argument("--worker-command", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    directory, layout = given.run_directory.absolute(), str(Layout.parse(given.layout))
    module = [sys.executable, "-P", "-m", "liver_hpc.worker.main"]
    worker = [*module, "--run-directory", str(directory), "--layout", layout]
    command = tuple(given.worker_command or worker)  # another one stands in for it in tests
    return WorkerPlan(directory, given.agent, given.slots, command, given.warnings)


def _slots(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _log_to(plan: WorkerPlan) -> None:
    """Sends everything that this process prints to logs/agent-NAME.log, its launcher's too."""
    path = agent_log(plan.run_directory, plan.agent)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [agent {plan.agent}] %(message)s",
    )


def main() -> NoReturn:
    """Runs the agent and exits with its code."""
    plan = parse_options()
    _log_to(plan)
    try:
        code = Agent(plan).run()
    except (BootError, MeetingError) as error:
        log.error("%s", error)
        code = _CODES.get(type(error), EXIT_NOT_MET)
    except Exception:
        log.exception("the agent failed")
        code = EXIT_FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
