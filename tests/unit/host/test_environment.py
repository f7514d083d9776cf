"""Nothing of the surrounding launch reaches a nested one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.host.environment import clean_environment

FOREIGN = [
    "SLURM_JOB_ID",
    "SLURM_CONF_SERVER",
    "SLURM_HET_SIZE",
    "PMI_FD",
    "PMI2_FD",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "HYDRA_LAUNCHER",
    "HYDI_CONTROL_FD",
    "MPI_LOCALRANKID",
]
OURS = ["SLURM_CONF", "PATH", "HOME", "FI_PROVIDER", "MPIR_CVAR_CH4_NETMOD", "LIVER_LOCAL_RANK"]


def test_takes_away_the_launch_and_keeps_the_rest() -> None:
    environment = {name: name.lower() for name in FOREIGN + OURS}
    assert clean_environment(environment) == {name: name.lower() for name in OURS}


def test_leaves_its_argument_alone() -> None:
    environment = {"PMI_FD": "3", "PATH": "/bin"}
    clean_environment(environment)
    assert environment == {"PMI_FD": "3", "PATH": "/bin"}


@given(st.dictionaries(st.sampled_from(FOREIGN + OURS) | st.text(min_size=1), st.text()))
def test_what_is_left_is_a_part_and_clean_already(environment: dict[str, str]) -> None:
    clean = clean_environment(environment)
    assert clean.items() <= environment.items()
    assert clean_environment(clean) == clean
    assert not clean.keys() & set(FOREIGN)
