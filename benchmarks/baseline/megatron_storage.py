"""Megatron's own checkpoints: dist_checkpointing of model and distributed optimizer, in the
format that every layout can load (`fully_reshardable`). The baseline's only importer of megatron.
"""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)

from liver_hpc.protocol.messages import ScalarState
from liver_hpc.world import thread
from liver_hpc.world.world import World

_SMALL = "liver_scalar_state"


def save(world: World, small: ScalarState, directory: Path) -> None:
    """Writes everything as Megatron-LM does by default, fully parallel over data-parallel replicas;
    complete on return on every worker. `directory` exists, empty. Collective over the world, which
    is the whole of the default group."""
    # Where the writers' results go. Megatron starts a process for that in a process's first save,
    # which then waits for its imports; and it would outlive a worker that is killed.
    if getattr(filesystem_async, "_results_queue", 0) is None:
        filesystem_async._results_queue = queue.Queue()
    state = {**_sharded(world, is_loading=False), _SMALL: small.model_dump_json()}
    strategy = FullyParallelSaveStrategyWrapper(
        get_default_save_sharded_strategy(), world.groups.dp_cp
    )
    dist_checkpointing.save(state, str(directory), sharded_strategy=strategy)


def load(world: World, directory: Path) -> ScalarState:
    """Fills a world of any layout, bit-equal to what was saved; every worker loads what it needs by
    itself. Collective, as `save` is."""
    wanted = _sharded(world, is_loading=True)
    strategy = get_default_load_sharded_strategy(str(directory))
    loaded = dist_checkpointing.load(wanted, str(directory), sharded_strategy=strategy)
    world.chunks[0].module.load_state_dict(loaded["model"])
    _load_optimizer(world, loaded["optimizer"])
    small = ScalarState.model_validate_json(loaded[_SMALL])
    world.refresh_state()
    world.load_scalar_state(small)
    return small


def _sharded(world: World, is_loading: bool) -> dict[str, Any]:
    """Megatron's description of the state. Collective: the optimizer's is gathered to be saved."""
    groups = world.groups
    # The last stage's copy of tied embeddings asks parallel_state for its data-parallel rank, in
    # 0.16 by the first name, in 0.19 by the second.
    for name in ("_DATA_PARALLEL_GROUP_WITH_CP", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT"):
        if hasattr(parallel_state, name):
            setattr(parallel_state, name, groups.dp_cp)
    metadata = {
        "dp_cp_group": groups.dp_cp,
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
    }
    with thread.groups_in_use(groups):
        model = world.chunks[0].module.sharded_state_dict(metadata=metadata)
    optimizer = world.optimizer.sharded_state_dict(model, is_loading=is_loading, metadata=metadata)
    return {"model": model, "optimizer": optimizer}


def _load_optimizer(world: World, loaded: dict[str, Any]) -> None:
    """torch's Adam counts steps in a tensor of each parameter. megatron's load does not expect it
    there (KeyError), and gives all parameters one and the same, which would then advance once a
    parameter: from the second step on, training would silently be another. So it is taken out,
    every parameter gets its own, and the groups' copy, which nobody counts on, goes."""
    (optimizer,) = world.optimizer.chained_optimizers
    tensors = loaded.pop("param_state")
    optimizer.load_state_dict(loaded)
    states = optimizer.optimizer.state.values()
    counts = [state.pop("step", None) for state in states]
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for state, count in zip(states, counts, strict=True):
        if count is not None:
            state["step"] = count.clone()
    if any(count is not None for count in counts):
        for group in optimizer.optimizer.param_groups:
            group.pop("step", None)
