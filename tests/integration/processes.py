"""Runs one function in several worker processes that meet through a file store."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.host.process import collector_paused

JOIN_S = 150.0


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


def _child(
    function: Callable[..., Any], worker: int, store_path: str, environment: dict[str, str],
    arguments: tuple[Any, ...], results: Any,
) -> None:  # fmt: skip
    os.environ.clear()
    os.environ.update(environment)
    # NCCL takes several processes on one GPU only where it believes them on different hosts.
    os.environ["NCCL_HOSTID"] = f"worker-{worker}"
    try:
        with collector_paused():
            import torch.distributed as dist

            from liver_hpc.world.device import Network, open_device

            # Before megatron is imported, as in a worker.
            device = open_device(0)
            from liver_hpc.world import megatron
            from liver_hpc.world.groups import install_sentinel

        install_sentinel(worker)
        megatron.prepare_process(seed=1)
        store = dist.FileStore(store_path, -1)
        process = WorkerProcess(worker, device, Network(device, "127.0.0.1"), store)
        results.put((worker, function(process, *arguments), None))
    except BaseException:  # noqa: BLE001 - shown by the parent
        results.put((worker, None, traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)


def run_workers(
    function: Callable[..., Any], workers: int, tmp_path: Path, *arguments: Any
) -> list[Any]:
    """`function(WorkerProcess, *arguments)` in each of `workers` processes; results by worker."""
    # Forked from a process that has imported torch and megatron, which takes longer than most
    # of what the workers are for.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.integration.imported"])
    results = context.Queue()
    store_path = str(tmp_path / "store")
    children = [
        context.Process(
            target=_child, args=(function, worker, store_path, dict(os.environ), arguments, results)
        )
        for worker in range(workers)
    ]
    for child in children:
        child.start()
    answers: dict[int, Any] = {}
    try:
        for _ in children:
            worker, answer, failure = results.get(timeout=JOIN_S)
            assert failure is None, f"worker {worker}:\n{failure}"
            answers[worker] = answer
    finally:
        for child in children:
            child.kill()
            child.join()
    return [answers[worker] for worker in range(workers)]
