"""A rank under nvidia-resiliency-ext: `python -m benchmarks.peers.inprocess_worker DIR`.

The wrapped function is called again after a fault, in the same process; the state of the last
whole step waits in its memory, so that nothing is read from disk and no step is done again.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext import inprocess

from benchmarks.peers.training import LIMIT, Replicated, StepLog, Training, open_worker

# Any: torch's stubs do not export what is public.
dist: Any = importlib.import_module("torch.distributed")

INTERVAL = timedelta(milliseconds=100)


class Kept:
    """What outlives a restart: the tensors that trained, and which step comes next."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self.step = 0


def main() -> None:
    directory = Path(sys.argv[1])
    open_worker()
    kept, log = Kept(), StepLog(directory)

    def train(call: Any = None) -> None:
        store = dist.PrefixStore(
            str(call.iteration),
            dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=int(os.environ["RANK"]) == 0,
                multi_tenant=True,
                wait_for_workers=False,
                timeout=LIMIT,
            ),
        )
        dist.init_process_group(
            "gloo",
            store=store,
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            timeout=LIMIT,
        )
        training = Training(directory)
        if kept.state is not None:
            training.load(kept.state)
        kept.state = training.state()
        replicated = Replicated(training, log)
        while True:
            replicated.step(kept.step)
            kept.state, kept.step = training.state(), kept.step + 1

    train.__annotations__["call"] = inprocess.CallWrapper
    wrapper = inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": int(os.environ["INPROCESS_PORT"])},
        monitor_thread_interval=INTERVAL,
        monitor_process_interval=INTERVAL,
        heartbeat_interval=INTERVAL,
        progress_watchdog_interval=INTERVAL,
        last_call_wait=INTERVAL,
        heartbeat_timeout=timedelta(seconds=5),
    )
    wrapper(train)()


if __name__ == "__main__":
    main()
