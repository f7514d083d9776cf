"""The agent of a (virtual) node: starts its workers, meets the coordinator for them, stays.

The workers of `python -m liver_hpc.node.agent` boot at once and alone; when all have booted the
agent has a short-lived child meet the rendezvous over MPI (`joiner_process`), gives each worker
its id and the coordinator's address, and opens a control channel of its own. From then on it
waits for its workers, and ends them when the coordinator says so or is gone. Whatever ends the
agent ends its workers; one worker's end does not touch the others.

With --warnings, SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the coordinator; before the
channel stands, and without the option, they end the agent.

Exit codes: the workers' worst one (128 + n for signal n), 0 when told to end by the coordinator,
128 + n when ended by signal n (which also stands for the end of the parent), those named below,
and those of `rendezvous.joiner`.
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
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from liver_hpc.clock import Clock, Deadline, SystemClock
from liver_hpc.cluster.launcher import agent_log
from liver_hpc.config.load import load_run
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.lifeline import on_parent_exit, quiet_thread
from liver_hpc.layout.coordinates import Layout
from liver_hpc.node.workers import WARNINGS, BootError, NodeWorkers, WorkerPlan
from liver_hpc.protocol.messages import AgentHello, Exit, Warned, WorkerEnded
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.rendezvous.mpi.joiner_process import JoinerProcess, NotMet
from liver_hpc.run.secret import read_secret

EXIT_FAILED = 1
"""The agent itself failed; its log says how."""
EXIT_BOOT = 87
"""A worker died in its boot, or did not finish it in time."""
EXIT_COORDINATOR_GONE = 89
"""The coordinator is gone, and workers had to be ended."""

# How much longer than its own deadline a joiner gets to end by itself and say why.
_MEET_MARGIN_S = 3.0

log = logging.getLogger(__name__)


class Stopped(LiverError):
    """The agent was told to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class Wake:
    """What the agent's loop selects on: signals of this process, and `wake` from any thread. To be
    made in the main thread."""

    def __init__(self, signals: set[signal.Signals], clock: Clock) -> None:
        self._clock = clock
        self._arrived: list[tuple[int, float]] = []
        self._reader, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for signum in signals:
            signal.signal(signum, self._note)
        # Whoever started us may have had them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def fileno(self) -> int:
        return self._reader

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes, too
            os.write(self._writer, b"\0")

    def drain(self) -> None:
        """Until the next one there is nothing to select."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._reader, 4096):
                pass

    def take(self) -> list[tuple[int, float]]:
        """The signals that have come since the last call: numbers, and epoch seconds."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived.append((signum, self._clock.now_s()))


@dataclass(frozen=True)
class CoordinatorGone:
    """The channel has ended, or never came to be; nothing follows."""

    reason: str


News = Exit | CoordinatorGone


class AgentChannel:
    """The agent's own control channel, which opens with `hello`; `wake` is called when there is
    `news`.

    Its thread connects and listens. It takes no signals, so that they all come to the main thread.
    """

    def __init__(
        self, dial: Callable[[], Channel], hello: AgentHello, wake: Callable[[], None]
    ) -> None:
        self._dial = dial
        self._hello = hello
        self._wake = wake
        self._lock = threading.Lock()
        self._channel: Channel | None = None  # once it stands
        self._early: list[Warned | WorkerEnded] = []
        self._news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self._closed = False
        self._thread = quiet_thread(self._serve, "control")

    @property
    def stands(self) -> bool:
        """Whether the coordinator hears what is sent."""
        return self._channel is not None

    def news(self) -> Iterator[News]:
        """All that has come since the last call; does not block."""
        while not self._news.empty():
            yield self._news.get()

    def send(self, message: Warned | WorkerEnded) -> None:
        """Sends as soon as the channel stands; an end of it shows in the news."""
        with self._lock:
            channel = self._channel
            if channel is None:
                self._early.append(message)
                return
        try:
            channel.send(message)
        except ChannelClosed as error:
            log.warning("the coordinator did not get %s: %s", message.type, error)

    def close(self, limit_s: float) -> None:
        """Ends the channel; what was sent before still arrives."""
        with self._lock:
            self._closed = True
            channel = self._channel
        if channel is not None:
            channel.close()
            self._thread.join(limit_s)

    def _serve(self) -> None:
        reason = "its thread has failed"
        try:
            self._listen(self._dial())
        except (ChannelClosed, DeadlineError) as error:
            reason = str(error)
        finally:
            self._channel = None
            self._tell(CoordinatorGone(reason))

    def _listen(self, channel: Channel) -> None:
        channel.send(self._hello)
        with self._lock:
            if self._closed:
                channel.close()
            for early in self._early:
                channel.send(early)
            self._channel = channel
        log.info("the channel stands")
        while True:
            message = channel.receive()
            if isinstance(message, Exit):
                self._tell(message)
            else:
                log.warning("%s: unexpected %s", channel.peer, message.type)

    def _tell(self, news: News) -> None:
        self._news.put(news)
        self._wake()


class Agent:
    """The agent from start to end, in the order of its methods; all in the main thread."""

    def __init__(self, plan: WorkerPlan) -> None:
        self._plan = plan
        self._warnings = frozenset(WARNINGS) if plan.sheltered else frozenset()
        self._clock = SystemClock()
        # With warnings SIGTERM announces the node's end, and says nothing of the parent.
        self._orphaned = signal.SIGINT if plan.sheltered else signal.SIGTERM
        self._wake = Wake({signal.SIGTERM, signal.SIGINT, *self._warnings}, self._clock)
        self._channel: AgentChannel | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake, selectors.EVENT_READ, self._wake.drain)
        self._workers = NodeWorkers(self._plan, self._selector, self._worker_ended)

    def run(self) -> int:
        """The agent's exit code. Raises LiverError when its workers never got to work."""
        self._workers.start()
        on_parent_exit(lambda: os.kill(os.getpid(), self._orphaned))
        deadlines = load_run(self._plan.run_directory / "run.yaml").deadlines
        try:
            self._await_boot(deadlines.boot_s)
            answer = self._meet(deadlines.meet_s)
            self._workers.hand_out(answer)
            channel = self._open_channel(answer, deadlines.control_s)
            return self._supervise(channel, deadlines.exit_s)
        except Stopped as stop:
            log.info("%s: ending workers %s", stop, self._workers.living())
            return 128 + stop.signum
        finally:
            self._workers.end(deadlines.exit_s)
            if self._channel is not None:
                self._channel.close(deadlines.control_s)

    def _turn(self, timeout_s: float | None) -> None:
        """Waits for the next events and deals with them. Raises Stopped and BootError."""
        ready = self._selector.select(timeout_s)
        for signum, at_s in self._wake.take():
            self._signalled(signum, at_s)
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

    def _meet(self, meet_s: float) -> Answer:
        identity = Identity(
            agent=self._plan.agent,
            host=socket.gethostname(),
            pid=os.getpid(),
            workers=len(self._plan.slots),
        )
        limit_s = meet_s + _MEET_MARGIN_S
        deadline = Deadline.after(self._clock, limit_s, "the joiner to end")
        joiner = JoinerProcess(self._plan.run_directory, identity, meet_s)
        self._selector.register(joiner.end, selectors.EVENT_READ, lambda: None)
        try:
            while (answer := joiner.answer()) is None:
                if deadline.expired():
                    raise NotMet(f"waited {limit_s:g} s for the joiner to end")
                self._turn(deadline.remaining_s())
        finally:
            self._selector.unregister(joiner.end)
            joiner.close()
        log.info("met the rendezvous: workers %s", list(answer.worker_ids))
        return answer

    def _open_channel(self, answer: Answer, control_s: float) -> AgentChannel:
        hello = AgentHello(
            agent=self._plan.agent,
            host=socket.gethostname(),
            pid=os.getpid(),
            job=os.environ.get("SLURM_JOB_ID", ""),
            step=os.environ.get("SLURM_STEP_ID", ""),
        )
        address = (answer.control_host, answer.control_port)
        secret = read_secret(self._plan.run_directory / "secret")
        self._channel = AgentChannel(
            lambda: connect(address, secret, control_s, "the coordinator's control channel"),
            hello,
            self._wake.wake,
        )
        return self._channel

    def _supervise(self, channel: AgentChannel, exit_s: float) -> int:
        """Until every worker has ended, by itself or because the coordinator wants it or is gone.

        Each worker notices by itself that the coordinator is gone, and is given time to end.
        """
        alone: Deadline | None = None
        while self._workers.living():
            if alone is not None and alone.expired():
                log.warning("workers %s go on without a coordinator", self._workers.living())
                return EXIT_COORDINATOR_GONE
            self._turn(None if alone is None else alone.remaining_s())
            for news in channel.news():
                if isinstance(news, Exit):
                    living = self._workers.living()
                    log.info("told to end: %s: workers %s", news.reason, living)
                    return 0
                log.info("the coordinator is gone: %s", news.reason)
                alone = Deadline.after(self._clock, exit_s, "workers to end")
        self._turn(0.0)  # their ends, where they were not the events that woke us
        return self._workers.worst()

    # ---- what happens meanwhile

    def _signalled(self, signum: int, at_s: float) -> None:
        channel = self._channel
        if signum not in self._warnings or channel is None or not channel.stands:
            raise Stopped(signum)
        name = signal.Signals(signum).name
        log.info("warned by %s", name)
        warned = Warned(agent=self._plan.agent, signal=name.removeprefix("SIG"), at_s=at_s)
        channel.send(warned)

    def _worker_ended(self, worker: int, how: str) -> None:
        if self._channel is not None:
            self._channel.send(WorkerEnded(agent=self._plan.agent, worker=worker, how=how))


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
    return WorkerPlan(
        run_directory=given.run_directory.absolute(),
        agent=given.agent,
        slots=given.slots,
        layout=str(Layout.parse(given.layout)),
        command=tuple(given.worker_command or ()),
        sheltered=given.warnings,
    )


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
    except BootError as error:
        log.error("%s", error)
        code = EXIT_BOOT
    except NotMet as error:
        log.error("%s", error)
        code = error.code
    except Exception:
        log.exception("the agent failed")
        code = EXIT_FAILED
    sys.exit(code)


if __name__ == "__main__":
    main()
