"""The coordinator's event loop: brings the run's core its events, and performs what it decides.

Connections are served in threads that only put into the inbox; all else happens here, in one
thread. What the core decides is performed once it is in the journal.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from liver_hpc.clock import Deadline
from liver_hpc.cluster.network import control_address
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.agents import NodeAgents
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.coordinator.connections import (
    Asked,
    Closed,
    ConnectionServer,
    Control,
    Inbox,
    InboxEvent,
    Met,
    Peer,
    Said,
    WorkerRegistry,
)
from liver_hpc.coordinator.performer import Performer, Services
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import LiverError
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.channel import Channel, ControlServer
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.codec import encode
from liver_hpc.run.journal import Written
from liver_hpc.run.machine import Run
from liver_hpc.run.outcome import COORDINATOR_FILE, Outcome, write_private_json

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often deadlines, heartbeats and agents are looked at."""
EXPLAIN_S = 0.5
"""How long a worker's agent may take to say how the worker ended."""
FROZEN_S = 2.0
"""A gap between two looks that only a process that stood still can have."""


class Coordinator:
    """One start of a run, from the launch of its first workers to the end of its last.

    core: what decides. memory: what the starts before it have left.
    """

    def __init__(
        self,
        config: RunConfig,
        run_directory: Path,
        secret: bytes,
        services: Services,
        control: Control,
        memory: e.Memory,
    ) -> None:
        self._config = config
        self._run_directory = run_directory
        self._secret = secret
        self._services = services
        self._clock = services.clock
        self._memory = memory
        recipe = services.recipe
        self.core = Run(
            config, recipe.spec, recipe.check_layout, services.place, recipe.rehearsal_bytes
        )
        self._control = control
        self._inbox = Inbox()
        self._store = StoreService()
        self._registry = WorkerRegistry(services.clock)
        self._agents = NodeAgents(
            services.launcher,
            self._registry,
            run_directory,
            services.clock,
            config.deadlines.exit_s,
            stay=config.workers.warm,
        )
        self._checkpoints = Checkpoints(config, services.recipe, run_directory, services.clock)
        self._performer = Performer(
            services, self._registry, self._agents, self._store, self._checkpoints
        )
        self._journal = services.open_journal(self._inbox.put)
        self._held: deque[tuple[int, list[a.Action]]] = deque()
        self._next_request = 0
        self._endings: dict[int, str] = {}
        self._unexplained: dict[int, tuple[Deadline, str]] = {}
        self._journal_failed = False
        self._next_tick_s = 0.0
        self._last_tick_s = services.clock.now_s()
        control.reach(self._inbox)

    def run(self) -> Outcome:
        """Runs to the end. Whatever happens, nothing that was launched or opened is left; where
        that cannot be seen to, the outcome's reason says so."""
        left_over = ""
        try:
            with ExitStack() as stack:
                try:
                    self._open(stack)
                    while self._performer.outcome is None:
                        self._turn()
                except LiverError as error:
                    log.exception("the run failed")
                    self._feed(e.ShellFailed(str(error)))
                    self._perform_held()
        except (LiverError, OSError) as error:  # in closing: the run itself ended otherwise
            if self._performer.outcome is None:
                raise
            log.exception("not all that was launched or opened could be ended")
            left_over = f"; not all could be ended: {error}"
        assert self._performer.outcome is not None
        return replace(self._performer.outcome, reason=self._performer.outcome.reason + left_over)

    def _open(self, stack: ExitStack) -> None:
        services, control_s = self._services, self._config.deadlines.control_s
        # Called from the last to the first: nodes go back once nothing runs on them any more.
        for close in (
            lambda: self._journal.close(control_s),
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
        self._performer.address = server.address
        host, port = server.address
        here = {"host": host, "port": port, "pid": os.getpid(), "hostname": socket.gethostname()}
        write_private_json(self._run_directory / COORDINATOR_FILE, here)
        services.rendezvous.start(lambda identity: self._inbox.ask(Met(identity), control_s))
        self._feed(
            e.CoordinatorStarted(
                attributes=dict(services.attributes),
                checkpoints=str(self._checkpoints.directory),
                resumed=self._checkpoints.open(),
                memory=self._memory,
            )
        )
        services.pool.start(self._inbox.put)
        while (event := self._inbox.get(0.0)) is not None:  # the nodes that are held already
            self._dispatch(event)
        self._feed(e.LaunchAllowed())

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
            case Said():
                self._said(event.channel, event.message)
            case Closed():
                self._closed(event.channel, event.reason)
            case Met():
                self._performer.meetings.append(event)
                who = event.identity
                self._feed(e.AgentMet(who.agent, who.host, who.workers))
            case Asked():
                self._asked(event)
            case Written():
                self._perform_held(event.number)
                if self._journal_failed:
                    self._journal_failed = False
                    self._feed(e.JournalFailed(""))
            case e.JournalFailed():
                self._journal_failed = True
                self._perform_held()
                self._feed(event)
            case _:
                self._feed(event)

    def _tick(self) -> None:
        now_s = self._clock.now_s()
        frozen = now_s - self._last_tick_s > FROZEN_S
        self._last_tick_s = now_s
        if frozen:
            # It was this process that stood still (a suspended machine, a slow disk): what was
            # sent meanwhile has not been read yet, and no deadline has passed before it is.
            self._registry.excuse_all()
            return
        self._give_up_explanations()
        self._look_at_agents()
        self._feed(e.Tick())
        if self._inbox.empty():  # else the heartbeat may be in there
            limit_s = self._config.deadlines.heartbeat_s
            for worker in self._registry.silent_workers(limit_s):
                if self.core.agents.agent_of(worker):  # else it was told to go
                    self._worker_gone(worker, f"silent for {limit_s:g} s")

    def _look_at_agents(self) -> None:
        """Tells the core of agents that have ended, and of a rendezvous that nobody can come to."""
        for ended in self._agents.ended():
            self._feed(ended)
        if self.core.awaits_joiners:
            try:
                self._services.rendezvous.check()
            except LiverError as error:
                self._feed(e.RendezvousFailed(str(error)))

    # ---- the core

    def _feed(self, event: e.Event | None) -> None:
        """What has happened, if anything, into the core; what that decides is performed once the
        journal has it."""
        if event is None:
            return
        at_s = self._clock.now_s()
        actions = self.core.handle(event, at_s)
        self._control.steps_done = self.core.recorder.steps_done
        if isinstance(event, e.Tick) and not actions:
            return
        number = self._journal.append(at_s, encode(event), [encode(each) for each in actions])
        if actions:
            self._held.append((number, actions))
        if self._journal_failed:
            self._perform_held()

    def _perform_held(self, up_to: int | None = None) -> None:
        """Performs the actions of entries up to a number; of all where none is given: the journal
        cannot be written, and what is decided already goes on."""
        while self._held and (up_to is None or self._held[0][0] <= up_to):
            _, actions = self._held.popleft()
            for action in actions:
                self._feed(self._performer.perform(action))

    # ---- connections

    def _opened(self, channel: Channel, hello: m.Hello | m.AgentHello) -> None:
        peer: Peer
        event: e.Event
        if isinstance(hello, m.AgentHello):
            peer, event = hello.agent, e.AgentListens(hello.agent)
            expected = self._agents.expects(hello.agent)
        else:
            peer, event = hello.worker, hello
            expected = self.core.expects(hello.worker)
        if not expected or not self._registry.add(peer, channel):
            log.warning("%s on %s is not expected", channel.peer, hello.host)
            channel.close()
            return
        if isinstance(hello, m.Hello):
            took = ", ".join(f"{part} {s:.2f} s" for part, s in hello.boot_timings_s.items())
            log.info("worker %d on %s has booted: %s", hello.worker, hello.host, took)
        else:
            self._agents.listens(hello.agent)
        self._feed(event)

    def _said(self, channel: Channel, message: m.AnyMessage) -> None:
        match self._registry.peer_at(channel):
            case int(worker):
                self._worker_said(worker, message)
            case str(agent):
                self._agent_said(agent, message)
            case None if isinstance(message, m.Hello | m.AgentHello):
                self._opened(channel, message)
            case None:
                pass  # of somebody who was struck off

    def _agent_said(self, agent: str, message: m.AnyMessage) -> None:
        match message:
            case m.Warned(agent=said_by) if said_by == agent:
                self._agent_warned(message)
            case m.LaunchEnded(agent=said_by) if said_by == agent:
                self._agents.heard(message)
            case m.WorkerEnded(agent=said_by) if said_by == agent:
                self._endings[message.worker] = message.how
                if message.worker in self._unexplained:
                    self._worker_gone(message.worker, message.how)
            case _:
                log.warning("agent %s: unexpected %s", agent, message)
                self._registry.drop(agent)

    def _agent_warned(self, message: m.Warned) -> None:
        """The pool finds out what the signal announces."""
        node = self._agents.node_of(message.agent)
        log.warning("agent %s got %s on %s", message.agent, message.signal, node or "its node")
        if node:
            self._services.pool.warned(node, f"SIG{message.signal}", message.at_s)

    def _worker_said(self, worker: int, message: m.AnyMessage) -> None:
        if getattr(message, "worker", None) != worker:
            self._feed(e.ShellFailed(f"worker {worker} sent {message}"))
            return
        timings_s = getattr(message, "timings_s", {})
        if timings_s:
            took = ", ".join(f"{part} {seconds:.3f} s" for part, seconds in timings_s.items())
            log.info("worker %d %s: %s", worker, message.type, took)
        match message:
            case m.Heartbeat():
                pass
            case m.Progress():
                self.core.handoffs.progress(message)
            case m.Saved() | m.NotRestored():
                self._saved_or_restored(message)
            case m.Restored():
                self._feed(message)
                self._saved_or_restored(message)
            case _ if isinstance(message, e.FromWorker):
                self._feed(message)
            case _:
                self._feed(e.ShellFailed(f"worker {worker}: unexpected {message.type}"))

    def _closed(self, channel: Channel, reason: str) -> None:
        """A worker's agent knows better how it ended, and may say so in a moment."""
        match self._registry.peer_at(channel):
            case str(agent):
                self._registry.drop(agent)
            case int(worker):
                how, agent = self._endings.get(worker), self.core.agents.agent_of(worker)
                if how is not None or not agent or not self._agents.can_explain(agent):
                    self._worker_gone(worker, how or reason)
                elif worker not in self._unexplained:
                    limit = Deadline.after(self._clock, EXPLAIN_S, f"the agent of worker {worker}")
                    self._unexplained[worker] = (limit, reason)

    def _give_up_explanations(self) -> None:
        for worker, (deadline, reason) in list(self._unexplained.items()):
            if deadline.expired():
                self._worker_gone(worker, reason)

    def _worker_gone(self, worker: int, reason: str) -> None:
        self._unexplained.pop(worker, None)
        self._feed(e.WorkerGone(worker, reason))

    # ---- checkpoints

    def _saved_or_restored(self, message: m.Saved | m.Restored | m.NotRestored) -> None:
        """A worker's part is on disk, or could not be written; or it holds what it read there, or
        could not read it."""
        generation = message.generation
        world = self.core.world_of(generation)
        if world is None:
            log.warning("worker %d %s generation %d", message.worker, message.type, generation)
        elif isinstance(message, m.Saved):
            self._feed(self._checkpoints.saved(message, world))
        else:
            self._feed(self._checkpoints.restored(message, world.rank_map))

    # ---- operators

    def _asked(self, asked: Asked) -> None:
        if isinstance(asked.request, m.StatusRequest):
            shown = self.core.snapshot(
                self._clock.now_s(), self._performer.last_event, self._journal.error
            )
            asked.answer.set_result(m.Reply(ok=True, text="", data=shown.model_dump()))
            return
        number = self._next_request
        self._next_request += 1
        self._performer.requests[number] = asked
        self._feed(e.OperatorAsked(number, asked.request))

    # ---- the end

    def _see_all_off(self) -> None:
        """Returns when all who were told to exit have gone, or after `exit_s` anyway."""
        deadline = Deadline.after(self._clock, self._config.deadlines.exit_s, "workers to exit")
        while (self._registry.workers or self._working()) and not deadline.expired():
            self._dispatch_next()
        self._perform_held()
        if self._registry.workers:
            log.warning("workers %s have not ended by themselves", self._registry.workers)
        self._agents.dismiss_all()
        while self._agents.leaving() and not deadline.expired():
            self._dispatch_next()

    def _dispatch_next(self) -> None:
        event = self._inbox.get(TICK_S)
        if event is not None:
            self._dispatch(event)
        self._give_up_explanations()

    def _working(self) -> bool:
        """Whether an agent whose workers had all come still runs."""
        return any(map(self._agents.runs, self.core.agents.complete()))
