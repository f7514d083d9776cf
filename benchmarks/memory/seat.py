"""A worker's side: one whole handoff between two worlds, and what was resident meanwhile."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory.held import Held
from liver_hpc.checkpoint.parts import Save
from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import RunConfig
from liver_hpc.handoff.crossing import Crossing
from liver_hpc.handoff.prepare import connect_groups, prepare
from liver_hpc.handoff.release import release
from liver_hpc.handoff.session import Session
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.recipes.base import Recipe, load_recipe
from liver_hpc.snapshot.keeping import Snapshots
from liver_hpc.world import megatron
from liver_hpc.world.context import WorkerContext
from liver_hpc.world.derive import Derivation
from liver_hpc.world.device import Device
from liver_hpc.world.groups import install_sentinel
from liver_hpc.world.network import Network
from liver_hpc.world.steps import Flags
from liver_hpc.world.world import World

STEPS = 2
"""That a world has trained before what it holds is looked at."""

dist: Any = importlib.import_module("torch.distributed")  # its stubs know few of its names


class _Store(dist.FileStore):  # type: ignore[misc]
    """A handoff closes the store that it opened; a checkpoint deletes several keys at once."""

    def close(self) -> None:
        pass

    def delete_keys(self, keys: list[str]) -> int:
        return sum(map(self.delete_key, keys))


class Seat:
    """This process as one worker, without a coordinator: what it would say is said here."""

    def __init__(self, worker: int, device: Device, directory: Path) -> None:
        torch.set_num_threads(1)
        install_sentinel(worker)
        megatron.prepare_process(seed=1)
        self._worker = worker
        self._device = device
        self._directory = directory
        self._handoffs = 0
        self._network = Network(device, "127.0.0.1")

    def hand_over(self, config: RunConfig, layouts: tuple[Layout, Layout]) -> Held:
        """Trains in the first layout, hands over to the second one and trains on. Collective over
        the workers of both, which are all workers."""
        bounded = config.handoff.memory == "bounded"
        self._handoffs += 1
        source_map, target_map = (RankMap(one, tuple(range(one.workers))) for one in layouts)
        recipe = load_recipe(config)
        recipe.spec = Derivation(recipe).spec(layouts)
        install_sentinel(self._worker)
        recipe.open(self._directory)
        context = self._context(config, recipe)
        booted = _Resident(self._device)
        source, in_source = self._trained(context, source_map)
        session = Session(
            m.Prepare(
                generation=1,
                source=m.WireRankMap.of(source_map),
                source_generation=0,
                target=m.WireRankMap.of(target_map),
                bounded=bounded,
            ),
            context,
        )
        during = _Resident(self._device)
        target = prepare(session, source)
        gradients = source.forward_backward(STEPS + 1)  # it trains beside
        source.agree(gradients, source.update(STEPS + 1), Flags())
        source.settle()
        scalars = source.scalar_state(STEPS + 2)
        if bounded:
            saved = Save(context, source, scalars.step, self._directory).now(source)
            assert not saved.error, saved.error
        for message in (m.Boundary, m.Verdict):
            session.deliver(message(generation=1, scalars=scalars))
        crossed = Crossing(session, target, source, Snapshots(context)).run(None)
        crossing = during.most()
        release(session, target, source)  # a GPU's peak begins anew
        in_handoff = max(crossing, during.most())
        del source
        world = target.world
        assert world is not None
        assert crossed.first_step is not None
        in_target = _most_of_a_step(world, scalars.step + 1)
        digests = world.state.digests(recipe.spec.kinds)
        world.close()
        base, loss = booted.at_first, crossed.first_step.loss
        return Held(in_source - base, in_target - base, in_handoff - base, loss, digests)

    def _context(self, config: RunConfig, recipe: Recipe) -> WorkerContext:
        return WorkerContext(
            worker=self._worker,
            config=config,
            recipe=recipe,
            device=self._device,
            network=self._network,
            clock=SystemClock(),
            send=lambda _message: None,
            open_store=self._store,
            checkpoints=self._directory,
        )

    def _store(self) -> Any:
        return _Store(str(self._directory / f"store-{self._handoffs}"), -1)

    def _trained(self, context: WorkerContext, rank_map: RankMap) -> tuple[World, int]:
        world = World(context.recipe, rank_map, self._worker, 0, self._device)
        world.warm_up()
        connect_groups(context, world, self._store())
        world.state.initialize(context.recipe.initial, context.config.train.seed)
        world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))
        for step in range(STEPS):
            world.agree(world.forward_backward(step), world.update(step), Flags())
        return world, _most_of_a_step(world, STEPS)


def _most_of_a_step(world: World, step: int) -> int:
    resident = _Resident(world.device)
    world.agree(world.forward_backward(step), world.update(step), Flags())
    return resident.most()


class _Resident:
    """This process's bytes from here on: resident ones as the kernel counts them, of a GPU those
    that torch has in use."""

    def __init__(self, device: Device) -> None:
        self._on_gpu = device.backend_name == "nccl"
        device.return_free_memory()  # a GPU's peak begins anew
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # so does the kernel's
        self.at_first = self.most()

    def most(self) -> int:
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        (line,) = (line for line in lines if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
