"""nvidia-resiliency-ext's in-process restart: ranks that start again within their processes."""

from __future__ import annotations

import sys

from benchmarks.peers.events import LEAVE
from benchmarks.peers.jobs import PeerJob, free_port


class InprocessJob(PeerJob):
    """Two ranks, of which the last is killed; it has no way to join one."""

    events = (LEAVE,)
    first_workers = 2

    def begin(self) -> None:
        self._ports = (free_port(), free_port())
        for _ in range(self.first_workers):
            self.add()

    def add(self) -> None:
        self._spawn(
            [sys.executable, "-m", "benchmarks.peers.inprocess_worker", str(self.directory)],
            {
                "RANK": str(len(self._members)),
                "WORLD_SIZE": str(self.first_workers),
                "LOCAL_RANK": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._ports[0]),
                "INPROCESS_PORT": str(self._ports[1]),
            },
        )

    def remove(self) -> None:
        """Without a warning: a fault is what it is for."""
        self.kill()
