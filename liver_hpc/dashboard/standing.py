"""Where a run stands, by its journal alone: the world that trains, the nodes that are held, what
was noted last. No core is played: it would want the model, and the very release that wrote it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from liver_hpc.config.schema import TrainSection
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.report.holdings import HoldingsFold
from liver_hpc.run.entries import Entry
from liver_hpc.run.lifecycle import RECOVERING, STARTING, STOPPING, TRAINING

MOST_NOTES = 12
MOST_WORLDS = 400
MOST_SPANS = 200
"""Of one node: older ones are forgotten."""

Message = Mapping[str, Any]


@dataclass
class WorldSpan:
    """A world, and when it trained; until_s is None while it does."""

    generation: int
    rank_map: RankMap
    from_s: float
    until_s: float | None = None


@dataclass
class Span:
    """A time in which something was so of a node. workers: that trained there. deadline_s: by when
    it was to be left."""

    from_s: float
    until_s: float | None = None
    workers: int = 0
    reason: str = ""
    deadline_s: float | None = None


def _spans() -> deque[Span]:
    return deque(maxlen=MOST_SPANS)


@dataclass
class NodeLine:
    """A node through the run: when it was held, when workers trained there, and when it was to be
    left."""

    name: str
    allocation: str
    held: deque[Span] = field(default_factory=_spans)
    used: deque[Span] = field(default_factory=_spans)
    warned: deque[Span] = field(default_factory=_spans)

    def end(self, at_s: float) -> None:
        for spans in (self.held, self.used, self.warned):
            close(spans, at_s)


def close(spans: deque[Span], at_s: float) -> None:
    if spans and spans[-1].until_s is None:
        spans[-1].until_s = at_s


class Standing:
    """Takes one entry after the other, each once `held` has taken it.

    state: as `RunState` has it, or how the run, or a start of it, has ended; reason: why. train:
    steps and batches, None where the run file could not be read. began_s: the run's first entry.
    last_s: the newest.
    """

    def __init__(self, held: HoldingsFold) -> None:
        self._held = held
        self.name = self.host = self.reason = ""
        self.state: str = STARTING
        self.ended = False
        self.train: TrainSection | None = None
        self.began_s = self.last_s = 0.0
        self.worlds: deque[WorldSpan] = deque(maxlen=MOST_WORLDS)
        self.nodes: dict[str, NodeLine] = {}
        self.notes: deque[tuple[float, str]] = deque(maxlen=MOST_NOTES)

    @property
    def world(self) -> WorldSpan | None:
        """The one that trains, or did last."""
        return self.worlds[-1] if self.worlds else None

    def take(self, entry: Entry) -> None:
        event, at_s = entry.event, entry.at_s
        self.began_s, before_s, self.last_s = self.began_s or at_s, self.last_s or at_s, at_s
        match event["type"]:
            case "step_done":
                if (world := self.world) is not None:
                    # A world that was built anew after an abort has the same members.
                    world.generation = event["generation"]
            case "coordinator_started":
                self._started(event["attributes"], before_s)
            case "node_granted":
                node = event["node"]
                name, allocation = node["name"], node["allocation"]
                line = self.nodes.setdefault(name, NodeLine(name, allocation))
                line.end(at_s)
                line.allocation = allocation
                line.held.append(Span(at_s))
            case "node_warned" if event["node"] in self.nodes:
                warned = self.nodes[event["node"]].warned
                close(warned, event["at_s"])
                warning = Span(event["at_s"], None, 0, event["reason"], event.get("deadline_s"))
                warned.append(warning)
            case "node_gone" if event["node"] in self.nodes:
                self.nodes[event["node"]].end(at_s)
        for action in entry.actions:
            self._decided(action, at_s)

    def _started(self, attributes: Mapping[str, str], before_s: float) -> None:
        """before_s: when the last thing was known of the start before, which may have ended
        suddenly."""
        self._close_all(before_s)
        self.state, self.reason, self.ended = STARTING, "", False
        self.name, self.host = attributes.get("name", ""), attributes.get("host", "")
        self.train = _train(attributes.get("config", ""))

    def _decided(self, action: Message, at_s: float) -> None:
        match action["type"]:
            case "note":
                self.notes.append((at_s, action["text"]))
            case "send":
                self._told(action["message"], at_s)
            case "end":
                self._close_all(at_s)
                self.state, self.reason, self.ended = action["state"], action["reason"], True

    def _told(self, message: Message, at_s: float) -> None:
        """What workers are told says what is to come."""
        match message["type"]:
            case "begin" if message.get("checkpoint") is None:
                self._begins(message["generation"], at_s)
            case "proceed" | "verdict":
                self._begins(message["generation"], at_s)
            case "halt":
                self.state = RECOVERING
                self._close_world(at_s)
            case "stop":
                self.state = STOPPING

    def _begins(self, generation: int, at_s: float) -> None:
        """A world that was being built trains from here on."""
        told = max((w.generation for w in self.worlds if w.until_s is None), default=-1)
        if generation <= told or (rank_map := self._held.rank_maps.get(generation)) is None:
            return  # it was told of already
        self.state = TRAINING
        self._close_world(at_s)
        self.worlds.append(WorldSpan(generation, rank_map, at_s))
        workers = Counter(map(self._held.node_of, rank_map.workers))
        for line in self.nodes.values():
            used = line.used[-1] if line.used and line.used[-1].until_s is None else None
            if workers[line.name] != (used.workers if used is not None else 0):
                close(line.used, at_s)
                if workers[line.name]:
                    line.used.append(Span(at_s, workers=workers[line.name]))

    def _close_world(self, at_s: float) -> None:
        if (world := self.world) is not None and world.until_s is None:
            world.until_s = at_s

    def _close_all(self, at_s: float) -> None:
        self._close_world(at_s)
        for line in self.nodes.values():
            line.end(at_s)


def _train(config: str) -> TrainSection | None:
    """Steps and batches of a resolved run file, which another release may have written; None for
    what is none."""
    try:
        train = yaml.safe_load(config)["train"]
        known = {"steps": train["steps"], "global_batch": train.get("global_batch", 1)}
        known |= {key: train[key] for key in ("rampup", "stop_every_steps") if key in train}
        return TrainSection.model_validate(known)
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, ValueError):
        return None
