"""The own job, read from what Slurm tells the batch script."""

from __future__ import annotations

import pytest

from liver_hpc.cluster.slurm.holdings import Allocation, own_allocations
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


def hostnames(nodelist: str) -> tuple[str, ...]:
    return {"n[2-3]": ("n2", "n3")}.get(nodelist, (nodelist,))


def nodes_of(job: str) -> tuple[str, ...]:
    assert job == "5"
    return ("n2", "n3")


OPTIONS: dict[str, dict[str, object]] = {
    "main": {"join": "asked"},  # which says nothing of the first one
    "extra": {"join": "asked", "workers_per_node": 4},
}


def config(*components: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"text": "python-stdlib"},
            "train": {"steps": 1, "global_batch": 8},
            "workers": {"initial": 1, "max": 1},
            "layouts": {1: {}},
            "cluster": {
                "workers_per_node": 2,
                "slurm": {"components": [{"name": name, **OPTIONS[name]} for name in components]},
            },
        }
    )


HET = {
    "SLURM_JOB_ID": "1",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_0": "1",
    "SLURM_JOB_ID_HET_GROUP_1": "2",
    "SLURM_JOB_NODELIST": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[2-3]",
    "SLURM_JOB_PARTITION_HET_GROUP_0": "stable",
    "SLURM_JOB_PARTITION_HET_GROUP_1": "preempt",
}
PLAIN = {
    "SLURM_JOB_ID": "5",
    "SLURM_JOB_NODELIST": "n[2-3]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_PARTITION": "stable",
}


def test_a_het_job() -> None:
    main, extra = own_allocations(HET, config("main", "extra"), hostnames, nodes_of)
    # srun knows a component by its leader, squeue lists its steps under its own id
    assert main == Allocation("main", "1", ("n1",), 2, ("1", 0), partition="stable", own=True)
    assert extra == Allocation(
        "extra", "2", ("n2", "n3"), 4, ("1", 1), partition="preempt", automatic=False
    )


def test_a_plain_job() -> None:
    (own,) = own_allocations(PLAIN, config("main"), hostnames, nodes_of)
    assert own == Allocation("main", "5", ("n2", "n3"), 2, partition="stable", own=True)


def test_a_plain_job_that_was_submitted_from_within_a_het_job() -> None:
    plain = own_allocations(PLAIN, config("main"), hostnames, nodes_of)
    assert own_allocations({**HET, **PLAIN}, config("main"), hostnames, nodes_of) == plain


def test_a_step_from_outside_of_the_job_asks_for_its_nodes() -> None:
    """By `srun --jobid=5 --overlap --nodes=1`: as Slurm 22.05 sets it there."""
    environ = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n2", "SLURM_NNODES": "1"}
    (own,) = own_allocations(environ, config("main"), hostnames, nodes_of)
    assert own.nodes == ("n2", "n3")


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        own_allocations({}, config("main"), hostnames, nodes_of)
    with pytest.raises(ConfigError, match=r"job 1 has 2 components, the run file 1 \(main\)"):
        own_allocations(HET, config("main"), hostnames, nodes_of)
    with pytest.raises(ConfigError, match=r"job 5 has 1 components, the run file 2"):
        own_allocations(PLAIN, config("main", "extra"), hostnames, nodes_of)
    broken = {**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": ""}
    with pytest.raises(ConfigError, match="has not set SLURM_JOB_NODELIST_HET_GROUP_1"):
        own_allocations(broken, config("main", "extra"), hostnames, nodes_of)
