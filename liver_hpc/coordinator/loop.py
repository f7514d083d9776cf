"""The coordinator's event loop: brings the run's core its events, and performs what it decides.

Connections are served in threads that only put into the inbox; all else happens here, in one
thread. What the core decides is performed once it is in the journal.
"""

from __future__ import annotations

import logging
import math
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace

from liver_hpc.checkpoint.index import part_key, part_word
from liver_hpc.clock import Deadline, started_ticks
from liver_hpc.cluster.network import control_address
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.agents import NodeAgents
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.coordinator.connections import (
    Asked,
    Called,
    Closed,
    ConnectionServer,
    Control,
    FilesDone,
    Inbox,
    InboxEvent,
    Met,
    Peer,
    PeerRegistry,
    Said,
)
from liver_hpc.coordinator.hearing import Hearing, Words
from liver_hpc.coordinator.performer import Performer, Services
from liver_hpc.coordinator.progress import Progress
from liver_hpc.coordinator.store import StoreService
from liver_hpc.coordinator.takeover import Left
from liver_hpc.errors import LiverError
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.events import WorldRef
from liver_hpc.rendezvous.conversation import LOOK_S, Conversation
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.codec import encode
from liver_hpc.run.directory import CoordinatorAddress
from liver_hpc.run.epoch import SHOWN_EVERY_S, Epoch, NotTakenOver, Superseded
from liver_hpc.run.journal import Written
from liver_hpc.run.lifecycle import STARTING
from liver_hpc.run.machine import Run
from liver_hpc.run.outcome import (
    COORDINATOR_FILE,
    WORLD_FILE,
    Outcome,
    WorldNote,
    write_private_json,
)
from liver_hpc.run.pace import StragglerWatch

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often deadlines, heartbeats and agents are looked at."""
LOST_S = 30.0
"""So long agents are waited for at the end of a run where nodes of it do not answer."""
LED_TO_S = 3.0
"""In so much time all that an agent's word leads to is decided, Slurm's answer included."""
FROZEN_S = 2.0
"""A gap between two looks that only a process that stood still can have."""


def new_core(config: RunConfig, services: Services) -> Run:
    """What decides, of a start that has not begun."""
    recipe = services.recipe
    return Run(config, recipe.spec, recipe.check_layout, rehearsal_bytes=recipe.rehearsal_bytes)


class Coordinator:
    """One start of a run, from the launch of its first workers to the end of its last.

    core: what decides. epoch: of the run in its directory, claimed before anything was read there.
    before: what the starts before it have left; or one whose coordinator is gone while its workers
    train on, and which this one takes over.
    """

    def __init__(
        self,
        config: RunConfig,
        epoch: Epoch,
        secret: bytes,
        services: Services,
        control: Control,
        before: e.Memory | Left,
    ) -> None:
        self._config = config
        self._epoch = epoch
        self._secret = secret
        self._services = services
        self._clock = services.clock
        self._before = before
        left = before if isinstance(before, Left) else None
        self.core = new_core(config, services) if left is None else left.core
        self._control = control
        self._inbox = Inbox()
        self._store = StoreService(services.clock)
        self._registry = PeerRegistry(services.clock)
        self._agents = NodeAgents(
            services.launcher,
            self._registry,
            epoch.run_directory,
            services.clock,
            config.deadlines.heartbeat_s + config.deadlines.exit_s,
            stay=config.workers.warm,
        )
        self._progress = Progress(config, services.clock)
        self._stragglers = StragglerWatch(config.policy.stragglers, self.core.agents.node_of)
        self._checkpoints = Checkpoints(
            config, services.recipe, epoch, services.clock, lambda: self._inbox.put(FilesDone())
        )
        self._performer = Performer(
            services, self._registry, self._agents, self._store, self._checkpoints
        )
        self._hearing = Hearing(
            config=config,
            epoch=epoch.number,
            core=self.core,
            registry=self._registry,
            agents=self._agents,
            progress=self._progress,
            stragglers=self._stragglers,
            checkpoints=self._checkpoints,
            pool=services.pool,
            part_told=self._part_told,
            feed=self._feed,
        )
        self._journal = services.open_journal(self._inbox.put, epoch)
        self._held: deque[tuple[int, list[a.Action]]] = deque()
        self._unsafe: deque[tuple[int, Peer, int]] = deque()  # entries, and whose words they are
        self._agents_words: deque[tuple[float, Peer, int]] = deque()  # when they have led to all
        self._newest = self._written = -1  # entries of the journal
        self._next_request = 0
        self._journal_failed = self._has_taken_over = False
        self._hang_up: Sequence[Callable[[], None]] = ()
        self._noted_generation = -1
        self._next_tick_s = self._next_epoch_s = self._last_tick_s = 0.0
        self._removed: Deadline | None = None  # the run directory, and when that is to be told
        control.reach(self._inbox)

    def run(self) -> Outcome:
        """Runs to the end. Whatever happens, nothing that was launched or opened is left; where
        that cannot be seen to, the outcome's reason says so.

        Raises Superseded where another coordinator has taken over; then all is left to that one.
        Raises NotTakenOver where it could not take over: then all is left as it was.
        """
        left_over = ""
        try:
            with ExitStack() as stack:
                try:
                    self._open(stack)
                    while self._performer.outcome is None:
                        self._turn()
                        self._control.turns += 1
                except Superseded:
                    self._leave_all(stack)
                    raise
                except (LiverError, OSError) as error:
                    log.exception("the run failed")
                    if isinstance(self._before, Left) and not self._has_taken_over:
                        self._leave_all(stack)
                        raise NotTakenOver(str(error)) from error
                    self._feed(e.ShellFailed(str(error)))
                    self._perform_held()
                finally:
                    self._control.turns = 0
        except (Superseded, NotTakenOver):
            raise
        except (LiverError, OSError) as error:  # in closing: the run itself ended otherwise
            if self._performer.outcome is None:
                raise
            log.exception("not all that was launched or opened could be ended")
            left_over = f"; not all could be ended: {error}"
        assert self._performer.outcome is not None
        return replace(self._performer.outcome, reason=self._performer.outcome.reason + left_over)

    def _leave_all(self, stack: ExitStack) -> None:
        """To another coordinator, to whom all that there is belongs."""
        stack.pop_all()
        for hang_up in self._hang_up:
            hang_up()
        self._journal.close(self._config.deadlines.control_s)  # it writes no more

    def _open(self, stack: ExitStack) -> None:
        services, control_s = self._services, self._config.deadlines.control_s
        self._check_epoch()  # another one may have the run since this one read, or ended a start
        # Called from the last to the first: nodes go back once nothing runs on them any more.
        for close in (
            lambda: self._journal.close(control_s),
            self._close_checkpoints,
            services.rendezvous.close,
            services.pool.close,
            self._close_launcher,
        ):
            stack.callback(close)
        connections = ConnectionServer(self._inbox, self._store, control_s)
        address = control_address(self._config.network, self._config.cluster.kind)
        server = ControlServer(address, self._secret, connections.handle)
        closes = (
            connections.close,
            server.close,
            connections.settle,
            self._inbox.close,
            self._store.close,
        )
        for close in closes:
            stack.callback(close)
        self._hang_up = (self._performer.hang_up, *closes[::-1])
        stack.callback(self._see_all_off)
        stack.callback(lambda: services.pool.want(0))
        self._performer.address = server.address
        host, port = server.address
        pid, number = os.getpid(), self._epoch.number
        here = CoordinatorAddress(host, port, pid, socket.gethostname(), number, started_ticks(pid))
        write_private_json(self._epoch.run_directory / COORDINATOR_FILE, asdict(here))
        services.rendezvous.start(lambda identity: self._inbox.ask(Met(identity), control_s))
        if isinstance(self._before, Left):
            self._take_over(self._before)
            self._has_taken_over = True
        else:
            services.rendezvous.check()  # joiners come at once
            self._begin(self._before)
        self._look_from_now_on()

    def _begin(self, memory: e.Memory) -> None:
        with suppress(OSError):  # it is for whoever lists runs: none trains now
            (self._epoch.run_directory / WORLD_FILE).unlink(missing_ok=True)
        self._feed(
            e.CoordinatorStarted(
                attributes=dict(self._services.attributes),
                checkpoints=str(self._checkpoints.directory),
                resumed=self._checkpoints.open(memory.wrote),
                memory=memory,
                epoch=self._epoch.number,
            )
        )
        self._services.pool.start(self._inbox.put)
        while (event := self._inbox.get(0.0)) is not None:  # the nodes that are held already
            self._dispatch(event)
        self._feed(e.LaunchAllowed())

    def _take_over(self, left: Left) -> None:
        """Goes on with what another coordinator has left, once all who may still live have called,
        or had the time to."""
        self._feed(e.TookOver(self._epoch.number, os.getpid(), socket.gethostname()))
        self._checkpoints.take_over(lambda generation: self.core.world_of(generation) is not None)
        for message in left.saved:
            self._hearing.saved_or_restored(message)
        self._take_back(left)
        limits, doubtful = self._config.deadlines, left.lost_with(socket.gethostname())
        limit = Deadline.after(self._clock, limits.coordinator_s, "who was left")
        soon = Deadline.after(self._clock, limits.heartbeat_s + 2 * LOOK_S, "the lost one's node")
        while not limit.expired() and self._may_still_call(doubtful if soon.expired() else ()):
            self._look_at_epoch()
            if (event := self._inbox.get(TICK_S)) is not None:
                self._dispatch(event)
            self._registry.flush()
        missing = ", ".join(sorted(map(str, self._registry.away())))
        number = self._epoch.number
        log.info("coordinator %d has taken over; it misses %s", number, missing or "nobody")
        for launch in self.core.agents.running():
            self._agents.declare_lost(launch)
        self._feed(e.Regained())

    def _part_told(self, saved: m.Saved, world: WorldRef) -> None:
        """Of a checkpoint that another coordinator has left: rank 0 of the world may wait for it
        still, and what it was to be told went with that one's store."""
        if isinstance(self._before, Left) and not self._has_taken_over:
            rank = world.rank_map.workers.index(saved.worker)
            key = part_key(world.generation, saved.scalars.step, rank)
            self._store.put(key, part_word(saved.error))

    def _take_back(self, left: Left) -> None:
        """Nodes, agents and workers: all count as away until they call."""
        nodes = self.core.elastic.nodes
        known = {name: held.node.allocation for name, held in nodes.items()}
        granted: set[str] = set()

        def tell(event: e.PoolEvent) -> None:
            if isinstance(event, e.NodeGranted):
                granted.add(node := event.node.name)
                if known.pop(node, None) == event.node.allocation:
                    return  # it is not as new: the core knows of its warnings
            self._inbox.put(event)

        self._services.pool.start(tell, {name: held.warning for name, held in nodes.items()})
        known.clear()
        for node in {*nodes} - granted:
            self._feed(e.NodeGone(node, "it was taken while there was no coordinator"))
        self._services.pool.want(max(0, self.core.elastic.wanted))
        for node in self.core.elastic.drained:
            self._services.pool.avoid(node)
        for worker, conversation in left.conversations().items():
            self._registry.remember(worker, conversation)
        for agent, listens in left.listening.items():
            if self._agents.adopt(agent, left.nodes[agent], listens):
                self._registry.remember(agent, Conversation(heard=None))
        for held in self.core.elastic.nodes.values():  # a node whose agent is adopted is in use
            if held.given_back:  # but what that came to is not known
                self._agents.give_back(held.node.name)
                self._services.pool.give_back(held.node.name)

    def _may_still_call(self, but: Collection[str]) -> bool:
        """Whether somebody is away whose agent lives, or may live, and is none of these."""
        for peer in self._registry.away():
            agent = peer if isinstance(peer, str) else self.core.agents.agent_of(peer)
            if agent not in but and self._agents.lives(agent):
                return True
        return False

    # ---- one turn

    def _turn(self) -> None:
        event = self._inbox.get(TICK_S)
        stood_still = self._clock.now_s() - self._last_tick_s > FROZEN_S
        if stood_still:
            self._check_epoch()
            self._wake()  # before anything comes of what was heard
        if event is not None:
            self._dispatch(event)
        if not stood_still and (event is None or self._clock.now_s() >= self._next_tick_s):
            self._next_tick_s = self._clock.now_s() + TICK_S
            self._tick()
        self._registry.flush()

    def _wake(self) -> None:
        """It was this process that stood still (a suspended machine, a slow disk): what was sent
        meanwhile has not been read yet, and no deadline has passed before it is."""
        self._feed(e.StoodStill(self._last_tick_s))
        self._registry.excuse_all()
        self._agents.excuse_all()
        self._look_from_now_on()

    def _look_from_now_on(self) -> None:
        self._progress.moved()
        self._last_tick_s = self._clock.now_s()

    def _dispatch(self, event: InboxEvent) -> None:
        match event:
            case Called():
                self._hearing.called(event.channel, event.calls)
            case Said():
                self._hearing.said(event)
            case Closed():  # who lives calls again
                self._registry.lost(event.channel, event.reason)
            case Met():
                self._performer.meetings.append(event)
                who = event.identity
                self._feed(e.AgentMet(who.agent, who.workers))
            case Asked():
                self._asked(event)
            case Written():
                self._written = event.number
                self._perform_held(event.number)
                if self._journal_failed:
                    self._journal_failed = False
                    self._feed(e.JournalFailed(""))
            case FilesDone():
                for found in self._checkpoints.found():
                    self._feed(found)
            case Superseded():
                raise event
            case e.JournalFailed():
                self._check_epoch()  # what comes of it now stands in no journal
                self._journal_failed = True
                self._perform_held()
                self._feed(event)
            case _:
                self._feed(event)

    def _tick(self) -> None:
        looked = self._look_at_epoch()
        now_s = self._clock.now_s()
        if now_s - self._last_tick_s > FROZEN_S:  # a disk was slow, this one or that of a dispatch
            self._wake()
            return
        self._last_tick_s = now_s
        if looked:
            self._note_agents_words(now_s)
            self._registry.tell_what_is_safe()
        self._store.expire()
        self._look_at_agents()
        self._hearing.look_at_the_away()
        self._feed(e.Tick())
        world, named = self.core.comparable_world, self.core.stragglers.named
        for found in self._stragglers.look(world, named, self.core.recorder.steps_done, now_s):
            self._feed(found)
        if self._inbox.empty():  # else the heartbeat may be in there
            self._look_at_the_silent()
            self._look_at_progress()

    def _look_at_epoch(self) -> bool:
        """Whether it was time to. Raises Superseded."""
        if self._clock.now_s() < self._next_epoch_s:
            return False
        self._check_epoch()
        self._look_at_directory()
        self._next_epoch_s = self._clock.now_s() + SHOWN_EVERY_S
        return True

    def _check_epoch(self) -> None:
        """Raises Superseded where there is another coordinator. Where a file system does not say,
        it is asked again a second later; the journal, before anything comes of an entry."""
        try:
            self._epoch.check()
            self._epoch.show()
        except OSError as error:
            log.warning("whether there is another coordinator is not known now: %s", error)

    def _look_at_directory(self) -> None:
        """A run whose directory somebody has removed or moved stops: no command finds it any more.
        One whose directory is gone with its file system trains on, until that is back."""
        try:
            if not self._epoch.is_removed():
                self._removed = None
                return
        except OSError:
            return  # it is asked again a second later
        limit_s = self._config.deadlines.coordinator_s
        if self._removed is None:
            self._removed = Deadline.after(self._clock, limit_s, "the run directory")
        elif self._removed.expired():
            self._removed = None
            self._feed(e.StopSignalled(self._epoch.removed_text, checkpoint=True))

    def _look_at_the_silent(self) -> None:
        """A machine may vanish without closing its sockets."""
        limit_s = self._config.deadlines.heartbeat_s
        # A look comes after a tick, or when the inbox is empty: up to two ticks late.
        silent = self._registry.silent(max(limit_s - 2 * TICK_S, TICK_S))
        away = [peer for peer in self._registry.away() if self._registry.away_s(peer) > limit_s]
        self._agents.silent = {peer for peer in (*silent, *away) if isinstance(peer, str)}
        for peer in silent:
            reason = f"silent for {limit_s:g} s"
            if isinstance(peer, int):
                if self.core.agents.agent_of(peer):  # else it was told to go
                    self._hearing.worker_gone(peer, reason)
            else:
                for worker in self._registry.workers_of(peer):
                    self._hearing.worker_gone(worker, f"its agent {peer} is {reason}")

    def _look_at_progress(self) -> None:
        held_up = self._progress.held_up(self.core)
        self._feed(held_up)
        if held_up is not None and self._config.deadlines.step_s is not None:
            for worker in held_up.workers:
                self._hearing.worker_gone(worker, f"it holds the others up: {held_up.text}")

    def _look_at_agents(self) -> None:
        """Tells the core of agents that have ended, and of a rendezvous that nobody can come to."""
        self._agents.start_those_due()
        for ended in self._agents.ended():
            self._feed(ended)
        for node, why in self._agents.unhealthy().items():
            self._services.pool.reject(node, why)
        for node, why in self._agents.failing().items():
            held = self.core.elastic.nodes.get(node)
            if held is not None and held.node.burst:  # else it would have the others wait for it
                self._agents.give_back(node)
                self._services.pool.reject(node, f"workers fail in boot: {why}")
        if self.core.awaits_joiners:
            try:
                self._services.rendezvous.check()
            except LiverError as error:
                self._feed(e.RendezvousFailed(str(error)))

    # ---- the core

    def _feed(self, event: e.Event | None, *said: Words) -> None:
        """What has happened, if anything, into the core; what that decides is performed once the
        journal has it. said: which workers' words it is, and their numbers; of an agent, without
        an event."""
        at_s = self._clock.now_s()
        if event is None:
            self._agents_words.extend((at_s + LED_TO_S, *word) for word in said)
            return
        actions = self.core.handle(event, at_s)
        self._control.steps_done = self.core.recorder.steps_done
        if isinstance(event, e.Tick) and not actions:
            return
        encoded = [encode(each) for each in actions]
        own = said[0][1] if len(said) == 1 else 0
        number = self._newest = self._journal.append(at_s, encode(event), encoded, own)
        self._unsafe.extend((number, *word) for word in said)
        if actions:
            self._held.append((number, actions))
        if self._journal_failed:
            self._perform_held()
        if self.core.world is not None and self.core.world.generation != self._noted_generation:
            self._note_world(self.core.world, at_s)

    def _note_world(self, world: WorldRef, at_s: float) -> None:
        """For whoever lists runs; training goes on where it cannot be written."""
        if self.core.state is STARTING:  # it reads its checkpoint
            return
        self._noted_generation, rank_map = world.generation, world.rank_map
        kind, steps = self._config.cluster.kind, self._config.train.steps
        layout, workers = str(rank_map.layout), len(rank_map.workers)
        done = self.core.recorder.steps_done
        note = WorldNote(world.generation, layout, workers, done, steps, at_s, kind)
        try:
            note.write(self._epoch.run_directory)
        except OSError as error:
            log.warning("the world that trains cannot be noted: %s", error)

    def _perform_held(self, up_to: int | None = None) -> None:
        """Performs the actions of entries up to a number; of all where none is given: the journal
        cannot be written, and what is decided already goes on."""
        self._note_what_is_safe()
        while self._held and (up_to is None or self._held[0][0] <= up_to):
            _, actions = self._held.popleft()
            for action in actions:
                self._feed(self._performer.perform(action))

    def _note_agents_words(self, now_s: float) -> None:
        """Those that have led to all that they lead to are safe once that is written."""
        while self._agents_words and self._agents_words[0][0] <= now_s:
            _, agent, number = self._agents_words.popleft()
            self._unsafe.append((self._newest, agent, number))
        self._note_what_is_safe()

    def _note_what_is_safe(self) -> None:
        while self._unsafe and self._unsafe[0][0] <= self._written:
            _, peer, number = self._unsafe.popleft()
            self._registry.is_safe(peer, number)

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
        for worker in {*self._registry.workers} - {*self.core.agents.present()}:
            self._registry.drop(worker, "the run has ended")  # it has called, and said no more
        while (self._registry.workers or self._working()) and not deadline.expired():
            self._dispatch_next()
        self._perform_held()
        if self._registry.workers:
            log.warning("workers %s have not ended by themselves", self._registry.workers)
        self._agents.dismiss_all()
        while self._agents.leaving() and not deadline.expired():
            self._dispatch_next()

    def _close_launcher(self) -> None:
        """Slurm knows of a lost node later than we do, and of the end of what it had started there:
        the next start wants nodes that Slurm holds for lost, an end does not."""
        outcome = self._performer.outcome
        restarts = outcome is not None and outcome.state == a.Ending.RESTART
        hurries = self._agents.unreachable() and not restarts
        self._services.launcher.close(LOST_S if hurries else math.inf)

    def _close_checkpoints(self) -> None:
        """A run that is finished has no next start, which would remove what is left."""
        deadlines, outcome = self._config.deadlines, self._performer.outcome
        finished = outcome is not None and outcome.state == a.Ending.FINISHED
        removals_s = deadlines.boundary_s if finished else deadlines.control_s
        self._checkpoints.close(deadlines.control_s, removals_s)

    def _dispatch_next(self) -> None:
        event = self._inbox.get(TICK_S)
        if event is not None:
            self._dispatch(event)
        self._hearing.look_at_the_away()
        self._registry.flush()

    def _working(self) -> bool:
        """Whether an agent whose workers had all come still runs."""
        return any(map(self._agents.runs, self.core.agents.complete()))
