"""How agents come to run: the launcher, and its kind for this machine.

The tree of one agent is the agent, its workers and, while it meets the rendezvous, its joiner.
Whichever of them is killed, what is below it follows; and once the agent has ended the launcher
kills whatever is left. An agent outlives the coordinator that launched it for a while, in which
another one may adopt it.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

import psutil

from liver_hpc import __version__
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import (
    Child,
    Command,
    Foreign,
    is_left,
    kill_at_last,
    kill_left,
    mark_of,
)
from liver_hpc.host.process import start_thread
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat

KILLED = 137
"""Exit code of an agent that was killed (128 + SIGKILL, as shells count)."""

EXIT_UNHEALTHY = 90
"""Exit code of an agent whose node has failed `cluster.health_check`; its last error says how."""

EXIT_BOOT = 87
"""Exit code of an agent, or of a launch, of which a worker has died in its boot or was late."""

AGENT_MODULE = "liver_hpc.node.agent"

_SWEEP_S = 20.0
_LOOK_S = 0.05

_log = logging.getLogger(__name__)


def agent_log(run_directory: Path, agent: str) -> Path:
    """To where all goes that an agent says."""
    return run_directory / "logs" / f"agent-{agent}.log"


def last_words(run_directory: Path, agent: str) -> str:
    """The last error in an agent's log; empty where it has none, or cannot be read."""
    try:
        lines = agent_log(run_directory, agent).read_text(errors="replace").splitlines()
    except OSError:
        return ""
    errors = [line.partition(f" ERROR [agent {agent}] ")[2] for line in lines]
    return next(filter(None, reversed(errors)), "")


def agent_options(launch: LaunchAgent, run_directory: Path, stay: bool) -> list[str]:
    """The agent's command line after the program. stay: it is to take further launches."""
    words = ["--version", __version__, "--run-directory", str(run_directory)]
    words += ["--agent", launch.agent]
    slots = ",".join(map(str, launch.seat.slots))
    words += ["--layout", str(launch.layout), "--slots", slots]
    return [*words, "--stay"] if stay else words


class NotLaunched(LiverError):
    """Agents that could not be started; those that were to be started with them run."""

    def __init__(self, agents: Sequence[str], why: str) -> None:
        super().__init__(why)
        self.agents = tuple(agents)


class LaunchedAgent(ABC):
    """An agent, or what stands for it here. exit_code: None as long as anything of it is left."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.exit_code: int | None = None
        self._ended = threading.Event()

    @abstractmethod
    def start(self) -> None:
        """Does not wait until it has booted. Raises LiverError, OSError."""

    @abstractmethod
    def adopt(self, host: str, pid: int) -> bool:
        """Takes over what another process has started; false where it has ended: nothing of it is
        left then. Raises DeadlineError where something is."""

    @abstractmethod
    def kill(self) -> None:
        """Has it end, whatever state it is in; does not wait. Idempotent."""

    def join(self, limit_s: float) -> bool:
        """Whether it has ended, after at most so many seconds."""
        return self._ended.wait(limit_s)

    def has_ended(self, code: int) -> None:
        """Nothing of it is left; said once."""
        if self.exit_code is None:
            self.exit_code = code
            self._ended.set()
            _log.info("agent %s ended with exit code %d", self.agent, code)


class LocalAgent(LaunchedAgent):
    """A child of this process, or one that was left by another: a thread waits for its end, and
    sees to it. exit_s: how long it may take to end once it is told to. polite: how it is told."""

    def __init__(
        self,
        agent: str,
        command: Command,
        exit_s: float,
        polite: signal.Signals = signal.SIGTERM,
    ) -> None:
        super().__init__(agent)
        self._polite = polite
        self._command = command
        self._exit_s = exit_s
        self._killed = threading.Event()

    def start(self) -> None:
        self._keep(Child(self._command))

    def adopt(self, host: str, pid: int) -> bool:
        words = [*self._command.words]
        at = words.index("--agent")
        if host != socket.gethostname():
            return False
        try:
            if not _runs(pid, words[at - 2 : at + 2]):
                # The number may be another process's by now, maybe another run's agent.
                raise ProcessLookupError
            child = Child(self._command, Foreign(pid))
        except OSError:  # it has ended, and may have left others behind
            kill_left(self._command.mark)
            return False
        self._keep(child)
        return True

    def kill(self) -> None:
        self._killed.set()

    def _keep(self, child: Child) -> None:
        """Raises LiverError where there is no thread for it: nothing of it is left then."""
        try:
            start_thread(partial(self._see_off, child), f"keep-{self.agent}")
        except LiverError:
            kill_at_last(child)
            raise

    def _see_off(self, child: Child) -> None:
        code = KILLED
        try:
            while child.exit_code() is None and not self._killed.wait(_LOOK_S):
                pass
            try:
                child.end(self._exit_s, self._polite)
            except DeadlineError as error:
                _log.error("agent %s: %s", self.agent, error)
            code = child.wait()
        finally:
            self.has_ended(code)


Prepare = Callable[[Sequence[LaunchAgent]], Sequence[LaunchedAgent]]
FindLeft = Callable[[str, str], LaunchedAgent | None]


class Launcher:
    """Starts agents, tells whether they still run, and ends them. An agent's name is used once.

    prepare: makes the agents of launches, which have not started; raises LiverError when one of
    them never could. close_s: how long killed agents may take to end. find_left: by its name and
    node, an agent that another coordinator has launched, to be adopted; else it is as new.
    """

    def __init__(
        self, prepare: Prepare, close_s: float = 0.0, find_left: FindLeft | None = None
    ) -> None:
        self._prepare = prepare
        self._find_left = find_left
        self._close_s = close_s
        self._agents: dict[str, LaunchedAgent] = {}
        self._closed = False

    def launch(self, *launches: LaunchAgent) -> None:
        """Starts agents; does not wait until they have booted.

        Raises NotLaunched when that is impossible for some, or a name was used before.
        """
        names = [launch.agent for launch in launches]
        if self._closed:
            raise NotLaunched(names, "the launcher is closed")
        if used := [name for name in names if name in self._agents]:
            again = f"agent {used[0]!r} was launched before; a name is used once"
            raise NotLaunched(names, again)
        try:
            agents = self._prepare(launches)
        except (LiverError, OSError) as error:
            raise NotLaunched(names, str(error)) from error
        for number, agent in enumerate(agents):
            self._agents[agent.agent] = agent
            try:
                agent.start()
            except (LiverError, OSError) as error:
                del self._agents[agent.agent]
                raise NotLaunched([one.agent for one in agents[number:]], str(error)) from error

    def adopt(self, agent: str, node: str, host: str, pid: int) -> bool:
        """Takes over an agent that another coordinator has launched on a node and whose process is,
        or was, `pid` on `host`; false where it has ended. Raises LiverError for a node that is not
        held any more."""
        if self._find_left is not None:
            found = self._find_left(agent, node)
        else:
            (found,) = self._prepare([LaunchAgent(agent, Seat(node, ()), Layout(1, 1, 1))])
        if found is None or not found.adopt(host, pid):
            return False
        self._agents[agent] = found
        return True

    def alive(self, agent: str) -> bool:
        """Whether anything of the agent still runs. Raises LiverError for an unknown agent."""
        return self.exit_code(agent) is None

    def exit_code(self, agent: str) -> int | None:
        """How the agent ended, None while it is alive: 0 when all its workers ended well.

        The agent's own codes are in `liver_hpc.node.agent`; for an agent that died by a signal a
        launcher may report that signal's number, or 128 and that number.
        """
        return self._known(agent).exit_code

    def kill(self, agent: str) -> None:
        """Ends the agent and its workers; `alive` tells when that is done. Idempotent."""
        self._known(agent).kill()

    def close(self, most_s: float = math.inf) -> None:
        """Ends all agents; afterwards nothing of them lives. Waits for so long at most. Raises
        DeadlineError. Idempotent."""
        self._closed = True
        for agent in self._agents.values():
            agent.kill()
        limit_s = min(self._close_s, most_s)
        deadline = Deadline.after(SystemClock(), limit_s, "killed agents to end")
        left = [n for n, agent in self._agents.items() if not agent.join(deadline.remaining_s())]
        if left:
            raise DeadlineError(f"waited {limit_s:g} s for killed agents {left} to end")

    def _known(self, agent: str) -> LaunchedAgent:
        if agent not in self._agents:
            raise LiverError(f"agent {agent!r} was never launched")
        return self._agents[agent]


def _runs(pid: int, words: Sequence[str]) -> bool:
    """Whether it is a process with these words on its command line, one behind the other."""
    try:
        line = psutil.Process(pid).cmdline()
    except psutil.Error:
        return False
    return any(line[at : at + len(words)] == [*words] for at in range(len(line)))


def local_launcher(
    run_directory: Path,
    exit_s: float = 10.0,
    further_options: Sequence[str] = (),
    task: Sequence[str] = (),
    stay: bool = False,
    in_job: bool = False,
) -> Launcher:
    """Runs agents on this machine, which take further launches if they are to `stay`.

    `in_job`: in a Slurm job, of which Slurm may signal every process: what it announces is for the
    coordinator, and agents go on. `exit_s` is how long a killed agent may take to end its workers
    before all get SIGKILL; `further_options` are added to every agent's command line. `task` is a
    module and its arguments that run in an agent's place. What an agent prints goes to its log,
    logs/agent-NAME.log of the run directory.
    """
    run_directory = run_directory.resolve()  # another coordinator may know it by another name

    def prepared(launch: LaunchAgent) -> LaunchedAgent:
        options = [*agent_options(launch, run_directory, stay), "--parent", str(os.getpid())]
        options += ["--warnings"] if in_job else []
        words = [sys.executable, "-P", "-m", *(task or [AGENT_MODULE, *options, *further_options])]
        log = agent_log(run_directory, launch.agent)
        name = f"agent {launch.agent}"
        mark = _mark(run_directory, launch.agent)
        command = Command(name, words, orphan_signal=None, log=log, apart="session", mark=mark)
        polite = signal.SIGINT if in_job else signal.SIGTERM
        return LocalAgent(launch.agent, command, exit_s, polite)

    return Launcher(
        lambda launches: [prepared(each) for each in launches], close_s=exit_s + _SWEEP_S
    )


def lives_here(run_directory: Path, agents: Iterable[str]) -> bool:
    """Whether any of a local run's agents does, or what one has started."""
    return any(is_left(_mark(run_directory, agent)) for agent in agents)


def _mark(run_directory: Path, agent: str) -> str:
    return mark_of(str(run_directory.resolve()), agent)
