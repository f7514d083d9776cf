"""What agents and workers say becomes events of the core.

Of who may not say something, or breaks the rules of a conversation, nothing comes of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from liver_hpc.cluster.pool import NodePool
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.agents import NodeAgents
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.coordinator.connections import Peer, PeerRegistry, Said
from liver_hpc.coordinator.progress import Progress
from liver_hpc.errors import ProtocolError
from liver_hpc.host.version import version_fault
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.events import WorldRef
from liver_hpc.rendezvous.channel import ITSELF, Channel, ChannelClosed, Part
from liver_hpc.run import events as e
from liver_hpc.run.epoch import Superseded
from liver_hpc.run.machine import Run
from liver_hpc.run.pace import StragglerWatch

log = logging.getLogger(__name__)

Words = tuple[Peer, int]
"""Who has said something, and the number that it has in their conversation."""


@dataclass(frozen=True)
class Hearing:
    """Used by the event loop alone.

    epoch: of this coordinator. part_told: hears of each part of a checkpoint. feed: takes an event
    into the core, and which workers' words it is; without one, the words of an agent, of which
    anything may have come.
    """

    config: RunConfig
    epoch: int
    core: Run
    registry: PeerRegistry
    agents: NodeAgents
    progress: Progress
    stragglers: StragglerWatch
    checkpoints: Checkpoints
    pool: NodePool
    part_told: Callable[[m.Saved, WorldRef], None]
    feed: Callable[[e.Event | None, *tuple[Words, ...]], None]

    def called(self, channel: Channel, calls: m.Calls) -> None:
        """An agent has connected, for the first time or again. Raises Superseded where it has
        been with a later coordinator."""
        if calls.epoch > self.epoch:
            raise Superseded(self.epoch)
        refused = version_fault(calls.version, f"agent {calls.agent}")
        if calls.agent not in self.registry:
            if not self.agents.expects(calls.agent):
                refused = "it is not expected"
            elif calls.epoch == self.epoch:
                # What either has said to the other is not known any more.
                refused = "it was given up"
        if refused:
            log.warning("%s is told to end: %s", channel.peer, refused)
            with suppress(ChannelClosed):
                channel.send(m.Exit(reason=refused))
            channel.close()
            return
        for worker in calls.workers:
            if worker not in self.registry and self.core.expects(worker):
                self.registry.add(worker, calls.agent)
        lacking = self.registry.connect(channel, calls, self.epoch)
        self.agents.called(calls.agent, calls.launches)
        if lacking:
            known = (
                f"workers {ids_text(lacking)} were told more than the journal says, which could not"
            )
            self.feed(e.ShellFailed(f"{known} be written: this coordinator cannot take over"))

    def said(self, said: Said) -> None:
        """What has come at once; what workers say of a handoff or a recovery is one event."""
        agent = self.registry.agent_at(said.channel)
        if agent is None:
            return  # somebody who was struck off
        together: list[tuple[m.OfManyAtOnce, int]] = []
        for part, message in said.came:
            peer = agent if part.who == ITSELF else part.who
            if not self._is_new(peer, agent, part, message) or message is None:
                continue
            if isinstance(message, m.OfManyAtOnce) and message.worker == peer:
                together.append((message, part.number))
                continue
            self._feed_together(together)
            if isinstance(peer, int):
                self._worker_said(peer, message, part.number)
            else:
                self._agent_said(peer, message)
                self.feed(None, (peer, part.number))
        self._feed_together(together)
        if agent in self.registry:
            self._miss_forgotten(agent)

    def _miss_forgotten(self, agent: str) -> None:
        """An agent that has called without one of its workers knows that this has ended; how, it
        has said by now, unless another coordinator was told."""
        for worker in self.registry.away():
            if not isinstance(worker, int):
                continue
            if self.agents.of(self.core.agents.agent_of(worker)) == agent:
                self.worker_gone(worker, "its agent has called without it")

    def _is_new(self, peer: Peer, agent: str, part: Part, message: m.AnyMessage | None) -> bool:
        """Whether a part is to be looked at; of who breaks the rules nothing is any more."""
        if peer not in self.registry and not self._is_first_word(peer, agent, message):
            return False
        try:
            return self.registry.take(peer, part)
        except ProtocolError as error:
            log.error("agent %s: %s", agent, error)
            self.registry.drop(peer, str(error))
            if isinstance(peer, int):
                self.worker_gone(peer, str(error))
            return False

    def _feed_together(self, said: list[tuple[m.OfManyAtOnce, int]]) -> None:
        """Once; the list is empty afterwards."""
        if said:
            self.progress.moved()
        if len(said) == 1:
            ((message, number),) = said
            self.feed(message, (message.worker, number))
        elif said:
            messages, numbers = zip(*said, strict=True)
            words = tuple((message.worker, number) for message, number in said)
            self.feed(e.SaidTogether(messages, numbers), *words)
        said.clear()

    def _is_first_word(self, peer: Peer, agent: str, message: m.AnyMessage | None) -> bool:
        """Of a worker that is expected, whose conversation begins; another one is told to go."""
        if not isinstance(peer, int) or agent not in self.registry:
            return False  # an agent that was dropped just now, or a worker that it speaks for
        if self.core.expects(peer) and isinstance(message, m.Hello):
            self.registry.add(peer, agent)
            return True
        self.registry.turn_away(agent, peer, "it is not expected")
        return False

    def _agent_said(self, agent: str, message: m.AnyMessage) -> None:
        match message:
            case m.AgentHello(agent=said_by) if said_by == agent:
                self.agents.listens(agent)
                self.feed(e.AgentListens(agent, message.host, message.pid))
            case m.Warned(agent=said_by) if said_by == agent:
                self._agent_warned(message)
            case m.LaunchEnded(agent=said_by) if said_by == agent:
                self.agents.heard(message)
            case m.WorkerEnded(agent=said_by) if said_by == agent:
                self.worker_gone(message.worker, message.how)
            case _:
                log.warning("agent %s: unexpected %s", agent, message)
                self.registry.drop(agent, "it has said what agents do not say")

    def _agent_warned(self, message: m.Warned) -> None:
        """The pool finds out what the signal announces."""
        node = self.agents.node_of(message.agent)
        log.warning("agent %s got %s on %s", message.agent, message.signal, node or "its node")
        if node:
            self.pool.warned(node, f"SIG{message.signal}", message.at_s)

    def _worker_said(self, worker: int, message: m.AnyMessage, number: int) -> None:
        if getattr(message, "worker", None) != worker:
            self.feed(e.ShellFailed(f"worker {worker} sent {message}"))
            return
        if isinstance(message, m.Heartbeat):
            self.progress.beat(message)
            if message.forward is not None:
                self.stragglers.heard(worker, message.forward)
            return
        self.progress.moved()
        match message:
            case m.Progress():
                self.core.handoffs.progress(message)
            case m.Hello() if not self.core.expects(worker):
                self.registry.drop(worker, "it is not expected")
            case m.Hello():
                took = ", ".join(f"{part} {s:.2f} s" for part, s in message.boot_timings_s.items())
                log.info("worker %d on %s has booted: %s", worker, message.host, took)
                self.feed(message, (worker, number))
            case m.Finished():
                # What all have saved has come to something by then; nobody trains any more.
                if self._is_the_last(worker):
                    for event in self.checkpoints.settle(self.config.deadlines.boundary_s):
                        self.feed(event)
                self.feed(message, (worker, number))
            case m.Saved() | m.Restored() | m.NotRestored():
                self.feed(message, (worker, number))
                self.saved_or_restored(message)
            case _ if isinstance(message, m.WorkerEvent):
                self.feed(message, (worker, number))
            case _:
                self.feed(e.ShellFailed(f"worker {worker}: unexpected {message.type}"))

    def _is_the_last(self, worker: int) -> bool:
        """Whether all the others of the world that trains have finished."""
        world = self.core.handoffs.committed_world or self.core.world
        finished = {*self.core.agents.finished, worker}
        return world is None or finished.issuperset(world.rank_map.workers)

    def look_at_the_away(self) -> None:
        """Gives up who has not called again in time, or never will."""
        limits = self.config.deadlines
        for peer, reason in self.registry.away().items():
            if isinstance(peer, str):
                if self.registry.away_s(peer) > limits.coordinator_s:
                    self.registry.drop(peer, reason)
                    self.agents.given_up.add(peer)
                continue
            agent = self.core.agents.agent_of(peer)
            late = self.registry.away_s(peer) > limits.heartbeat_s
            if late or not agent or not self.agents.lives(agent):
                self.worker_gone(peer, reason)

    def worker_gone(self, worker: int, reason: str) -> None:
        """Nothing that it says from now on counts."""
        self.registry.drop(worker, reason)
        self.feed(e.WorkerGone(worker, reason))

    def saved_or_restored(self, message: m.Saved | m.Restored | m.NotRestored) -> None:
        """A worker's part is on disk, or could not be written; or it holds what it read there, or
        could not read it."""
        generation = message.generation
        world = self.core.world_of(generation)
        if world is None:
            log.warning("worker %d %s generation %d", message.worker, message.type, generation)
        elif isinstance(message, m.Saved):
            last = self.core.recorder.last_step
            is_finite = last is None or math.isfinite(last.loss + last.grad_norm)
            self.part_told(message, world)
            self.checkpoints.saved(message, world, is_finite)
        else:
            self.checkpoints.restored(message, world.rank_map)
