"""Runs one function in several worker processes that meet through a file store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.transitions.pool import Pool
from liver_hpc.clock import SystemClock

RUN_S = 150.0


@dataclass
class WorkerProcess:
    """What the function gets: who it is, its device, and where groups meet."""

    worker: int
    device: Any
    network: Any
    store: Any

    def transfer_group(self, name: str, members: tuple[int, ...]) -> Any:
        from liver_hpc.world.groups import Group

        group = Group(name, members, self.worker, self.device)
        group.connect(self.network, self.store, 30.0)
        return group

    def context(
        self,
        recipe: Any,
        open_store: Callable[[], Any],
        send: Callable[[Any], None] = lambda _message: None,
        checkpoints: Path = Path("unused"),
    ) -> Any:
        """A WorkerContext. open_store: makes a store that takes `close`, see `closable`."""
        from liver_hpc.world.context import WorkerContext

        return WorkerContext(
            worker=self.worker,
            config=recipe.config,
            recipe=recipe,
            device=self.device,
            network=self.network,
            clock=SystemClock(),
            send=send,
            open_store=open_store,
            checkpoints=checkpoints,
        )

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(self, *arguments)


def closable(kind: type[Any]) -> type[Any]:
    """A kind of store of torch's that takes `close`, as a worker's does."""
    of_control_store = {
        "close": lambda _store: None,
        "delete_keys": lambda store, keys: sum(map(store.delete_key, keys)),
    }
    return type("Closable", (kind,), of_control_store)


def _open(store_path: str, worker: int) -> WorkerProcess:
    """Makes the calling process a worker."""
    import torch.distributed as dist

    from liver_hpc.world.device import open_device
    from liver_hpc.world.network import Network

    device = open_device(worker)  # before megatron is imported, as in a worker
    from liver_hpc.world import megatron
    from liver_hpc.world.groups import install_sentinel

    install_sentinel(worker)
    megatron.prepare_process(seed=1)
    store = dist.FileStore(store_path, -1)
    return WorkerProcess(worker, device, Network(device, "127.0.0.1"), store)


def run_workers(
    function: Callable[..., Any], workers: int, tmp_path: Path, *arguments: Any
) -> list[Any]:
    """`function(WorkerProcess, *arguments)` in each of `workers` processes; results by worker."""
    with Pool(workers, partial(_open, str(tmp_path / "store"))) as pool:
        return pool.call(f"run {function.__name__}", RUN_S, "run", function, *arguments)
