"""A stand-in for a coordinator on the control host: a pool and a launcher, led line by line.

Reads a JSON list such as `["want", 2]` from every line of standard input and answers with a line;
what the pool tells comes in lines of its own. See `tests.cluster.driven`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.holdings import own_allocations
from liver_hpc.cluster.slurm.launcher import slurm_launcher
from liver_hpc.cluster.slurm.pool import SlurmPool
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.config.load import load_run
from liver_hpc.coordinator.connections import ConnectionServer, Inbox
from liver_hpc.coordinator.store import StoreService
from liver_hpc.layout.coordinates import Layout
from liver_hpc.rendezvous.server import ControlServer
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.epoch import claim_epoch
from liver_hpc.run.events import PoolEvent, Seat
from liver_hpc.run.outcome import COORDINATOR_FILE, write_private_json
from liver_hpc.run.secret import read_secret

CONTROL_ADDRESS = "10.77.0.1"

_printing = threading.Lock()


def say(kind: str, **fields: Any) -> None:
    with _printing:
        print(json.dumps({"kind": kind, **fields}), flush=True)


class Driver:
    """The run directory holds run.yaml, secret, and job.json: the environment of the own job."""

    def __init__(self, run_directory: Path) -> None:
        config = load_run(run_directory / "run.yaml")
        environment = json.loads((run_directory / "job.json").read_text(encoding="utf-8"))
        slurm = config.cluster.slurm
        commands = SlurmCommands(slurm.command_s, slurm.unreachable_s)
        own = own_allocations(environment, config, commands.hostnames, commands.nodes_of)
        squeue = Squeue(commands, slurm.command_s)
        self.pool = SlurmPool(config, commands, squeue, own, run_directory, SystemClock())
        agent = (sys.executable, str(run_directory / "agent.py"))
        self.launcher = slurm_launcher(run_directory, config, squeue, self.pool.use, agent)
        secret = read_secret(run_directory / "secret")
        connections = ConnectionServer(Inbox(), StoreService(SystemClock()), control_s=10.0)
        self.server = ControlServer(CONTROL_ADDRESS, secret, connections.handle)
        host, port = self.server.address
        epoch = claim_epoch(run_directory).number
        here = {"host": host, "port": port, "pid": os.getpid(), "epoch": epoch}
        write_private_json(run_directory / COORDINATOR_FILE, here)

    def start(self, adopt: dict[str, None] | None) -> None:
        self.pool.start(self.tell, adopt)

    def adopt(self, agent: str, node: str) -> bool:
        return self.launcher.adopt(agent, node, host="", pid=0)

    def tell(self, event: PoolEvent) -> None:
        say(type(event).__name__, **asdict(event))

    def launch(self, *agents: tuple[str, str]) -> None:
        """Together: names, and their nodes."""
        layout = Layout(1, 1, 1)
        self.launcher.launch(
            *(LaunchAgent(name, Seat(node, (0,)), layout) for name, node in agents)
        )

    def close(self) -> None:
        self.launcher.close()
        self.pool.close()
        self.server.close()

    def operations(self) -> dict[str, Callable[..., object]]:
        pool, launcher = self.pool, self.launcher
        return {
            "start": self.start,
            "want": pool.want,
            "warned": pool.warned,
            "give_back": pool.give_back,
            "launch": self.launch,
            "adopt": self.adopt,
            "alive": launcher.alive,
            "exit_code": launcher.exit_code,
            "kill": launcher.kill,
            "close": self.close,
        }


def main() -> None:
    driver = Driver(Path(sys.argv[1]))
    operations = driver.operations()
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        say("Answer", value=operations[name](*arguments))


if __name__ == "__main__":
    main()
