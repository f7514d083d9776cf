"""What a coordinator finds that comes after one that is gone: a start that has not ended.

The journal has every event that the other one took in, so a core to which they are told again
stands where its core stood. It has what workers said, by number, and what was decided to be told
them, in order: so a conversation with each goes on where it was.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json, to_json

from liver_hpc.errors import ConfigError
from liver_hpc.protocol import messages as m
from liver_hpc.rendezvous.conversation import Conversation
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.codec import decode_event, encode
from liver_hpc.run.entries import Entry
from liver_hpc.run.lifecycle import STARTING
from liver_hpc.run.machine import Run


@dataclass
class Left:
    """A start whose coordinator is gone.

    core: where it stands. host: of the coordinator that is gone. listening: the agents that could
    be talked to, by name; nodes: where agents were started.
    """

    core: Run
    host: str = ""
    listening: dict[str, e.AgentListens] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    _saved: list[dict[str, Any]] = field(default_factory=list)
    _sent: defaultdict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    _heard: dict[int, int] = field(default_factory=dict)

    def lost_with(self, here: str) -> set[str]:
        """The agents of the coordinator's host, which is not `here`: it may be gone, too."""
        return {name for name, on in self.listening.items() if here != self.host == on.host}

    @property
    def saved(self) -> list[m.Saved]:
        """What workers said of checkpoints that were not complete."""
        return [said for each in self._saved if isinstance(said := decode_event(each), m.Saved)]

    def conversations(self) -> dict[int, Conversation]:
        """With each worker that was connected."""
        return {
            worker: Conversation(worker, self._heard.get(worker, 0), self._sent[worker])
            for worker in self.core.agents.present()
        }

    def _tell(self, entry: Entry) -> None:
        """Raises ConfigError where the core decides otherwise."""
        values = entry.event
        if values["type"] == "saved":  # there are many, and a core does not look at digests
            self._saved.append(values)
            values = {**values, "digests": []}
        event = decode_event(values)
        actions = self.core.handle(event, entry.at_s)
        if entry.actions or actions:
            got = _plain([encode(action) for action in actions])
            if got != entry.actions:
                raise ConfigError(f"entry {entry.number}: wanted {entry.actions}, got {got}")
        if entry.said:
            self._heard[entry.event["worker"]] = entry.said
        match event:
            case e.SaidTogether():
                said = zip(event.messages, event.numbers, strict=True)
                self._heard.update({message.worker: number for message, number in said})
            case e.CoordinatorStarted():
                self.host = event.attributes.get("host", "")
            case e.TookOver():
                self.host = event.host
            case e.AgentListens():
                self.listening[event.agent] = event
            case e.CheckpointWritten() | e.CheckpointFailed():
                step = event.step
                self._saved = [each for each in self._saved if each["scalars"]["step"] != step]
        for action in actions:
            self._note(action)

    def _note(self, action: a.Action) -> None:
        match action:
            case a.Send():
                data = m.encode(action.message)
                for worker in action.workers:
                    self._sent[worker].append(data)
            case a.Launch():
                self.nodes.update((each.agent, each.seat.node) for each in action.agents)
            case a.StartAgent():
                self.nodes[action.agent] = action.node
            case a.ForgetGeneration():
                of = action.generation
                self._saved = [each for each in self._saved if each["generation"] != of]


def what_is_left(start: Iterable[Entry], new_core: Callable[[], Run]) -> Left | None:
    """What the entries of a start that has not ended (`entries.last_start`) come to, where workers
    may train on; None where it has not come to train.

    Raises ConfigError where the journal is damaged, or a core of this release decides otherwise
    than it has.
    """
    left = Left(new_core())
    for entry in start:
        left._tell(entry)
    return None if left.core.state is STARTING else left


def _plain(value: Any) -> Any:
    """As a reader of the journal gets it."""
    return from_json(to_json(value, inf_nan_mode="strings"), allow_inf_nan=False)
