"""What is to be examined, from the command line and the run file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from liver_hpc.config.schema import ClusterSection, NetworkSection, RunConfig

ALLOCATION_MIN = 10
"""Time limit of the doctor's own allocation, in minutes: its end is Slurm's, whatever happens."""


@dataclass(frozen=True)
class Order:
    """nodes: how many to take for the checks that need nodes; 0: none, unless inside a job."""

    cluster: ClusterSection
    network: NetworkSection
    runs_directory: Path
    exit_s: float
    nodes: int = 0
    partition: str | None = None
    account: str | None = None
    gpus_per_node: int = 0
    grant_s: float = 120.0

    @classmethod
    def of(cls, config: RunConfig | None, runs_directory: Path | None) -> Order:
        """What a run file asks of a cluster; without one, what the defaults do."""
        if config is None:
            return cls(ClusterSection(), NetworkSection(), runs_directory or Path("runs"), 10.0)
        return cls(
            cluster=config.cluster,
            network=config.network,
            runs_directory=runs_directory or config.runs_directory,
            exit_s=config.deadlines.exit_s,
            account=config.cluster.slurm.account,
        )

    def partitions(self) -> list[str]:
        """All that are named, each once."""
        slurm = self.cluster.slurm
        named = [component.partition for component in slurm.components]
        named += [slurm.burst.partition if slurm.burst else None, self.partition]
        return list(dict.fromkeys(name for name in named if name is not None))
