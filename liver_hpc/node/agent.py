"""The agent of a (virtual) node: starts its workers, meets the coordinator for them, stays.

The workers of a launch (`launch.py`) boot at once and alone; when all have booted the agent has a
short-lived child meet the rendezvous over MPI (`joiner_process`), gives each worker its id and the
coordinator's address. The first time it then opens the control channel of this node: over it goes
what its workers and the coordinator say to each other, too, gathered into few frames. Whatever ends
the agent ends its workers; one worker's end does not touch the others.

With --stay it takes further launches over that channel, until it is told to end, or no coordinator
has talked to it for `deadlines.coordinator_s`; started without slots, it meets at once, for itself.
Without, it ends with the workers of its first launch. The workers of all launches are forked from
one warm process, unless the run file has workers.warm off.

With --warnings, SIGTERM, SIGUSR1 and SIGUSR2 are passed on to the coordinator; before the
channel stands, and without the option, they end the agent.

Where the coordinator went with the node of the job's batch script, one agent has another one begin
on its node; where none comes any more, the job is queued again (`cluster/slurm/orphaned.py`).

Until then, or with --warnings, it ends with its parent. Later a coordinator's end is not its own:
another one may come.

Exit codes: the workers' worst one (128 + n for signal n), 0 when told to end by the coordinator,
128 + n when ended by signal n (which also stands for the end of the parent), EXIT_UNHEALTHY where
`cluster.health_check` fails before anything else is done, and those of `launch.py` and below.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil

from liver_hpc import __version__
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import EXIT_UNHEALTHY, agent_log
from liver_hpc.cluster.slurm.orphaned import begin_coordinator, end_without_script
from liver_hpc.cluster.slurm.together import own_agent
from liver_hpc.config.load import load_run
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Child, Command, kill_at_last
from liver_hpc.host.process import end_of, quiet_thread, raise_soft_limits
from liver_hpc.host.version import version_fault
from liver_hpc.host.warm import WarmProcess
from liver_hpc.layout.coordinates import Layout
from liver_hpc.node.health import Unhealthy, check_health
from liver_hpc.node.launch import EXIT_FAILED, Around, Launch
from liver_hpc.node.workers import (
    WARNINGS,
    WORKER_WORDS,
    BootError,
    WorkerPlan,
    workers_environment,
)
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.channel import ITSELF, ChannelClosed
from liver_hpc.rendezvous.conversation import Line
from liver_hpc.rendezvous.local import Said, Way
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.secret import read_secret

EXIT_COORDINATOR_GONE = 89
"""There is no coordinator any more; workers that lived were ended."""

_WARM_MODULE = "liver_hpc.worker.warm"

GATHER_S = 0.002
"""What workers say waits for so long for what the others say, unless all have said something."""
BEATS = 4
"""So many signs of life in `deadlines.heartbeat_s`."""

Told = list[tuple[int, bytes]]
"""What the coordinator has said: to which worker, or ITSELF; nothing when a connection breaks."""


News = Answer | Told | LiverError | None
"""None: the node has passed its check."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AgentPlan:
    """What an agent is told when it starts.

    first: the launch that it is started for, which has its name. stays: it takes others too.
    parent: the process that has started it, where that is known, as it may have ended since; else
    whose child it is. version: of the coordinator's liver_hpc. stand_in: what is started in a
    worker's place, in tests.
    """

    first: WorkerPlan
    stays: bool
    parent: int | None
    version: str
    stand_in: tuple[str, ...]


class Agent:
    """The agent from start to end; all in the main thread."""

    def __init__(self, plan: AgentPlan) -> None:
        first = plan.first
        self._plan = plan
        self._name = first.launch
        self._warnings = frozenset(WARNINGS) if first.sheltered else frozenset()
        # With warnings SIGTERM announces the node's end, and says nothing of the parent.
        self._orphaned = signal.SIGINT if first.sheltered else signal.SIGTERM
        self._clock = SystemClock()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._woken, selectors.EVENT_READ, self._awake)
        self._heed({signal.SIGTERM, signal.SIGINT, *self._warnings})
        config = load_run(first.run_directory / "run.yaml")
        self._limits = config.deadlines
        self._secret = read_secret(first.run_directory / "secret")
        self._news: queue.SimpleQueue[tuple[str, News]] = queue.SimpleQueue()
        self._around = Around(
            self._name,
            self._limits,
            self._secret,
            self._clock,
            self._selector,
            self._in_thread,
            self._tell_of,
            self._relay,
            self._cold,
        )
        self._health_check = config.cluster.health_check
        self._on_slurm = config.cluster.kind == "slurm"
        self._checking = False
        self._checks: list[Child] = []  # the shell of the health check
        self._launches: dict[str, Launch] = {}
        self._launch_of: dict[int, Launch] = {}  # workers that have an id, and live
        self._asked: list[tuple[int, m.StoreRequest]] = []  # of the store, in this turn
        self._said_since: set[int] = set()  # who has said something that waits for the others
        self._flush_by: Deadline | None = None
        self._beat_by = Deadline.after(self._clock, self._limits.heartbeat_s / BEATS, "a beat")
        self._code = 0  # the worst of the launches that have ended
        self._warms = config.workers.warm and not plan.stand_in
        self._warm: WarmProcess | None = None
        self._line = self._new_line()
        self._talks = False  # once it has met

    def run(self) -> int:
        """The agent's exit code, or SystemExit with it where the agent is told to stop."""
        try:
            self._watch_parent()
            if self._health_check is None:
                self._begin(self._plan.first)
            else:
                self._checking = True
                log_path = self._plan.first.run_directory / "logs" / f"health-{self._name}.log"
                told = (self._health_check, log_path, self._limits.health_s)
                self._in_thread("", "health", partial(check_health, *told, self._checks.append))
            while self._goes_on():
                self._turn()
            return self._code
        finally:
            self._end_all()

    def _goes_on(self) -> bool:
        """Does what follows from what has happened; whether there is more to wait for."""
        for name, launch in list(self._launches.items()):
            self._look_at(name, launch)
        stays = self._plan.stays and self._talks
        return stays or self._checking or bool(self._launches)

    def _end_all(self) -> None:
        for check in self._checks:
            kill_at_last(check)
        for launch in self._launches.values():
            launch.stop(0)
        for launch in self._launches.values():
            launch.end(self._limits.exit_s)
        if self._warm is not None:
            kill_at_last(self._warm)
        self._line.close()

    def _heed(self, signals: set[signal.Signals]) -> None:
        """From now on each of them writes its number to what the selector looks at."""
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        for signum in signals:
            signal.signal(signum, lambda *_: None)
        # Whoever started us may have had them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)

    def _watch_parent(self) -> None:
        """Has the parent's end taken for a signal."""
        parent = self._plan.parent or os.getppid()
        with contextlib.suppress(OSError):  # it has ended, or is outside of our PID namespace
            end = end_of(parent)
            self._selector.register(end, selectors.EVENT_READ, partial(self._parent_ended, end))
        if os.getppid() != parent:
            self._signalled(self._orphaned)

    def _parent_ended(self, end: int) -> None:
        self._selector.unregister(end)
        os.close(end)
        if not self._talks or self._warnings:
            self._signalled(self._orphaned)
        else:
            log.info("the coordinator that has started this agent has ended")

    def _turn(self) -> None:
        """Waits for the next events and deals with them. Raises SystemExit."""
        limits = [launch.remaining_s() for launch in self._launches.values()]
        for deadline in (self._flush_by, self._beat_by if self._talks else None):
            limits.append(None if deadline is None else deadline.remaining_s())
        ready = self._selector.select(min((s for s in limits if s is not None), default=None))
        self._awake()  # a signal says more than the ends that it may have led to
        for key, _ in ready:
            if self._selector.get_map().get(key.fd) == key:  # else what came before has ended it
                try:
                    key.data()
                except BootError as error:
                    self._launches[error.launch].fail(error)
        self._flush_what_is_due()

    def _in_thread(self, launch: str, name: str, work: Callable[[], Answer | None]) -> None:
        """Does it in a thread: signals and workers' ends are not to wait. Its result is news of a
        launch, or of none."""

        def run() -> None:
            news: News = LiverError(f"{name}: the thread has failed")
            try:
                news = work()
            except LiverError as error:
                news = error
            finally:
                self._tell_loop(launch, news)

        quiet_thread(run, name)

    def _tell_loop(self, launch: str, news: News) -> None:
        """From another thread."""
        self._news.put((launch, news))
        with contextlib.suppress(BlockingIOError):  # a full pipe wakes, too
            os.write(self._waker, b"\0")  # like a signal's number, which it is not

    # ---- launches

    def _begin(self, plan: WorkerPlan) -> None:
        workers, cpus = len(plan.slots), len(os.sched_getaffinity(0))
        if self._on_slurm and cpus < workers:
            log.warning("%d workers share %d CPUs: cpus_per_node asks for more", workers, cpus)
        launch = self._launches[plan.launch] = Launch(plan, self._around)
        if self._warms and self._warm is None:
            self._start_warm()
        if self._warm is None or self._warm.ready or not plan.slots:
            self._start(launch)

    def _start(self, launch: Launch) -> None:
        try:
            launch.start(self._warm)
        except LiverError as error:
            launch.fail(error)

    def _look_at(self, name: str, launch: Launch) -> None:
        try:
            code = launch.look()
        except LiverError as error:
            launch.fail(error)
            if self._warm is not None and not self._warm.ready:
                self._cold("it has not imported in time")
                self._start_waiting()
            return
        if code is None:
            return
        launch_ended = self._launches.pop(name)
        for worker in [w for w, its in self._launch_of.items() if its is launch_ended]:
            self._forget(worker)
        self._code = max(self._code, code)
        if self._plan.stays:
            log.info("launch %s ended with exit code %d", name, code)
            ended = m.LaunchEnded(agent=self._name, launch=name, exit_code=code, error=launch.error)
            self._tell_of(ended)

    def _start_warm(self) -> None:
        first = self._plan.first
        words = [sys.executable, "-P", "-m", _WARM_MODULE]
        command = Command(
            "the warm process",
            [*words, *first.command[WORKER_WORDS:]],
            environment=workers_environment(),
            ignored=WARNINGS if first.sheltered else (),
        )
        try:
            warm = self._warm = WarmProcess(command)
        except LiverError as error:
            self._cold(str(error))
        else:
            self._selector.register(warm.line, selectors.EVENT_READ, partial(self._hear_warm, warm))

    def _hear_warm(self, warm: WarmProcess) -> None:
        was_ready, why = warm.ready, warm.hear()
        if why:
            self._cold(why)
        else:
            with contextlib.suppress(psutil.Error):  # it may have ended since
                process = psutil.Process(warm.pid)
                used, resident = process.cpu_times(), process.memory_info().rss
                cpu_s = used.user + used.system
                log.info(
                    "the warm process has imported: %.1f CPU s, %d MB", cpu_s, resident // 2**20
                )
        if not was_ready:
            self._start_waiting()

    def _start_waiting(self) -> None:
        """Those that waited for the warm process."""
        for launch in self._launches.values():
            if launch.waits_to_start:
                self._start(launch)

    def _cold(self, why: str) -> None:
        """There is no warm process, or it is of no use."""
        log.warning("no warm process, workers are executed: %s", why)
        warm, self._warm, self._warms = self._warm, None, False
        if warm is not None:
            warm.ready = False
            self._selector.unregister(warm.line)
            kill_at_last(warm)

    # ---- what happens meanwhile

    def _stop(self, why: str, code: int) -> NoReturn:
        living = [w for launch in self._launches.values() for w in launch.workers.living()]
        log.info("%s: ending %s", why, ", ".join(living) or "no worker")
        sys.exit(code)

    def _awake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # there is nothing
            for signum in filter(None, os.read(self._woken, 4096)):
                self._signalled(signum)
        while not self._news.empty():
            self._hear_of(*self._news.get())

    def _hear_of(self, launch: str, news: News) -> None:
        if isinstance(news, list):
            self._pass_on(news)
        elif news is None:
            log.info("the node is well")
            self._checking = False
            self._begin(self._plan.first)
        elif isinstance(news, Unhealthy):
            log.error("%s", news)
            sys.exit(EXIT_UNHEALTHY)
        elif launch in self._launches:
            self._met(self._launches[launch], news)
        elif isinstance(news, LiverError) and not launch:
            self._stop(f"the coordinator is gone: {news}", EXIT_COORDINATOR_GONE)

    def _met(self, launch: Launch, news: Answer | LiverError) -> None:
        if isinstance(news, Answer):
            for worker in news.worker_ids:
                self._line.add(worker)
                self._launch_of[worker] = launch
            if not self._talks:
                self._talks = True
                address = (news.control_host, news.control_port)
                quiet_thread(partial(self._listen, address), "talk")
        try:
            launch.met(news)
        except LiverError as error:
            launch.fail(error)

    def _new_line(self) -> Line:
        """What is said waits until the line stands."""
        run = RunDirectory(self._plan.first.run_directory)
        line = Line(run, self._secret, self._call, self._clock, self._limits)
        line.missed = self._coordinator_missed
        line.send(m.AgentHello(agent=self._name, host=socket.gethostname(), pid=os.getpid()))
        return line

    def _listen(self, address: tuple[str, int]) -> None:
        """In a thread of its own, until there is no coordinator any more."""
        line = self._line
        try:
            line.open(address)
            log.info("connected to the coordinator")
            self._tell_loop("", line.receive())
            while not line.is_told_to_go:
                self._tell_loop("", line.receive())
        except LiverError as error:
            self._tell_loop("", error)
        except Exception as error:  # else nobody would call a coordinator again
            log.exception("the connection to the coordinator")
            self._tell_loop("", ChannelClosed(f"{type(error).__name__}: {error}"))

    def _coordinator_missed(self, times: int) -> None:
        """In the thread that has called it for a while."""
        try:
            if begin_coordinator(self._plan.first.run_directory, times):
                log.warning("the coordinator is gone: another one begins on this node")
        except (LiverError, OSError) as error:
            log.error("no other coordinator can begin here: %s", error)

    def _call(self) -> m.Calls:
        return m.Calls(agent=self._name, version=__version__, launches=tuple(self._launches))

    # ---- between the workers and the coordinator

    def _relay(self, worker: int, said: Said) -> None:
        """To the coordinator, with the next frame."""
        match said.way:
            case Way.ONCE:
                self._line.say(said.data, worker)
                self._said_since.add(worker)
                if self._flush_by is None:
                    self._flush_by = Deadline.after(self._clock, GATHER_S, "the other workers")
            case Way.ASK:
                request = m.decode(said.data)
                assert isinstance(request, m.StoreRequest)
                self._asked.append((worker, request))
                self._flush_by = Deadline.after(self._clock, 0.0, "nothing")
            case Way.LATER:
                self._line.tell(said.data, worker)

    def _flush_what_is_due(self) -> None:
        if self._asked:
            asked, self._asked = self._asked, []
            if not self._line.tell(m.encode(m.StoreAsks.of(asked)), ITSELF):
                for worker, request in asked:
                    self._answer(worker, m.StoreReply(number=request.number, error=m.NO_STORE))
        if self._beat_by.expired():
            self._beat_by = Deadline.after(self._clock, self._limits.heartbeat_s / BEATS, "a beat")
            self._line.tell(b"", ITSELF)  # a sign of life
        elif self._flush_by is None or (
            not self._flush_by.expired() and len(self._said_since) < len(self._launch_of)
        ):
            return
        self._line.flush()
        self._flush_by = None
        self._said_since.clear()

    def _pass_on(self, told: Told) -> None:
        """What the coordinator has said."""
        for worker, data in told:
            if worker == ITSELF:
                self._told(m.decode(data))
            elif worker in self._launch_of:
                self._launch_of[worker].workers.pass_on(worker, data)
        if not told:
            for launch in {*self._launch_of.values()}:
                launch.workers.pass_on(ITSELF, b"")

    def _signalled(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if signum not in self._warnings or not self._line.was_open:
            self._stop(f"stopped by {name}", 128 + signum)
        log.info("warned by %s", name)
        at_s = self._clock.now_s()
        self._line.send(m.Warned(agent=self._name, signal=name.removeprefix("SIG"), at_s=at_s))

    def _answer(self, worker: int, reply: m.StoreReply) -> None:
        """Of the store, to a worker that may have ended."""
        if worker in self._launch_of:
            self._launch_of[worker].workers.pass_on(worker, m.encode(reply))

    def _told(self, message: m.AnyMessage) -> None:
        """By the coordinator."""
        match message:
            case m.StoreAnswers():
                for worker, reply in message.replies():
                    self._answer(worker, reply)
            case m.Exit():
                self._stop(f"told to end: {message.reason}", 0)
            case m.StartWorkers() if self._plan.stays and message.launch not in self._launches:
                log.info("launch %s: slots %s", message.launch, list(message.slots))
                self._begin(self._plan_of(message))
            case m.EndWorkers():
                if message.launch in self._launches:
                    log.info("told to end launch %s: %s", message.launch, message.reason)
                    self._launches[message.launch].stop(0, message.at_once)
            case m.EndWorker():
                if message.worker in self._launch_of:
                    log.warning("told to kill worker %d: %s", message.worker, message.reason)
                    self._launch_of[message.worker].workers.kill(message.worker)
            case _:
                log.warning("the coordinator: unexpected %s", message.type)

    def _plan_of(self, order: m.StartWorkers) -> WorkerPlan:
        first = self._plan.first
        command = self._plan.stand_in or _worker_command(first.run_directory, order.layout)
        return replace(first, launch=order.launch, slots=order.slots, command=command)

    def _tell_of(self, ended: m.WorkerEnded | m.LaunchEnded) -> None:
        self._line.send(ended)
        if isinstance(ended, m.WorkerEnded):
            self._forget(ended.worker)

    def _forget(self, worker: int) -> None:
        self._line.forget(worker)
        self._said_since.discard(worker)
        del self._launch_of[worker]


def parse_options(arguments: list[str] | None = None) -> AgentPlan:
    """Reads the command line; exits with a usage message when it is wrong. Raises LiverError where
    this node has no agent."""
    parser = argparse.ArgumentParser(prog="liver_hpc.node.agent", description=__doc__)
    parser.add_argument("--version", required=True, help="the coordinator's liver_hpc")
    parser.add_argument("--run-directory", type=Path, required=True)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--agent", help="this agent's name, used once in a run")
    who.add_argument("--together", type=Path, help="a file that says it, and its slots, by nodes")
    parser.add_argument("--layout", required=True, help="what they rehearse, as tp2 pp1 dp2")
    parser.add_argument(
        "--slots", type=_slots, default=(), help="the node's places, one for each worker, as 2,3"
    )
    parser.add_argument(
        "--warnings", action="store_true", help="TERM, USR1 and USR2 announce the end of the node"
    )
    parser.add_argument(
        "--stay", action="store_true", help="takes further launches, until it is told to end"
    )
    parser.add_argument("--parent", type=int, help="the process that has started this one")
    parser.add_argument("--worker-command", type=json.loads, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    directory, stand_in = given.run_directory.absolute(), tuple(given.worker_command or ())
    command = stand_in or _worker_command(directory, given.layout)
    agent, slots = given.agent, given.slots
    if given.together is not None:
        agent, slots = own_agent(given.together, os.environ)
    first = WorkerPlan(directory, agent, slots, command, given.warnings)
    return AgentPlan(first, given.stay, given.parent, given.version, stand_in)


def _worker_command(run_directory: Path, layout: str) -> tuple[str, ...]:
    module = (sys.executable, "-P", "-m", "liver_hpc.worker.main")
    told = ("--run-directory", str(run_directory), "--layout", str(Layout.parse(layout)))
    return (*module, *told)


def _slots(text: str) -> tuple[int, ...]:
    return tuple(map(int, filter(None, text.split(","))))


def _log_to(run_directory: Path, agent: str) -> None:
    """Sends everything that this process prints to logs/agent-NAME.log, its launcher's too."""
    path = agent_log(run_directory, agent)
    path.parent.mkdir(exist_ok=True)
    with path.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s %(levelname)s [agent {agent}] %(message)s",
    )


def _see_to_job(run_directory: Path) -> None:
    """Where the coordinator went with the node of the job's batch script. A signal ends it."""
    for signum in (signal.SIGINT, *WARNINGS):
        signal.signal(signum, signal.SIG_DFL)
    try:
        end_without_script(run_directory)
    except (LiverError, OSError) as error:
        log.error("whether the job has lost its batch script cannot be seen to: %s", error)


def main() -> NoReturn:
    """Runs the agent and exits with its code."""
    plan = parse_options()
    raise_soft_limits()  # its workers', too
    _log_to(plan.first.run_directory, plan.first.launch)
    if fault := version_fault(plan.version, "its coordinator"):
        # Before the run file is read, whose keys may be others.
        log.error("%s", fault)
        sys.exit(EXIT_FAILED)
    try:
        code = Agent(plan).run()
    except SystemExit as told:
        code = int(told.code or 0)
    except Exception:
        log.exception("the agent failed")
        code = EXIT_FAILED
    if code == EXIT_COORDINATOR_GONE:
        _see_to_job(plan.first.run_directory)
    sys.exit(code)


if __name__ == "__main__":
    main()
