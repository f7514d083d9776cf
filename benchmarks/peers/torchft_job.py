"""torchft: one replica group a worker, which meet in a lighthouse."""

from __future__ import annotations

import sys

from benchmarks.peers.jobs import PeerJob, free_port


class TorchftJob(PeerJob):
    """The lighthouse is a process of its own, the first member; a replica that is told to leave
    ends at its next boundary."""

    def begin(self) -> None:
        self._port = free_port()
        self._replicas = 0
        self._spawn(
            [
                *(sys.executable, "-m", "benchmarks.peers.torchft_worker"),
                *("lighthouse", str(self._port)),
            ]
        )
        self.add()

    def add(self) -> None:
        self._spawn(
            [
                *(sys.executable, "-m", "benchmarks.peers.torchft_worker"),
                *("replica", str(self._port), str(self._replicas), str(self.directory)),
            ]
        )
        self._replicas += 1
