"""What this process hands on, and what it takes and leaves alone."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import select
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.host import process
from liver_hpc.host.process import (
    CORES,
    ENOUGH,
    clean_environment,
    collector_paused,
    end_of,
    quiet_thread,
    raise_descriptor_limit,
    raise_soft_limits,
    take_core,
)

FOREIGN = [
    "SLURM_JOB_ID",
    "SLURM_HET_SIZE",
    "PMI_FD",
    "PMI2_FD",
    "PMIX_RANK",
    "OMPI_COMM_WORLD_RANK",
    "HYDRA_LAUNCHER",
    "HYDI_CONTROL_FD",
    "MPI_LOCALRANKID",
]
OURS = [
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "SLURM_SACK_SOCKET",
    "SLURM_SACK_KEY",
    "SLURM_SACK_JWKS",
    "PATH",
    "HOME",
    "FI_PROVIDER",
    "MPIR_CVAR_CH4_NETMOD",
    "LIVER_LOCAL_RANK",
]


def test_a_worker_takes_the_core_of_its_place_with_all_that_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: taken.append(cores))
    monkeypatch.delenv(CORES, raising=False)
    take_core(1)
    assert taken == [], "where none are listed it stays where it is"
    monkeypatch.setenv(CORES, "2,5")
    for place in range(3):
        take_core(place)
    assert taken == [{2}, {5}, {2}]


def affinity_after(cores: str) -> set[int]:
    os.environ[CORES] = cores
    take_core(0)
    found: list[set[int]] = []
    thread = threading.Thread(target=lambda: found.append(os.sched_getaffinity(0)))
    thread.start()
    thread.join()
    return found[0]


def test_threads_keep_to_the_core() -> None:
    core = min(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(affinity_after, (str(core),)) == {core}


def test_takes_away_the_launch_and_keeps_the_rest() -> None:
    foreign = [name for name in FOREIGN if name != "SLURM_JOB_ID"]
    environment = {name: name.lower() for name in foreign + OURS}
    assert clean_environment(environment) == {name: name.lower() for name in OURS}


def test_within_a_job_the_user_is_known_by_no_token() -> None:
    """srun starts nothing with one, and it expires."""
    environment = {"SLURM_JWT": "x", "SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_ID": "5"}
    assert clean_environment(environment) == {"SLURM_CONF": "/etc/slurm.conf"}


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


# ---- descriptors

UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (1024, 4096, [(4096, 4096)]),
        (1024, 2**20, [(ENOUGH, 2**20)]),
        (1024, UNLIMITED, [(ENOUGH, UNLIMITED)]),
        (4096, 4096, []),
        (2**20, 2**20, []),
        (UNLIMITED, UNLIMITED, []),
    ],
)
def test_the_soft_limit_is_raised_towards_the_hard_one(
    soft: int, hard: int, wanted: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: made.append(limits))
    raise_descriptor_limit()
    assert made == wanted


@pytest.mark.parametrize(
    ("soft", "hard", "wanted"),
    [
        (4096, 60_000, [(60_000, 60_000)]),
        (4096, UNLIMITED, [(UNLIMITED, UNLIMITED)]),
        (4096, 4096, []),
    ],
)
@pytest.mark.parametrize("which", [resource.RLIMIT_NPROC, resource.RLIMIT_CPU])
def test_there_may_be_as_many_threads_and_as_much_cpu_time_as_the_hard_limit_says(
    soft: int,
    hard: int,
    wanted: list[tuple[int, int]],
    which: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, int]] = []
    limits = {which: (soft, hard)}
    monkeypatch.setattr(resource, "getrlimit", lambda each: limits.get(each, (1, 1)))
    monkeypatch.setattr(resource, "setrlimit", lambda each, new: made.append(new))
    raise_soft_limits()
    assert made == wanted


# ---- the collector


def test_nothing_is_collected_inside_and_what_was_made_is_not_walked_afterwards() -> None:
    frozen, kept = gc.get_freeze_count(), []
    with collector_paused():
        assert not gc.isenabled()
        kept += [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() > frozen + len(kept)


def test_the_collector_goes_on_where_an_import_fails() -> None:
    def imports() -> None:
        with collector_paused():
            raise ImportError

    with pytest.raises(ImportError):
        imports()
    assert gc.isenabled()


# ---- threads


def test_quiet_thread_takes_no_signals_and_the_caller_still_does() -> None:
    masks: list[set[signal.Signals]] = []

    def note() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))

    quiet_thread(note, "quiet").join()
    threading.Thread(target=note).start()
    note()
    assert signal.SIGTERM in masks[0]
    assert all(signal.SIGTERM not in mask for mask in masks[1:])


@pytest.mark.parametrize("number", [434, 9999], ids=["by the kernel", "by a thread"])
def test_the_end_of_a_process_is_seen_whoever_waits_for_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_PIDFD_OPEN", number)
    words = [sys.executable, "-c", "input()"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as child:
        end = end_of(child.pid)
        assert not select.select([end], [], [], 0.2)[0]
        assert child.stdin is not None
        child.stdin.close()
        assert select.select([end], [], [], 30.0)[0]  # as a zombie, too
        os.close(end)
    with pytest.raises(ProcessLookupError):
        end_of(child.pid)
