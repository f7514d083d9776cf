"""Which CPUs a worker gets: those near its GPU, shared with the GPUs that are as near."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.host.affinity import cpu_list, local_cpus, share_of_cpus
from liver_hpc.host.child import Child, Command

FIRST, SECOND = cpu_list("0-31,64-95"), cpu_list("32-63,96-127")
NODE = [FIRST, FIRST, FIRST, FIRST, SECOND, SECOND, SECOND, SECOND]
ALL = range(128)


def test_the_kernels_lists_are_read(tmp_path: Path) -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == frozenset()
    (tmp_path / "0000:65:00.0").mkdir()
    (tmp_path / "0000:65:00.0" / "local_cpulist").write_text("0-1,64-65\n")
    assert local_cpus("0000:65:00.0", tmp_path) == {0, 1, 64, 65}
    assert local_cpus("0000:66:00.0", tmp_path) == frozenset()


def test_gpus_of_a_socket_share_its_cores_with_both_threads_of_each() -> None:
    shares = [share_of_cpus(gpu, NODE, ALL) for gpu in range(8)]
    assert shares[0] == cpu_list("0-7,64-71")
    assert shares[5] == cpu_list("40-47,104-111")
    assert frozenset().union(*shares) == {*ALL}


def test_only_cpus_that_slurm_has_given_count() -> None:
    assert share_of_cpus(1, NODE, cpu_list("0-7")) == {2, 3}
    assert share_of_cpus(4, NODE, cpu_list("0-7")) == frozenset(), "none of them is near"
    assert share_of_cpus(2, NODE, [3, 5]) == {3, 5}, "too few to be shared"
    assert share_of_cpus(0, NODE, [1, 3, 64, 70]) == {1}


@given(
    st.lists(st.frozensets(st.integers(0, 15)), min_size=1, max_size=6),
    st.frozensets(st.integers(0, 15)),
)
def test_shares_are_near_allowed_and_apart(
    near: list[frozenset[int]], allowed: frozenset[int]
) -> None:
    shares = [share_of_cpus(gpu, near, allowed) for gpu in range(len(near))]
    for gpu, share in enumerate(shares):
        usable = near[gpu] & allowed
        together = [other for other, cpus in enumerate(near) if cpus & allowed == usable]
        assert share <= usable
        assert bool(share) == bool(usable)
        if len(usable) >= len(together):
            assert not any(share & shares[other] for other in together if other != gpu)
            assert frozenset().union(*(shares[other] for other in together)) == usable


BINDING = """
import os, threading
from liver_hpc.host.affinity import bind_process
ready, go = threading.Event(), threading.Event()
seen = []
def look():
    ready.set(); go.wait(); seen.append(os.sched_getaffinity(0))
thread = threading.Thread(target=look); thread.start(); ready.wait()
one = min(os.sched_getaffinity(0))
bind_process({one})
go.set(); thread.join()
assert seen == [{one}] and os.sched_getaffinity(0) == {one}
"""


@pytest.mark.timeout(30)
def test_threads_that_run_already_are_bound_too(tmp_path: Path) -> None:
    child = Child(Command("binding", [sys.executable, "-c", BINDING], log=tmp_path / "log"))
    code = child.wait(20.0)
    child.end(0.0)
    assert code == 0, (tmp_path / "log").read_text()
