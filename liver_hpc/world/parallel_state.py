"""Megatron's `parallel_state`, which is never initialised here: it answers for the world of the
calling thread, from that world's `ProcessGroupCollection`."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from liver_hpc.layout.coordinates import Layout
from liver_hpc.world import module_globals

_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": "dp_cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": "expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
    "_GTP_WEIGHT_REMAT_GROUP": "gtp_remat",
    "_EXPERT_GTP_WEIGHT_REMAT_GROUP": "expt_gtp_remat",
}
"""By the names of 0.16 to 0.19: which group of a collection each is."""
_RANKS = {
    "_EMBEDDING_GLOBAL_RANKS": "embd",
    "_POSITION_EMBEDDING_GLOBAL_RANKS": "pos_embd",
    "_PIPELINE_GLOBAL_RANKS": "pp",
    "_DATA_PARALLEL_GLOBAL_RANKS": "dp",
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": "tp",
    "_EXPERT_MODEL_PARALLEL_RANKS": "ep",
    "_MODEL_PARALLEL_GLOBAL_RANKS": "mp",
    "_CONTEXT_PARALLEL_GLOBAL_RANKS": "cp",
    "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": "dp_cp",
    "_GTP_WEIGHT_REMAT_GLOBAL_RANKS": "gtp_remat",
    "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS": "expt_gtp_remat",
}
"""Of which group each lists the members; global ranks are worker ids here."""
_SEATS = {
    "TENSOR_MODEL_PARALLEL": "tp",
    "PIPELINE_MODEL_PARALLEL": "pp",
    "EXPERT_MODEL_PARALLEL": "ep",
    "EXPERT_TENSOR_PARALLEL": "expt_tp",
}
"""Of which group each is the rank and the size; told, they are not asked of the default group."""


def answer_from(groups: Any, layout: Layout) -> None:
    """Fills a world's copy of the globals, which its threads are answered from. Not collective."""
    mine = module_globals.namespace_of(groups, parallel_state)
    for variable, name in _GROUPS.items():
        if variable in mine:
            mine[variable] = getattr(groups, name, None)
    for variable, name in _RANKS.items():
        group = getattr(groups, name, None)
        if variable in mine and group is not None:
            mine[variable] = dist.get_process_group_ranks(group)
    for axis, name in _SEATS.items():
        group = getattr(groups, name)
        mine[f"_MPU_{axis}_RANK"], mine[f"_MPU_{axis}_WORLD_SIZE"] = group.rank(), group.size()
    if layout.vpp > 1:
        mine["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = layout.vpp
        mine["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
