"""The outside world, and what the run's core has decided, done there: sent, launched, answered."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from liver_hpc.clock import Clock
from liver_hpc.cluster.launcher import Launcher, NotLaunched
from liver_hpc.cluster.pool import NodePool
from liver_hpc.coordinator.agents import NodeAgents
from liver_hpc.coordinator.checkpoints import Checkpoints
from liver_hpc.coordinator.connections import Asked, InboxClosed, Met, PeerRegistry
from liver_hpc.coordinator.store import StoreService
from liver_hpc.errors import MeetingError
from liver_hpc.protocol.messages import Reply
from liver_hpc.recipes.base import Recipe
from liver_hpc.rendezvous.base import Answer as MeetingAnswer
from liver_hpc.rendezvous.base import Rendezvous
from liver_hpc.run import actions as a
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.events import CheckpointFailed, LaunchFailed
from liver_hpc.run.journal import Journal, JournalNews
from liver_hpc.run.outcome import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Services:
    """What a coordinator works with. It closes all but clock and recipe at its end.

    open_journal: makes the journal, which is told whom to tell. attributes: facts for the record.
    """

    clock: Clock
    recipe: Recipe
    launcher: Launcher
    rendezvous: Rendezvous
    open_journal: Callable[[Callable[[JournalNews], None], Epoch], Journal]
    attributes: Mapping[str, str] = field(default_factory=dict)
    pool: NodePool = field(default_factory=NodePool)


class Performer:
    """Performs one action after the other; used by the event loop alone.

    address: of the control server. meetings, requests: who waits for an answer, agents in the order
    in which they came and operators by number. last_event: the newest note. outcome: set once the
    run, or this start of it, is over.
    """

    def __init__(
        self,
        services: Services,
        registry: PeerRegistry,
        agents: NodeAgents,
        store: StoreService,
        checkpoints: Checkpoints,
    ) -> None:
        self.address = ("", 0)
        self.meetings: deque[Met] = deque()
        self.requests: dict[int, Asked] = {}
        self.last_event = ""
        self.outcome: Outcome | None = None
        self._services = services
        self._registry = registry
        self._agents = agents
        self._store = store
        self._checkpoints = checkpoints

    def hang_up(self) -> None:
        """Nobody who waits for an answer gets one."""
        for met in self.meetings:
            met.answer.set_exception(InboxClosed())
        for asked in self.requests.values():
            asked.answer.set_exception(InboxClosed())

    def perform(self, action: a.Action) -> LaunchFailed | CheckpointFailed | None:
        """Returns what has come of it that the core has to hear of."""
        services = self._services
        match action:
            case a.Send():
                self._registry.send(action.workers, action.message)
            case a.Launch():
                return self._launch(action)
            case a.StartAgent():
                self._agents.start(action.agent, action.node)
            case a.Admit():
                self._admit(action)
            case a.TurnAway():
                log.warning("turned away: %s", action.reason)
                self.meetings.popleft().answer.set_exception(MeetingError(action.reason))
            case a.EndAgent():
                self._agents.end(action.agent, action.reason)
            case a.KillAgent():
                self._agents.kill(action.agent)
            case a.Disconnect():
                self._registry.drop(action.worker, "it is of no more use")
            case a.Answer():
                within_s = action.stops_within_s
                data = {} if within_s is None else {"stops_within_s": within_s}
                reply = Reply(ok=action.ok, text=action.text, data=data)
                asked = self.requests.pop(action.number, None)
                if asked is not None:  # else another coordinator was asked
                    asked.answer.set_result(reply)
            case a.WantWorkers():
                services.pool.want(action.workers)
            case a.GiveBack():
                self._agents.give_back(action.node)
                services.pool.give_back(action.node)
            case a.Avoid():
                services.pool.avoid(action.node)
            case a.Readmit():
                services.pool.readmit(action.node)
            case a.ForgetGeneration():
                self._store.forget(f"g{action.generation}/")
                return self._checkpoints.forget(action.generation)
            case a.Note():
                log.info("%s", action.text)
                self.last_event = action.text
            case a.Log():
                log.info("%s", action.text)
            case a.End():
                self.outcome = Outcome(str(action.state), action.reason, action.step)
            case a.Record() | a.RecordAll() | a.AttemptBegins() | a.StepPhase() | a.Remember():
                pass  # they are in the journal
            case _:
                assert_never(action)
        return None

    def _launch(self, launch: a.Launch) -> LaunchFailed | None:
        try:
            self._agents.launch(launch.agents)
        except NotLaunched as error:
            names = tuple(each.agent for each in launch.agents)
            return LaunchFailed(names, error.agents, str(error))
        return None

    def _admit(self, admit: a.Admit) -> None:
        met = self.meetings.popleft()
        log.info("agent %s on %s: workers %s", admit.agent, met.identity.host, list(admit.workers))
        host, port = self.address
        answer = MeetingAnswer(worker_ids=admit.workers, control_host=host, control_port=port)
        met.answer.set_result(answer)
