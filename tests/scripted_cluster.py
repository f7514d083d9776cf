"""A cluster in memory: agents that meet at a rendezvous, workers that follow a script."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.pool import NodePool
from liver_hpc.coordinator.connections import InboxClosed
from liver_hpc.errors import DeadlineError, MeetingError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.channel import ChannelClosed
from liver_hpc.rendezvous.conversation import Line
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.events import Node, NodeGone, NodeGranted, NodeWarned, PoolEvent, Seat
from tests.fakes import Fault, FaultInjector, WorkerScript
from tests.memory_launcher import MemoryLauncher
from tests.memory_rendezvous import MemoryRendezvous


class ScriptedWorker:
    """A scripted worker on a real control channel, in a thread of its own."""

    def __init__(self, script: WorkerScript, channel: Line) -> None:
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

    def start(self, tell: Callable[[PoolEvent], None], adopt: bool = False) -> None:
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


class ScriptedCluster:
    """The agents and workers of a run, played by threads over the real control channel.

    Worker faults are ordered from `faults`; `fallen_agents` end before they meet, with
    these exit codes. directory, coordinator_s: where workers look for another coordinator, and for
    how long. agents_talk: agents that are started with a launch have a line, too, and stay.
    """

    def __init__(self, secret: bytes, nodes: Sequence[Node] = (Node("", "machine"),)) -> None:
        self.secret = secret
        self.directory = RunDirectory(Path("nowhere"))
        self.coordinator_s = 0.0
        self.agents_talk = False
        self.pool = ScriptedPool(nodes)
        self.faults = FaultInjector()
        self.rendezvous = MemoryRendezvous(secret)
        self.launcher = MemoryLauncher(self._start)
        self.launched: list[LaunchAgent] = []
        self.fallen_agents: dict[str, int] = {}
        self.workers: dict[int, ScriptedWorker] = {}
        self.refusals: list[str] = []
        self._threads: list[threading.Thread] = []

    def _start(self, request: LaunchAgent) -> None:
        if request.seat.slots and self.agents_talk:
            self.launched.append(request)
            self._in_thread(self._staying_agent, request)
        elif request.seat.slots:
            self.launched.append(request)
            self._in_thread(self._launch, request, partial(self.launcher.end, request.agent))
        else:
            self._in_thread(self._staying_agent, request)

    def _in_thread(self, play: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=play, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _line(self, call: Callable[[int, int], m.Calls]) -> Line:
        return Line(self.directory, self.secret, call, SystemClock(), 5.0, self.coordinator_s)

    def _meet(self, request: LaunchAgent) -> Answer | None:
        identity = Identity(
            agent=request.agent, host="test", pid=1, workers=len(request.seat.slots)
        )
        try:
            return self.rendezvous.meet(identity, self.secret)
        except (MeetingError, InboxClosed) as error:  # refused, or the coordinator is gone
            self.refusals.append(str(error))
            return None

    def _staying_agent(self, request: LaunchAgent) -> None:
        """An agent that is there before its further launches; its own workers come with it."""
        agent, node, code = request.agent, request.seat.node, 4
        launches = {agent} if request.seat.slots else set()
        answer = self._meet(request)
        with contextlib.suppress(ChannelClosed, DeadlineError):  # the run has ended meanwhile
            if answer is not None:
                address, code = (answer.control_host, answer.control_port), 0

                def call(heard: int, epoch: int) -> m.Calls:
                    own = tuple(sorted(launches))
                    return m.Calls(agent=agent, heard=heard, epoch=epoch, launches=own)

                channel = self._line(call)
                channel.open(address)
                channel.send(m.AgentHello(agent=agent, host="test", pid=1))
                if launches:
                    ended = partial(self._launch_ended, agent, agent, channel)
                    self._in_thread(self._play, answer, ended)
                while not isinstance(order := channel.receive(), m.Exit):
                    if isinstance(order, m.StartWorkers):
                        launches.add(order.launch)
                    self._obey(agent, node, channel, order)
        self.launcher.end(agent, code)

    def _launch_ended(self, agent: str, launch: str, channel: Line, code: int) -> None:
        channel.send(m.LaunchEnded(agent=agent, launch=launch, exit_code=code))

    def _obey(self, agent: str, node: str, channel: Line, order: m.AnyMessage) -> None:
        ended = partial(self._launch_ended, agent)
        if isinstance(order, m.StartWorkers):
            layout = Layout.parse(order.layout)
            request = LaunchAgent(order.launch, Seat(node, order.slots), layout)
            self.launched.append(request)
            self._in_thread(self._launch, request, partial(ended, order.launch, channel))
        elif isinstance(order, m.EndWorkers):
            ended(order.launch, channel, 0)

    def _launch(self, request: LaunchAgent, ended: Callable[[int], None]) -> None:
        if request.agent in self.fallen_agents:
            ended(self.fallen_agents[request.agent])
            return
        answer = self._meet(request)
        if answer is None:
            ended(4)
        else:
            self._play(answer, ended)

    def _play(self, answer: Answer, ended: Callable[[int], None]) -> None:
        own = []
        for worker in answer.worker_ids:
            fault = self.faults.take(worker, Phase.BOOT)
            if fault is Fault.DIE:
                ended(5)
                continue
            address = (answer.control_host, answer.control_port)
            channel = self._line(_calls_of(worker))
            try:
                channel.open(address)
            except (ChannelClosed, DeadlineError):  # the run has ended meanwhile
                continue
            script = WorkerScript(worker, self.faults, mute=fault is Fault.SILENT)
            self.workers[worker] = ScriptedWorker(script, channel)
            self.workers[worker].thread.start()
            own.append(self.workers[worker])
        for played in own:
            played.thread.join()
        ended(0)

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


def _calls_of(worker: int) -> Callable[[int, int], m.Calls]:
    return lambda heard, epoch: m.Calls(worker=worker, heard=heard, epoch=epoch)
