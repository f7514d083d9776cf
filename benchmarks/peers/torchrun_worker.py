"""A worker under torchrun's elastic agent: `python -m benchmarks.peers.torchrun_worker DIR`.

An agent that wants its workers to stop sends SIGTERM: all leave at the same step boundary, with
the state on disk, and fail; the agents that stay then start them again.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from liver_hpc.host.process import collector_paused

EXIT_SAVED = 3


def main() -> None:
    directory = Path(sys.argv[1])
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    with collector_paused():  # torchrun's restart waits for these imports
        import torch
        import torch.distributed as dist

        from benchmarks.peers.training import LIMIT, Replicated, StepLog, Training, open_worker

        open_worker()
    dist.init_process_group("gloo", timeout=LIMIT)
    training = Training(directory)
    saved, step = directory / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved, mmap=True, weights_only=True)
        training.load(found["state"])
        step = found["step"]
    replicated = Replicated(training, StepLog(directory))
    while not replicated.step(step, asked.is_set()):
        step += 1
    if dist.get_rank() == 0:
        part = saved.with_suffix(".part")
        torch.save({"state": training.state(), "step": step + 1}, part)
        part.rename(saved)
    dist.barrier()
    os._exit(EXIT_SAVED)


if __name__ == "__main__":
    main()
