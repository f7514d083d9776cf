"""A worker's side: the worlds that it sits in, and what the benchmark has them do."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks.transitions.proof import Held
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.layout.tensors import Box, ModelSpec
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.recipes.base import Recipe, load_recipe
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import group_wire
from liver_hpc.world import megatron
from liver_hpc.world.derive import Derivation
from liver_hpc.world.device import Device
from liver_hpc.world.groups import Group, install_sentinel
from liver_hpc.world.network import Network
from liver_hpc.world.steps import Flags
from liver_hpc.world.world import World

COLLECTIVE_S = 60.0
"""The longest that a worker waits for another one inside a group."""

dist: Any = importlib.import_module("torch.distributed")  # its stubs know few of its names
_SPEC = TypeAdapter(ModelSpec)


@dataclass
class _Place:
    """A world by name; world: None on a worker that has no seat in it."""

    rank_map: RankMap
    world: World | None
    kept: dict[tuple[str, int, Box], torch.Tensor]


class Seat:
    """This process as one worker. Worlds have names; on a worker without a seat in one, what is
    asked of it does nothing and gives None.

    directory: shared by all workers; they meet there, and keep their data.
    """

    def __init__(self, worker: int, device: Device, directory: Path) -> None:
        install_sentinel(worker)
        megatron.prepare_process(seed=1)
        self._worker = worker
        self._device = device
        self._network = Network(device, "127.0.0.1")
        self._directory = directory
        self._recipe: Recipe | None = None
        self._places: dict[str, _Place] = {}
        self._transfer: tuple[Transport, Group] | None = None

    # ---- the model

    def open(self, config: RunConfig) -> None:
        """Takes up another model, and closes all worlds of the last one. Opens its data."""
        for name in [*self._places]:
            self.close(name)
        self._recipe = load_recipe(config)
        self._recipe.open(self._directory)

    def derive(self, worker: int, layouts: Sequence[Layout]) -> bytes | None:
        """On one worker: the spec of the model for these layouts, as runs keep it."""
        if worker != self._worker:
            return None
        try:
            return _SPEC.dump_json(Derivation(self._used).spec(layouts))
        finally:
            install_sentinel(self._worker)

    def take_spec(self, spec: bytes) -> None:
        self._used.spec = _SPEC.validate_json(spec)

    @property
    def _used(self) -> Recipe:
        assert self._recipe is not None, "no model has been opened"
        return self._recipe

    # ---- worlds

    def build(self, name: str, rank_map: RankMap, generation: int, previous: str | None) -> None:
        """Builds, rehearses and connects a world, whose state is undefined then. Collective over
        the rank map. previous: the world whose groups it may keep."""
        world = None
        self._used.check_layout(rank_map.layout)
        if self._worker in rank_map.workers:
            world = World(self._used, rank_map, self._worker, generation, self._device)
            world.warm_up()
            before = self._places[previous].world if previous is not None else None
            book = before.book if before is not None else None
            world.book.connect(self._network, self._store(generation), COLLECTIVE_S, book)
        self._places[name] = _Place(rank_map, world, {})

    def close(self, name: str) -> None:
        world = self._places.pop(name).world
        if world is not None:
            world.close()

    def start(self, name: str) -> None:
        """Fills a world from the run's seed, as the first world of a run."""
        world = self._places[name].world
        if world is not None:
            world.state.initialize(self._used.initial, self._used.config.train.seed)
            world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))

    def train(self, name: str, steps: range) -> list[tuple[float, float]] | None:
        """Loss and gradient norm of each step. Collective over the world."""
        world = self._places[name].world
        if world is None:
            return None
        results = [
            world.agree(world.forward_backward(step), world.update(step), Flags()) for step in steps
        ]
        world.settle()
        return [(result.loss, result.grad_norm) for result in results]

    # ---- state

    def held(self, name: str, step: int) -> Held | None:
        """What a world has at the boundary after `step` steps."""
        world = self._places[name].world
        if world is None:
            return None
        hashed = hashlib.sha256()
        for box in self._boxes(world):
            hashed.update(repr(box).encode())
            # A copy: memory that numpy has seen cannot be freed before its tensor.
            hashed.update(world.state.view(*box).clone().view(torch.uint8).numpy().tobytes())
        digests = world.state.digests(self._used.spec.kinds)
        return Held(hashed.hexdigest(), digests, world.scalar_state(step))

    def keep(self, name: str) -> None:
        """Keeps a copy of a world's tensors for `put_back`."""
        place = self._places[name]
        if place.world is not None:
            state = place.world.state
            place.kept = {box: state.view(*box).clone() for box in self._boxes(place.world)}

    def put_back(self, name: str, scalars: ScalarState) -> None:
        """Makes a world's state what it was when it was kept."""
        place = self._places[name]
        if place.world is not None:
            for box, values in place.kept.items():
                place.world.state.view(*box).copy_(values)
            place.world.load_scalar_state(scalars)

    def move(self, worlds: tuple[str, str], generation: int, scalars: ScalarState) -> None:
        """Moves all state of the first world to the second one, of whose own every bit is set
        before (NaN): what does not arrive shows. Collective over the workers of both."""
        old, new = (self._places[name] for name in worlds)
        members = tuple(sorted({*old.rank_map.workers, *new.rank_map.workers}))
        if self._worker not in members:
            return
        if new.world is not None:
            for box in self._boxes(new.world):
                new.world.state.view(*box).view(torch.uint8).fill_(0xFF)
        group = Group(f"g{generation}/transfer", members, self._worker, self._device)
        group.connect(self._network, self._store(generation), COLLECTIVE_S)
        ranks = {member: rank for rank, member in enumerate(members)}
        wire = group_wire(group.backend, ranks, self._device.torch_device)
        recipe = self._used
        transport = Transport(wire, recipe.spec, recipe.config.handoff)
        self._transfer = (transport, group)
        plan = transfer_plan(recipe.spec, old.rank_map, new.rank_map, self._worker)
        what = f"the bytes from {worlds[0]} to {worlds[1]}"
        transport.stream(
            transport.prepare(plan),
            old.world.state if old.world is not None else None,
            new.world.state if new.world is not None else None,
            lambda _bytes: None,
            Deadline.after(SystemClock(), COLLECTIVE_S, what),
        )
        if new.world is not None:
            new.world.load_scalar_state(scalars)

    def drop_transfer(self) -> None:
        """Closes the connections of the last move, once all have made it: to a worker that has not
        seen yet that its last message has crossed, they would seem to have failed."""
        if self._transfer is not None:
            for each in self._transfer:
                each.close()
            self._transfer = None

    def _boxes(self, world: World) -> list[tuple[str, int, Box]]:
        kinds = self._used.spec.kinds
        return [(kind, index, box) for kind in kinds for index, box in world.state.boxes(kind)]

    def _store(self, generation: int) -> Any:
        return dist.FileStore(str(self._directory / f"store-{generation}"), -1)
