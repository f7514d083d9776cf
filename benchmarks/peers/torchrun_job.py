"""torchrun's elastic agents, one a "node", one worker each; they meet over c10d."""

from __future__ import annotations

import sys

from benchmarks.peers.jobs import PeerJob, free_port

LAST_CALL_S = 1
KEEP_ALIVE_S = 1
KEEP_ALIVE_ATTEMPTS = 3


class TorchrunJob(PeerJob):
    """The first agent keeps the store, so the last one is the one to leave."""

    def begin(self) -> None:
        self._port = free_port()
        self.add()

    def add(self) -> None:
        is_host = int(not self._members)
        conf = (
            f"is_host={is_host},last_call_timeout={LAST_CALL_S},"
            f"keep_alive_interval={KEEP_ALIVE_S},keep_alive_max_attempt={KEEP_ALIVE_ATTEMPTS}"
        )
        self._spawn(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=1000"),
                *("--rdzv-backend=c10d", "--rdzv-id=peer", f"--rdzv-conf={conf}"),
                *(f"--rdzv-endpoint=127.0.0.1:{self._port}", "--local-addr=127.0.0.1"),
                f"--log-dir={self.directory / 'elastic'}",
                *("-m", "benchmarks.peers.torchrun_worker", str(self.directory)),
            ],
            # Otherwise a second agent's join hung in the rendezvous (torch 2.13).
            {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
