"""The job that this process runs in, as the allocations that it consists of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from liver_hpc.cluster.slurm.holdings import Holding, Place
from liver_hpc.cluster.slurm.replies import Hostnames
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


def own_allocations(
    environ: Mapping[str, str], config: RunConfig, hostnames: Hostnames
) -> tuple[Holding, ...]:
    """A component each, or the whole of a plain job; the first is the one that we are in.

    Read from what Slurm tells the batch script. Raises ConfigError outside of a job, or when its
    components are not those of the run file.
    """
    job_id = environ.get("SLURM_JOB_ID", "")
    if not job_id:
        raise ConfigError(
            "cluster.kind is slurm, but this is no Slurm job (SLURM_JOB_ID is not set); "
            "start the run with `liver submit` or sbatch"
        )
    suffixes, sections = [""], config.cluster.slurm.components
    if "SLURM_HET_SIZE" in environ:
        size = int(_wanted(environ, "SLURM_HET_SIZE", job_id))
        suffixes = [f"_HET_GROUP_{index}" for index in range(size)]
    if len(suffixes) != len(sections):
        raise ConfigError(
            f"cluster.slurm.components: job {job_id} has {len(suffixes)} components, the "
            f"run file {len(sections)} ({', '.join(section.name for section in sections)})"
        )
    found = []
    for index, (suffix, section) in enumerate(zip(suffixes, sections, strict=True)):
        place = Place(job_id, gpus_per_node=section.gpus_per_node)
        if len(suffixes) > 1:
            own_id = _wanted(environ, f"SLURM_JOB_ID{suffix}", job_id)
            place = replace(place, het_group=index, own_id=own_id)
        found.append(
            Holding(
                name=section.name,
                place=place,
                nodes=hostnames(_wanted(environ, f"SLURM_JOB_NODELIST{suffix}", job_id)),
                slots=config.cluster.slots(section),
                own=index == 0,
                automatic=index == 0 or section.join == "auto",
                partition=environ.get(f"SLURM_JOB_PARTITION{suffix}", ""),
            )
        )
    return tuple(found)


def _wanted(environ: Mapping[str, str], name: str, job_id: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ConfigError(f"job {job_id}: Slurm has not set {name}")
    return value
