"""RANK and its relatives follow the world that trains."""

from __future__ import annotations

from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.worker.ranks import rank_environment

TWO_NODES = RankMap(Layout(2, 1, 2), (4, 5, 2, 3), (7, 7, 3, 3))


def test_a_rank_is_that_of_the_rank_map_and_not_the_workers_id() -> None:
    assert rank_environment(TWO_NODES, worker=2, place=0, with_slurms=False) == {
        "RANK": "2",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "1",
        "NUM_NODES": "2",
    }


def test_slurms_names_say_the_same() -> None:
    told = rank_environment(TWO_NODES, worker=5, place=3, with_slurms=True)
    assert (told["SLURM_PROCID"], told["SLURM_NTASKS"], told["SLURM_NPROCS"]) == ("1", "4", "4")
    assert (told["SLURM_LOCALID"], told["SLURM_NODEID"], told["SLURM_NNODES"]) == ("3", "0", "2")
    assert told["LOCAL_RANK"] == "3", "its GPU's number, for as long as it lives"


def test_workers_of_whom_no_node_is_known_are_alone() -> None:
    told = rank_environment(RankMap(Layout(1, 1, 2), (9, 1)), 1, 0, with_slurms=False)
    assert (told["LOCAL_WORLD_SIZE"], told["NODE_RANK"], told["NUM_NODES"]) == ("1", "1", "2")
