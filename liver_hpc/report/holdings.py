"""Which nodes a run has held, and which workers of which world sat there: from its journal's
entries, one after the other. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import yaml

from liver_hpc.layout.coordinates import RankMap
from liver_hpc.protocol.messages import WireRankMap
from liver_hpc.run.entries import COORDINATOR_STARTED, STEP_DONE, Entry
from liver_hpc.run.records import HoldingRecord, PlacementRecord

RANK_MAPS = {"begin": "rank_map", "refill": "rank_map", "prepare": "target"}
"""Messages that tell of a world, and where."""


_MOST_RANK_MAPS = 8
"""Of thousands of workers each is hundreds of kilobytes."""


class _Slot(NamedTuple):
    """What is held: all of a node, or, where that has no number of slots, one agent's `place`th."""

    node: str
    agent: str = ""
    place: int = 0


class HoldingsFold:
    """What is held is known from what Slurm, or this machine, has granted. A machine with any
    number of slots is held by the workers that were launched there, each for itself.

    rank_maps: of the newest worlds that were told of, by generation."""

    def __init__(self) -> None:
        self.closed: list[HoldingRecord] = []
        self.rank_maps: dict[int, RankMap] = {}
        self._open: dict[_Slot, HoldingRecord] = {}
        self._placements: dict[int, list[PlacementRecord]] = {}
        self._unbounded: dict[str, str] = {}  # nodes without a number of slots: their allocation
        self._node_of: dict[str, str] = {}  # of agents
        self._seats: dict[int, _Slot] = {}  # of workers
        self._partitions: Mapping[str, str] = {}
        self._source = -1  # of the newest handoff: its world's generation
        self._last_s = 0.0
        self._unconfirmed: set[_Slot] = set()
        self._restarts = False  # the last start has ended so, and no other has begun
        self._epoch = 0  # the coordinator's

    @property
    def records(self) -> list[HoldingRecord]:
        return [*self.closed, *self._open.values()]

    @property
    def placements(self) -> list[PlacementRecord]:
        return [row for rows in self._placements.values() for row in rows]

    @property
    def nodes(self) -> int:
        """How many are held now."""
        return len({slot.node for slot in self._open} | self._unbounded.keys())

    def allocation_of(self, node: str) -> str | None:
        """What a node that is held came with; None of any other."""
        rows = (row for slot, row in self._open.items() if slot.node == node)
        return next((row.allocation for row in rows), self._unbounded.get(node))

    def workers_of(self, generation: int) -> int:
        """0 for a world that is not known."""
        return sum(row.workers for row in self._placements.get(generation, []))

    def node_of(self, worker: int) -> str:
        """Empty where it is not known."""
        return self._seats[worker].node if worker in self._seats else ""

    def take(self, entry: Entry) -> None:
        """Raises KeyError where an event lacks a field."""
        event, at_s = entry.event, entry.at_s
        if event["type"] == STEP_DONE and not entry.actions:  # of which there may be a million
            self._last_s = at_s
            return
        match event["type"]:
            case str(kind) if kind == COORDINATOR_STARTED:
                self._started(event["attributes"], event.get("epoch", 0))
            case "took_over":
                self._epoch = event["epoch"]
            case "launch_allowed":
                self._close(self._unconfirmed, self._last_s)
            case "node_granted":
                self._granted(event["node"], at_s)
            case "node_gone":
                self._unbounded.pop(event["node"], None)
                self._close({slot for slot in self._open if slot.node == event["node"]}, at_s)
            case "worker_gone" if event["worker"] in self._seats:
                seat = self._seats[event["worker"]]
                self._close({seat} if seat.agent else set(), at_s)
            case "agent_ended":
                self._close({slot for slot in self._open if slot.agent == event["agent"]}, at_s)
            case "launch_failed":
                self._close({slot for slot in self._open if slot.agent in event["lost"]}, at_s)
        for action in entry.actions:
            self._decided(action, at_s)
        self._last_s = at_s

    def _started(self, attributes: Mapping[str, str], epoch: int) -> None:
        """After a restart by the same coordinator the nodes of its job are still held, and are
        granted again; after any other end, which may have been a sudden one, none is."""
        restarted = self._restarts and epoch == self._epoch
        mine = {slot for slot in self._open if not slot.agent} if restarted else set()
        self._close(self._open.keys() - mine, self._last_s)
        self._unconfirmed, self._restarts, self._epoch = mine, False, epoch
        self._unbounded.clear()
        self._partitions = partitions_of(attributes.get("config", ""))

    def _granted(self, node: Mapping[str, Any], at_s: float) -> None:
        name, allocation = node["name"], node["allocation"]
        if node["slots"] is None:
            self._unbounded[name] = allocation
            return
        self._unconfirmed.discard(_Slot(name))
        self._hold(_Slot(name), allocation, node["slots"], at_s)

    def _hold(self, slot: _Slot, allocation: str, slots: int, at_s: float) -> None:
        partition = self._partitions.get(allocation.partition("-")[0] + "-", "")
        partition = self._partitions.get(allocation, partition)
        row = HoldingRecord(slot.node, allocation, partition, slots, at_s, math.nan)
        self._open.setdefault(slot, row)

    def _close(self, slots: set[_Slot], at_s: float) -> None:
        for slot in sorted(slots & self._open.keys()):
            self.closed.append(replace(self._open.pop(slot), returned_s=at_s))

    def _decided(self, action: Mapping[str, Any], at_s: float) -> None:
        match action["type"]:
            case "launch":
                for each in action["agents"]:
                    agent, node = each["agent"], each["seat"]["node"]
                    self._node_of[agent] = node
                    allocation = self._unbounded.get(node)
                    for place in range(len(each["seat"]["slots"]) if allocation else 0):
                        self._hold(_Slot(node, agent, place), allocation or "", 1, at_s)
            case "admit":
                agent = action["agent"]
                node = self._node_of.get(agent, "")
                for place, worker in enumerate(action["workers"]):
                    slot = _Slot(node, agent, place)
                    self._seats[worker] = slot if slot in self._open else _Slot(node)
            case "send" if (where := RANK_MAPS.get(action["message"]["type"])) is not None:
                message = action["message"]
                wire = WireRankMap.model_validate(message[where])
                self._placed(message["generation"], wire.rank_map())
                self._source = message.get("source_generation", -1)
            case "send" if (again := action["message"].get("rebuild_generation")) is not None:
                before = self._placements.get(self._source, [])
                self._placements[again] = [replace(row, generation=again) for row in before]
            case "end":
                not_begun, self._restarts = self._restarts, action["state"] == "restart"
                if not self._restarts:
                    # The end of a start that could not begin says nothing of the one before.
                    self._close({*self._open}, self._last_s if not_begun else at_s)
                    self._unbounded.clear()

    def _placed(self, generation: int, rank_map: RankMap) -> None:
        layout, count = str(rank_map.layout), Counter(map(self.node_of, rank_map.workers))
        self._placements[generation] = [
            PlacementRecord(generation, layout, node, workers)
            for node, workers in sorted(count.items())
        ]
        self.rank_maps[generation] = rank_map
        while len(self.rank_maps) > _MOST_RANK_MAPS:
            del self.rank_maps[next(iter(self.rank_maps))]


def partitions_of(run_file: str) -> dict[str, str]:
    """Of each component of a run file, by its name, and of burst allocations, by "burst-"; of any
    release's run file, and empty for what is none."""
    try:
        slurm = yaml.safe_load(run_file)["cluster"]["slurm"]
        named = {each["name"]: each.get("partition") or "" for each in slurm["components"]}
        burst = slurm.get("burst") or {}
    except (yaml.YAMLError, KeyError, TypeError, AttributeError):
        return {}
    return named | {"burst-": burst.get("partition") or ""}
