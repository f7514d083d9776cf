"""What a baseline worker does once everything is imported."""

from __future__ import annotations

import importlib
import queue
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

from benchmarks.baseline import megatron_storage
from benchmarks.baseline.lines import (
    Entered,
    Go,
    Held,
    Imported,
    Leave,
    Meet,
    Order,
    Orders,
    Ready,
    Save,
    Stepped,
    Writer,
    Written,
    read_to_worker,
)
from benchmarks.baseline.methods import num_bytes
from liver_hpc.clock import Clock
from liver_hpc.config.load import load_run
from liver_hpc.errors import DeadlineError
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.ramp import batch_of
from liver_hpc.layout.tensors import PARAMETER
from liver_hpc.protocol.messages import ClassDigest
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.world import megatron
from liver_hpc.world.device import Device
from liver_hpc.world.network import Network
from liver_hpc.world.steps import Flags, StepResult
from liver_hpc.world.world import World

# Any: torch's stubs do not export what is public.
dist: Any = importlib.import_module("torch.distributed")


class BaselineWorker:
    """One world from its beginning to its end, on a default group of its own."""

    def __init__(self, orders: Orders, device: Device, clock: Clock, writer: Writer) -> None:
        self._orders, self._layout = orders, Layout.parse(orders.layout)
        self._device = device
        self._clock = clock
        self._writer = writer
        self._config = load_run(orders.run_directory / "run.yaml")
        self._met: queue.Queue[Meet] = queue.Queue()
        self._go = threading.Event()
        self._last: Save | Leave | None = None
        self._step = 0

    def run(self, read_fd: int) -> None:
        """Until the last boundary. Raises whatever fails."""
        threading.Thread(target=read_to_worker, args=(read_fd, self._take), daemon=True).start()
        if self._orders.held:
            self._writer.send(Held())
            self._go.wait()  # whoever holds it ends it, too
            self._writer.send(Entered(at_s=self._clock.now_s()))
        store = self._meet()
        world = self._build(store)
        built_s = self._clock.now_s()
        self._fill(world)
        self._writer.send(
            Ready(
                built_s=built_s,
                loaded_s=self._clock.now_s(),
                step=self._step,
                digests=self._digests(world),
            )
        )
        self._train(world)

    def _take(self, line: Order) -> None:
        if isinstance(line, Go):
            self._go.set()
        elif isinstance(line, Meet):
            self._met.put(line)
        else:
            self._last = line

    # ---- the way in

    def _meet(self) -> Any:
        """The store of all workers; worker 0 keeps it, on a port that was free."""
        orders, limit_s = self._orders, self._config.deadlines.meet_s
        timeout, workers = timedelta(seconds=limit_s), self._layout.workers
        if orders.rank == 0:
            kept = dist.TCPStore(orders.host, 0, workers, True, timeout, wait_for_workers=False)
            self._writer.send(Imported(at_s=self._clock.now_s(), port=kept.port))
            return kept
        self._writer.send(Imported(at_s=self._clock.now_s(), port=0))
        try:
            met = self._met.get(timeout=self._config.deadlines.boot_s)
        except queue.Empty:
            raise DeadlineError(f"waited {self._config.deadlines.boot_s:g} s for Meet") from None
        return dist.TCPStore(met.host, met.port, workers, False, timeout, wait_for_workers=False)

    def _build(self, store: Any) -> World:
        orders, device, config = self._orders, self._device, self._config
        recipe = load_run_recipe(config, orders.run_directory)
        recipe.open(orders.run_directory)
        collective_s = config.deadlines.collective_s
        dist.init_process_group(
            device.backend_name,
            store=dist.PrefixStore("default", store),
            rank=orders.rank,
            world_size=self._layout.workers,
            timeout=timedelta(seconds=collective_s),
        )
        megatron.prepare_process(config.train.seed)
        rank_map = RankMap(self._layout, tuple(range(self._layout.workers)))
        world = World(recipe, rank_map, orders.rank, orders.generation, device)
        network = Network(device, orders.host)
        world.book.connect(network, store, collective_s)
        return world

    def _fill(self, world: World) -> None:
        orders = self._orders
        if orders.load_directory is not None:
            began_s = self._clock.now_s()
            small = megatron_storage.load(world, orders.load_directory)
            self._await_storage(orders.load_directory, began_s)
            self._step = small.step
        else:
            world.state.initialize(world.recipe.initial, self._config.train.seed)
            world.load_scalar_state(world.scalar_state(0).model_copy(update={"optimizer_step": 0}))
        self._device.synchronize()

    def _await_storage(self, directory: Path, began_s: float) -> None:
        """As long as a storage of the rate that is wanted takes at least, which reads and writes
        each byte of a checkpoint once, and never waits for who uses it."""
        rate = self._orders.storage_bytes_per_s
        if rate is not None:
            until_s = began_s + num_bytes(directory) / rate
            threading.Event().wait(max(0.0, until_s - self._clock.now_s()))

    def _digests(self, world: World) -> tuple[ClassDigest, ...]:
        if not self._orders.digests:
            return ()
        world.refresh_state()
        return world.state.digests((PARAMETER, *world.recipe.spec.optimizer_kinds))

    # ---- steps, and the way out

    def _train(self, world: World) -> None:
        """Steps until all workers have heard at one boundary that it is the last."""
        while True:
            result, ended_s = self._do_step(world)
            if result.raised.stop < world.rank_map.layout.workers:
                continue
            last = self._last
            assert last is not None
            if isinstance(last, Save):
                self._save(world, last, ended_s)
            return

    def _do_step(self, world: World) -> tuple[StepResult, float]:
        started_s = self._clock.now_s()
        gradients, update = world.forward_backward(self._step), world.update(self._step)
        result = world.agree(gradients, update, Flags(stop=self._last is not None))
        ended_s = self._clock.now_s()
        self._step += 1
        if self._orders.rank == 0:
            config = self._config
            self._writer.send(
                Stepped(
                    step=self._step - 1,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    learning_rate=result.learning_rate,
                    tokens=batch_of(config.train, self._step - 1) * world.recipe.tokens(),
                    started_s=started_s,
                    ended_s=ended_s,
                )
            )
        return result, ended_s

    def _save(self, world: World, order: Save, boundary_s: float) -> None:
        """The state of this boundary."""
        small = world.scalar_state(self._step)
        digests = self._digests(world)
        directory, began_s = Path(order.directory), self._clock.now_s()
        megatron_storage.save(world, small, directory)
        self._await_storage(directory, began_s)
        self._writer.send(
            Written(
                step=self._step,
                boundary_s=boundary_s,
                saved_s=self._clock.now_s(),
                digests=digests,
            )
        )
