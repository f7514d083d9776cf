"""The coordinator's event loop: opens what a run needs, brings it the events, closes everything.

Connections are served in threads that only put events into the inbox; all else happens here, in
one thread.
"""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import assert_never

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.address import control_address
from liver_hpc.coordinator.connections import ConnectionServer
from liver_hpc.coordinator.course import Course
from liver_hpc.coordinator.handoffs import OfAttempt
from liver_hpc.coordinator.inbox import (
    AgentConnected,
    AgentGone,
    AgentSaid,
    AgentWarned,
    Asked,
    Connected,
    Disconnected,
    Inbox,
    InboxEvent,
    Met,
    PoolSaid,
    Received,
    StopSignalled,
)
from liver_hpc.coordinator.registry import WorkerRegistry
from liver_hpc.coordinator.services import Services
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import LiverError, MeetingError, ProtocolError, RequestRefused
from liver_hpc.protocol.messages import (
    AnyMessage,
    DrainRequest,
    Exit,
    Failed,
    Finished,
    FromOperator,
    Heartbeat,
    ReplaceRequest,
    Reply,
    ResizeRequest,
    Restored,
    Saved,
    StatusRequest,
    StepDone,
    StopRequest,
    Transports,
    Warned,
    WorkerEnded,
)
from liver_hpc.rendezvous.base import Answer
from liver_hpc.rendezvous.channel import ControlServer
from liver_hpc.run.node_events import EndNear
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, write_private_json

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often deadlines, heartbeats and agents are looked at."""
EXPLAIN_S = 0.5
"""How long a worker's agent may take to say how the worker ended."""
FROZEN_S = 2.0
"""A gap between two looks that only a process that stood still can have."""


@dataclass(frozen=True)
class Memory:
    """ceiling: workers that the run grows to by itself. drained: nodes that it keeps off."""

    ceiling: int
    drained: frozenset[str]


class Coordinator:
    """One run, from the launch of its first workers to the end of its last."""

    def __init__(
        self, config: RunConfig, run_directory: Path, secret: bytes, services: Services
    ) -> None:
        self._config = config
        self._run_directory = run_directory
        self._secret = secret
        self._services = services
        self._clock = services.clock
        self._inbox = Inbox()
        self._store = StoreService()
        self._registry = WorkerRegistry(config, services.launcher, services.clock)
        self._course = Course(config, services, self._registry, self._store, run_directory)
        self._endings: dict[int, str] = {}
        self._unexplained: dict[int, tuple[Deadline, str]] = {}
        self._ceiling: int | None = None
        self._address = ("", 0)
        self._next_tick_s = 0.0
        self._last_tick_s = services.clock.now_s()

    def run(self) -> Outcome:
        """Runs to the end. Whatever happens, nothing that was launched or opened is left; where
        that cannot be seen to, the outcome's reason says so."""
        course = self._course
        left_over = ""
        try:
            with ExitStack() as stack:
                try:
                    self._open(stack)
                    while course.outcome is None:
                        self._turn()
                except LiverError as error:
                    log.exception("the run failed")
                    course.run_failed(str(error))
        except (LiverError, OSError) as error:  # in closing: the run itself ended otherwise
            if course.outcome is None:
                raise
            log.exception("not all that was launched or opened could be ended")
            left_over = f"; not all could be ended: {error}"
        assert course.outcome is not None
        return replace(course.outcome, reason=course.outcome.reason + left_over)

    @property
    def memory(self) -> Memory:
        """What operators asked for, for the life that follows within the same job."""
        course = self._course
        return Memory(course.fleet.ceiling, frozenset(course.steering.drained))

    def recall(self, memory: Memory) -> None:
        """Before `run`: what operators asked for in a life before this one."""
        self._ceiling = memory.ceiling
        self._course.steering.recall(memory.drained)

    @property
    def steps_done(self) -> int:
        """How many steps are done; from any thread."""
        return self._course.recorder.steps_done

    def stop(self, why: str) -> None:
        """Asks for a stop at the next step boundary; from any thread or signal handler."""
        self._inbox.put(StopSignalled(why))

    def end_near(self, reason: str, deadline_s: float) -> None:
        """This process's allocation ends at `deadline_s`; from any thread or signal handler."""
        self._inbox.put(PoolSaid(EndNear(reason, self._clock.now_s(), deadline_s)))

    def identity(self) -> str:
        """Where the run stands, for its log: "gen 4 TRANSFER"."""
        course = self._course
        if course.world is None:
            return str(course.state)
        return course.handoffs.identity() or f"gen {course.world.generation}"

    def _open(self, stack: ExitStack) -> None:
        services, control_s = self._services, self._config.deadlines.control_s
        # Called from the last to the first: nodes go back once nothing runs on them any more.
        for close in (
            services.metrics.close,
            self._course.fleet.notices.close,
            services.rendezvous.close,
            services.pool.close,
            services.launcher.close,
        ):
            stack.callback(close)
        connections = ConnectionServer(self._inbox, self._store, control_s)
        address = control_address(self._config.network, self._config.cluster.kind)
        server = ControlServer(address, self._secret, connections.handle)
        for close in (server.close, connections.settle, self._inbox.close, self._store.close):
            stack.callback(close)
        stack.callback(self._see_all_off)
        stack.callback(lambda: services.pool.want(0))
        self._address = server.address
        host, port = server.address
        here = {
            "host": host,
            "port": port,
            "pid": os.getpid(),
            "hostname": socket.gethostname(),
        }
        write_private_json(self._run_directory / COORDINATOR_FILE, here)
        services.rendezvous.start(lambda identity: self._inbox.ask(Met(identity), control_s))
        self._course.resume()
        if self._ceiling is not None:  # beats what the run file asked for in the steps before
            self._course.fleet.recall(self._ceiling)
        services.pool.start(lambda event: self._inbox.put(PoolSaid(event)))
        while (event := self._inbox.get(0.0)) is not None:  # the nodes that are held already
            self._dispatch(event)
        self._course.launch()

    # ---- one turn

    def _turn(self) -> None:
        event = self._inbox.get(TICK_S)
        if event is not None:
            self._dispatch(event)
        if event is None or self._clock.now_s() >= self._next_tick_s:
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._tick()

    def _dispatch(self, event: InboxEvent) -> None:
        match event:
            case Received():
                if self._registry.hear(event.channel, event.worker):
                    self._message(event.worker, event.message)
            case Connected():
                self._connected(event)
            case Disconnected():
                if self._registry.hear(event.channel, event.worker):
                    self._disconnected(event)
            case AgentConnected():
                self._registry.attach(event.channel, event.hello)
            case AgentWarned():
                self._agent_warned(event.message)
            case AgentSaid():
                self._worker_ended(event.message)
            case AgentGone():
                self._registry.detach(event.channel, event.agent)
            case Met():
                self._meet(event)
            case Asked():
                self._answer(event)
            case StopSignalled():
                # Whoever cancels a job may want to go on from where it was.
                saves = self._config.cluster.kind == "slurm"
                self._course.stop(event.reason, checkpoint=saves)
            case PoolSaid():
                self._course.steering.node_event(event.event)
            case _:
                assert_never(event)

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        frozen = now_s - self._last_tick_s > FROZEN_S
        self._last_tick_s = now_s
        if frozen:
            # It was this process that stood still (a suspended machine, a slow disk): what was
            # sent meanwhile has not been read yet, and no deadline has passed before it is.
            self._registry.excuse_all()
            return
        for worker, (deadline, reason) in list(self._unexplained.items()):
            if deadline.expired():
                self._lost(worker, reason)
        self._course.tick()
        for worker in self._registry.reap():
            self._course.lost(worker, "did not end by itself")
        if self._inbox.empty():  # else the heartbeat may be in there
            for worker in self._registry.silent():
                self._lost(worker, f"silent for {self._config.deadlines.heartbeat_s:g} s")

    def _lost(self, worker: int, reason: str) -> None:
        self._unexplained.pop(worker, None)
        if self._registry.leave(worker):
            self._course.lost(worker, reason)

    # ---- agents

    def _agent_warned(self, message: Warned) -> None:
        """The pool finds out what the signal announces."""
        node = self._registry.agent_node(message.agent)
        log.warning("agent %s got %s on %s", message.agent, message.signal, node or "its node")
        if node:
            self._services.pool.warned(node, f"SIG{message.signal}", message.at_s)

    def _disconnected(self, event: Disconnected) -> None:
        """A worker's agent knows better how it ended, and may say so in a moment."""
        worker = event.worker
        how = self._endings.get(worker)
        if how is not None or not self._registry.explains(worker):
            self._lost(worker, how or event.reason)
        elif worker not in self._unexplained:
            waits_for = f"the agent of worker {worker}"
            deadline = Deadline.after(self._clock, EXPLAIN_S, waits_for)
            self._unexplained[worker] = (deadline, event.reason)

    def _worker_ended(self, message: WorkerEnded) -> None:
        self._endings[message.worker] = message.how
        if message.worker in self._unexplained:
            self._lost(message.worker, message.how)

    # ---- workers

    def _meet(self, event: Met) -> None:
        try:
            workers = self._registry.meet(event.identity)
        except MeetingError as error:
            log.warning("turned away: %s", error)
            event.answer.set_exception(error)
            return
        host, port = self._address
        answer = Answer(worker_ids=workers, control_host=host, control_port=port)
        event.answer.set_result(answer)

    def _connected(self, event: Connected) -> None:
        hello = event.hello
        generation = self._registry.join(event.channel, hello)
        if generation is not None:
            took = ", ".join(f"{part} {s:.2f} s" for part, s in hello.boot_timings_s.items())
            log.info("worker %d on %s has booted: %s", hello.worker, hello.host, took)
            self._course.arrived(hello, generation)

    def _message(self, worker: int, message: AnyMessage) -> None:
        course = self._course
        if getattr(message, "worker", None) != worker:
            raise ProtocolError(f"worker {worker} sent {message}")
        match message:
            case Heartbeat():
                pass
            case StepDone():
                course.step_done(message)
            case Finished():
                course.finished(message)
            case Saved():
                course.saved(message)
            case Restored():
                course.restored(message)
            case Transports():
                course.recorder.connected(message)
            case Failed() if course.world and message.generation == course.world.generation:
                course.run_failed(f"worker {worker}: {message.reason}")
            case _ if isinstance(message, OfAttempt):
                course.handoffs.message(message)
            case _:
                raise ProtocolError(f"worker {worker}: unexpected {message.type}")

    # ---- operators

    def _answer(self, event: Asked) -> None:
        try:
            event.answer.set_result(self._reply(event.request))
        except RequestRefused as error:
            event.answer.set_exception(error)

    def _reply(self, request: FromOperator) -> Reply:
        """The answer to an operator; RequestRefused when the answer is no."""
        course = self._course
        match request:
            case StatusRequest():
                return Reply(ok=True, text="", data=course.snapshot().model_dump())
            case ResizeRequest() | ReplaceRequest():
                return Reply(
                    ok=True, text=course.steering.ask_for(course.steering.wish_of(request))
                )
            case DrainRequest(undo=True):
                return Reply(ok=True, text=course.steering.undo_drain(request.node))
            case DrainRequest():
                return Reply(ok=True, text=course.steering.drain(request.node, request.within_s))
            case StopRequest():
                return Reply(ok=True, text=course.stop_as_asked(request.checkpoint))
            case _:
                assert_never(request)

    # ---- the end

    def _see_all_off(self) -> None:
        """Exit to everybody; returns when all have gone, or after `exit_s` anyway."""
        outcome = self._course.outcome
        reason = f"{outcome.state}: {outcome.reason}" if outcome else "the coordinator failed"
        self._registry.send(self._registry.present(), Exit(reason=reason))
        deadline = Deadline.after(self._clock, self._config.deadlines.exit_s, "workers to exit")
        while (self._registry.present() or self._registry.working()) and not deadline.expired():
            event = self._inbox.get(TICK_S)
            if isinstance(event, Disconnected) and self._registry.hear(event.channel, event.worker):
                self._registry.leave(event.worker)
            elif isinstance(event, Asked):
                self._answer(event)
            elif event is not None:
                self._inbox.refuse(event)
        if self._registry.present():
            log.warning("workers %s have not ended by themselves", list(self._registry.present()))
