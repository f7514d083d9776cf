"""The own job, read from what Slurm tells the batch script."""

from __future__ import annotations

import pytest

from liver_hpc.cluster.slurm.allocation import Component, OwnAllocation, Place
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError


def hostnames(nodelist: str) -> tuple[str, ...]:
    return {"n[2-3]": ("n2", "n3")}.get(nodelist, (nodelist,))


def config(*components: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "data": {"text": "python-stdlib"},
            "train": {"steps": 1, "global_batch": 8},
            "workers": {"initial": 1, "max": 1},
            "layouts": {1: {}},
            "cluster": {"slurm": {"components": [{"name": name} for name in components]}},
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
PLAIN = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "n[2-3]", "SLURM_JOB_PARTITION": "stable"}


def test_a_het_job() -> None:
    own = OwnAllocation.from_environment(HET, config("main", "extra"), hostnames)
    assert own.components == (
        Component(0, "1", ("n1",), "stable"),
        Component(1, "2", ("n2", "n3"), "preempt"),
    )
    # srun knows a component by its leader, squeue lists its steps under its own id
    assert own.place(own.components[1]) == Place("1", 1, "2")
    assert own.place(own.components[1]).steps_of == "2"


@pytest.mark.parametrize("names", [(), ("main",)])
def test_a_plain_job(names: tuple[str, ...]) -> None:
    own = OwnAllocation.from_environment(PLAIN, config(*names), hostnames)
    assert own == OwnAllocation("5", (Component(0, "5", ("n2", "n3"), "stable"),))
    assert own.place(own.components[0]) == Place("5")
    assert own.place(own.components[0]).steps_of == "5"


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ConfigError, match="this is no Slurm job"):
        OwnAllocation.from_environment({}, config("main"), hostnames)
    with pytest.raises(ConfigError, match=r"job 1 has 2 components, the run file 1 \(main\)"):
        OwnAllocation.from_environment(HET, config("main"), hostnames)
    with pytest.raises(ConfigError, match=r"job 5 has 1 components, the run file 2"):
        OwnAllocation.from_environment(PLAIN, config("main", "extra"), hostnames)
    broken = {**HET, "SLURM_JOB_NODELIST_HET_GROUP_1": ""}
    with pytest.raises(ConfigError, match="has not set SLURM_JOB_NODELIST_HET_GROUP_1"):
        OwnAllocation.from_environment(broken, config("main", "extra"), hostnames)
