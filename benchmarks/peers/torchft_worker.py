"""torchft's lighthouse, or one of its replica groups, of a single worker.

`python -m benchmarks.peers.torchft_worker lighthouse PORT | replica PORT NUMBER DIR`
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torchft import Manager, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport
from torchft.coordination import LighthouseServer
from torchft.ddp import DistributedDataParallel

from benchmarks.peers.events import Step
from benchmarks.peers.torchft_settings import HEARTBEAT_TIMEOUT_MS, JOIN_TIMEOUT_MS, TICK_MS
from benchmarks.peers.training import StepLog, Training, open_worker

# Any: torch's stubs do not export what is public.
dist: Any = importlib.import_module("torch.distributed")

TIMEOUT = timedelta(seconds=30)


def main() -> None:
    kind, port, *rest = sys.argv[1:]
    if kind == "lighthouse":
        serve(int(port))
    else:
        replicate(int(port), int(rest[0]), Path(rest[1]))


def serve(port: int) -> None:
    """Until it is ended."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=1,
        join_timeout_ms=JOIN_TIMEOUT_MS,
        quorum_tick_ms=TICK_MS,
        heartbeat_timeout_ms=HEARTBEAT_TIMEOUT_MS,
    )
    threading.Event().wait()
    server.shutdown()


class _Gloo(ProcessGroupGloo):  # type: ignore[misc]
    """Remembers which quorum it belongs to."""

    quorum = -1

    def configure(self, *arguments: Any, **named: Any) -> None:
        super().configure(*arguments, **named)
        self.quorum = named.get("quorum_id", arguments[4] if len(arguments) > 4 else -1)


class _Ddp(DistributedDataParallel):  # type: ignore[misc]
    """torchft's. Where a peer has been killed, gloo raises at once, upon which the hook of 0.2 ends
    the process by an assertion; here the step goes on to its end and is not committed, as the
    manager, which was told of the error, has it."""

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def] # torch looks at annotations
        work = state.allreduce(bucket.buffer())
        if work.wait():
            reduced = work.get_future()
            return getattr(reduced, "_fut", reduced)
        failed: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        failed.set_result(bucket.buffer())
        return failed


def replicate(port: int, number: int, directory: Path) -> None:
    """Trains until SIGTERM, and ends at the boundary after it."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    open_worker()
    # Megatron's groups are of this worker alone, and so is the default group.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("megatron", store), rank=0, world_size=1)
    training = Training(directory)
    group = _Gloo(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        load_state_dict=training.load,
        state_dict=training.state,
        min_replica_size=1,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        replica_id=f"replica_{number}",
        hostname="127.0.0.1",
        checkpoint_transport=HTTPTransport(TIMEOUT, num_chunks=0),
        init_sync=False,
    )
    model = _Ddp(manager, training.module)
    log = StepLog(directory)
    while not asked.is_set():
        step = one_step(manager, group, model, training)
        if step is not None:
            log.add(step)
    os._exit(0)


def one_step(manager: Any, group: _Gloo, model: Any, training: Training) -> Step | None:
    """None where it was not committed. A replica that heals takes part with zero gradients."""
    started_s = time.time()
    manager.start_quorum()
    training.optimizer.zero_grad()
    members, member = manager.num_participants(), manager.participating_rank() or 0
    step = manager.current_step()
    loss = training.backward(model, step, member, members)
    if not manager.should_commit():
        return None
    training.clip()
    training.optimizer.step()
    if not manager.is_participating():
        return None
    return Step(step, group.quorum, members, started_s, time.time(), float(loss))


if __name__ == "__main__":
    main()
