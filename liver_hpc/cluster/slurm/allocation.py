"""The job that this process runs in, and where on the cluster a node's steps belong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from liver_hpc.cluster.slurm.replies import Hostnames
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


@dataclass(frozen=True)
class Place:
    """How Slurm calls the allocation of a node.

    job_id: what srun wants, for a component its leader's. het_group: the component's index, None
    in a plain job. own_id: the component's own job id, under which squeue lists its steps. burst:
    whether it is an allocation that was asked for while the run goes on.
    """

    job_id: str
    het_group: int | None = None
    own_id: str = ""
    burst: bool = False

    @property
    def steps_of(self) -> str:
        """The job whose steps run on the node."""
        return self.own_id or self.job_id


@dataclass(frozen=True)
class Component:
    """One component of the own job, by its own job id; index 0 is the one we live in."""

    index: int
    job_id: str
    nodes: tuple[str, ...]
    partition: str = ""


@dataclass(frozen=True)
class OwnAllocation:
    """job_id: the leader's, or the plain job's, which then has one component."""

    job_id: str
    components: tuple[Component, ...]

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str], config: RunConfig, hostnames: Hostnames
    ) -> OwnAllocation:
        """Reads what Slurm tells the batch script of a job.

        Raises ConfigError outside of a job, or when its components are not those of the run file.
        """
        job_id = environ.get("SLURM_JOB_ID", "")
        if not job_id:
            raise ConfigError(
                "cluster.kind is slurm, but this is no Slurm job (SLURM_JOB_ID is not set); "
                "start the run with `liver submit` or sbatch"
            )
        if "SLURM_HET_SIZE" in environ:
            size = int(_wanted(environ, "SLURM_HET_SIZE", job_id))
            suffixes = [f"_HET_GROUP_{index}" for index in range(size)]
        else:
            suffixes = [""]
        components = tuple(
            Component(
                index,
                _wanted(environ, f"SLURM_JOB_ID{suffix}", job_id),
                hostnames(_wanted(environ, f"SLURM_JOB_NODELIST{suffix}", job_id)),
                environ.get(f"SLURM_JOB_PARTITION{suffix}", ""),
            )
            for index, suffix in enumerate(suffixes)
        )
        names = [component.name for component in config.cluster.slurm.components]
        if len(components) != max(1, len(names)):
            raise ConfigError(
                f"cluster.slurm.components: job {job_id} has {len(components)} components, the "
                f"run file {max(1, len(names))} ({', '.join(names) or 'the default one'})"
            )
        return cls(job_id, components)

    def place(self, component: Component) -> Place:
        """Where the steps of a component's nodes belong."""
        if len(self.components) == 1:
            return Place(self.job_id)
        return Place(self.job_id, component.index, component.job_id)


def _wanted(environ: Mapping[str, str], name: str, job_id: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"job {job_id}: Slurm has not set {name}")
    return value
