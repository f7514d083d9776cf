"""A cluster in memory: agents that meet at a rendezvous, workers that follow a script."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from liver_hpc import __version__
from liver_hpc.clock import SystemClock
from liver_hpc.cluster.pool import Adopted, NodePool
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.coordinator.connections import InboxClosed
from liver_hpc.errors import DeadlineError, MeetingError, ProtocolError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.node.agent import GATHER_S
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.channel import ITSELF, ChannelClosed
from liver_hpc.rendezvous.conversation import Line
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.events import Node, NodeGone, NodeGranted, NodeWarned, PoolEvent, Seat
from tests.fakes import Fault, FaultInjector, WorkerScript
from tests.memory_launcher import MemoryLauncher
from tests.memory_rendezvous import MemoryRendezvous


class WorkersLine:
    """What a scripted worker says and hears, through its agent. Closed, the worker has ended."""

    def __init__(self, worker: int, agent: ScriptedAgent) -> None:
        self._worker = worker
        self._agent = agent
        self._came: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._closed = False

    def send(self, message: m.FromWorker) -> None:
        if not self._closed:
            self._agent.line.say(m.encode(message), self._worker)
            self._agent.said.set()

    def put(self, data: bytes) -> None:
        self._came.put(data)

    def receive(self) -> m.AnyMessage:
        data = self._came.get()
        if data is None:
            raise ChannelClosed("the worker has ended")
        return m.decode(data)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._came.put(None)
            how = f"signal 9; see worker {self._worker}'s log"
            self._agent.say(m.WorkerEnded(agent=self._agent.name, worker=self._worker, how=how))


class ScriptedWorker:
    """A scripted worker on its agent's real control channel, in a thread of its own."""

    def __init__(self, script: WorkerScript, channel: WorkersLine) -> None:
        self.script = script
        self.channel = channel
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.listening = threading.Event()

    def _serve(self) -> None:
        worker = self.script.worker
        try:
            if not self.script.mute:
                self.channel.send(m.Hello(worker=worker, pid=worker, host="test", booted_s=0.0))
            self.listening.set()
            while not self.script.dead:
                message = self.channel.receive()
                self.say(self.script.receive(message))  # type: ignore[arg-type]
        except ChannelClosed:
            pass
        self.script.dead = True
        self.channel.close()

    def say(self, messages: Sequence[m.FromWorker]) -> None:
        for message in messages:
            self.channel.send(message)
            if isinstance(message, m.FirstStep):
                self.script.step += 1
                self.report_step()

    def report_step(self) -> None:
        """StepDone, from rank 0 alone."""
        script = self.script
        if script.world is not None and script.world.workers[0] == script.worker:
            done = m.StepDone(
                worker=script.worker,
                generation=script.world_generation,
                step=script.step - 1,
                loss=1.0,
                grad_norm=1.0,
                learning_rate=0.1,
                tokens=64,
                started_s=float(script.step),
                ended_s=script.step + 0.5,
            )
            self.channel.send(done)


class ScriptedPool(NodePool):
    """Nodes that come and go when a test says so; burst nodes go when they are given back."""

    def __init__(self, nodes: Sequence[Node] = (Node("", "machine"),)) -> None:
        self._first = tuple(nodes)
        self._tell: Callable[[PoolEvent], None] | None = None
        self.given_back: list[str] = []
        self.avoided: list[str] = []
        self.wanted: list[int] = []
        self.signals: list[tuple[str, str]] = []
        self.closed = False

    def say(self, event: PoolEvent) -> None:
        assert self._tell is not None, "the pool has not been started"
        self._tell(event)

    def grant(self, node: Node) -> None:
        self.say(NodeGranted(node))

    def warn(
        self, node: str, reason: str = "preempted", window_s: float | None = None
    ) -> NodeWarned:
        now_s = SystemClock().now_s()
        deadline_s = None if window_s is None else now_s + window_s
        event = NodeWarned(node, reason, now_s, deadline_s)
        self.say(event)
        return event

    def start(self, tell: Callable[[PoolEvent], None], adopt: Adopted | None = None) -> None:
        self._tell = tell
        for node in self._first:
            self.grant(node)

    def warned(self, node: str, signal: str, at_s: float) -> None:
        self.signals.append((node, signal))

    def want(self, workers: int) -> None:
        self.wanted.append(workers)

    def give_back(self, node: str) -> None:
        self.given_back.append(node)
        if node.startswith("burst"):
            self.say(NodeGone(node, "given back"))

    def avoid(self, node: str) -> None:
        self.avoided.append(node)

    def readmit(self, node: str) -> None:
        self.avoided.remove(node)

    def close(self) -> None:
        self.closed = True


class ScriptedAgent:
    """An agent with its launches, that stays until it is told to end."""

    def __init__(self, cluster: ScriptedCluster, request: LaunchAgent) -> None:
        self.name = request.agent
        self._cluster = cluster
        self._request = request
        self.said = threading.Event()
        self._over = False
        self._launches: set[str] = set()
        self._workers: dict[int, ScriptedWorker] = {}
        self.line = Line(
            cluster.directory,
            cluster.secret,
            lambda: m.Calls(
                agent=self.name, version=__version__, launches=tuple(sorted(self._launches))
            ),
            SystemClock(),
            DeadlineSection(control_s=5.0, coordinator_s=cluster.coordinator_s),
        )

    def run(self) -> None:
        code = self._cluster.fallen_agents.get(self.name)
        answer = self._cluster.meet(self._request) if code is None else None
        if answer is not None:
            code = self._serve(answer)
        self._cluster.launcher.end(self.name, 4 if code is None else code)

    def say(self, message: m.AnyMessage) -> None:
        with contextlib.suppress(ProtocolError):
            self.line.send(message)

    def _gather(self) -> None:
        """What workers say goes together, as that of real agents does."""
        while not self._over:
            self.said.wait()
            self.said.clear()
            time.sleep(GATHER_S)
            self.line.flush()

    def _serve(self, answer: Answer) -> int:
        self._cluster.in_thread(self._gather)
        self.say(m.AgentHello(agent=self.name, host="test", pid=1))
        try:
            if self._request.seat.slots:
                self._begin(self._request, answer)
            self.line.open((answer.control_host, answer.control_port))
            while True:
                for worker, data in self.line.receive():
                    if worker in self._workers:
                        self._workers[worker].channel.put(data)
                    elif worker == ITSELF:
                        order = m.decode(data)
                        if isinstance(order, m.Exit):
                            return 0
                        self._obey(order)
        except (ChannelClosed, DeadlineError):  # the run has ended meanwhile
            return 4
        finally:
            for played in self._workers.values():
                played.channel.close()
            self._over = True
            self.said.set()
            self.line.close()

    def _obey(self, order: m.AnyMessage) -> None:
        if isinstance(order, m.StartWorkers):
            layout, seat = Layout.parse(order.layout), Seat(self._request.seat.node, order.slots)
            request = LaunchAgent(order.launch, seat, layout)
            self._cluster.launched.append(request)
            self._cluster.in_thread(self._launch, request)
        elif isinstance(order, m.EndWorkers):
            self._ended(order.launch, 0)

    def _launch(self, request: LaunchAgent) -> None:
        code = self._cluster.fallen_agents.get(request.agent)
        answer = self._cluster.meet(request) if code is None else None
        if answer is None:
            self._ended(request.agent, 4 if code is None else code)
        else:
            self._begin(request, answer)

    def _begin(self, request: LaunchAgent, answer: Answer) -> None:
        """The workers of a launch."""
        self._launches.add(request.agent)
        own = []
        for worker in answer.worker_ids:
            fault = self._cluster.faults.take(worker, Phase.BOOT)
            if fault is Fault.DIE:
                self._ended(request.agent, 5)
                continue
            self.line.add(worker)
            script = WorkerScript(worker, self._cluster.faults, mute=fault is Fault.SILENT)
            played = ScriptedWorker(script, WorkersLine(worker, self))
            self._workers[worker] = self._cluster.workers[worker] = played
            own.append(played)
        for played in own:
            played.thread.start()
        self._cluster.in_thread(self._wait_for, request.agent, own)

    def _wait_for(self, launch: str, own: Sequence[ScriptedWorker]) -> None:
        for played in own:
            played.thread.join()
        self._ended(launch, 0)

    def _ended(self, launch: str, code: int) -> None:
        self._launches.discard(launch)
        self.say(m.LaunchEnded(agent=self.name, launch=launch, exit_code=code))


class ScriptedCluster:
    """The agents and workers of a run, played by threads over the real control channel.

    Worker faults are ordered from `faults`; `fallen_agents` end before they meet, with
    these exit codes. directory, coordinator_s: where agents look for another coordinator, and for
    how long.
    """

    def __init__(self, secret: bytes, nodes: Sequence[Node] = (Node("", "machine"),)) -> None:
        self.secret = secret
        self.directory = RunDirectory(Path("nowhere"))
        self.coordinator_s = 0.001
        self.pool = ScriptedPool(nodes)
        self.faults = FaultInjector()
        self.rendezvous = MemoryRendezvous(secret)
        self.launcher = MemoryLauncher(self._start)
        self.launched: list[LaunchAgent] = []
        self.agents: dict[str, ScriptedAgent] = {}
        self.fallen_agents: dict[str, int] = {}
        self.workers: dict[int, ScriptedWorker] = {}
        self.refusals: list[str] = []
        self._threads: list[threading.Thread] = []

    def _start(self, request: LaunchAgent) -> None:
        if request.seat.slots:
            self.launched.append(request)
        agent = self.agents[request.agent] = ScriptedAgent(self, request)
        self.in_thread(agent.run)

    def in_thread(self, play: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=play, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def meet(self, request: LaunchAgent) -> Answer | None:
        identity = Identity(agent=request.agent, host="test", workers=len(request.seat.slots))
        try:
            return self.rendezvous.meet(identity, self.secret)
        except (MeetingError, InboxClosed) as error:  # refused, or the coordinator is gone
            self.refusals.append(str(error))
            return None

    def join(self, timeout_s: float) -> None:
        """Waits until all agents, and so all workers, have ended."""
        for thread in self._threads:
            thread.join(timeout_s)
            assert not thread.is_alive(), "an agent lives on"

    def world(self) -> RankMap:
        """Who trains, as the workers have it."""
        worlds = {
            played.script.world_generation: played.script.world
            for played in self.workers.values()
            if not played.script.dead and played.script.world is not None
        }
        world = worlds[max(worlds)]
        assert world is not None
        return world

    def train(self, steps: int = 1, last: bool = False) -> None:
        """All workers of the world do that many steps; after the last one they say Finished."""
        members = [self.workers[worker] for worker in self.world().workers]
        for _ in range(steps):
            for played in members:
                played.script.step += 1
            members[0].report_step()
        if last:
            for played in members:
                script = played.script
                played.say([m.Finished(worker=script.worker, step=script.step)])

    def got(self, worker: int, kind: type[m.Message]) -> list[m.Message]:
        """The messages of a kind that a worker has received."""
        received = self.workers[worker].script.received if worker in self.workers else []
        return [message for message in received if isinstance(message, kind)]
