"""What a user's code reads of its rank from the environment, of the world that trains."""

from __future__ import annotations

from liver_hpc.layout.coordinates import RankMap

PLACE_VARIABLE = "LIVER_LOCAL_RANK"
"""Set by the agent: a worker's place on its node, which is its GPU."""

_OF_SLURM = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "NODE_RANK": "SLURM_NODEID",
    "WORLD_SIZE": "SLURM_NTASKS",
    "NUM_NODES": "SLURM_NNODES",
}


def rank_environment(
    rank_map: RankMap, worker: int, place: int, with_slurms: bool
) -> dict[str, str]:
    """Variables of a worker that has a seat in a rank map, by their names.

    place: the worker's on its node. with_slurms: also those by which Slurm tells the same.
    """
    rank = rank_map.workers.index(worker)
    nodes = [rank_map.node_at(at) for at in rank_map.layout.coordinates()]
    order = list(dict.fromkeys(nodes))
    told = {
        "RANK": rank,
        "WORLD_SIZE": len(nodes),
        "LOCAL_RANK": place,
        "LOCAL_WORLD_SIZE": nodes.count(nodes[rank]),
        "NODE_RANK": order.index(nodes[rank]),
        "NUM_NODES": len(order),
    }
    if with_slurms:
        told |= {its: told[name] for name, its in _OF_SLURM.items()}
        told["SLURM_NPROCS"] = told["WORLD_SIZE"]
    return {name: str(value) for name, value in told.items()}
