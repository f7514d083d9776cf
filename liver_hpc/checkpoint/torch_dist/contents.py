"""What a torch_dist checkpoint holds beside tensors: read into what a run goes on from, and
composed such that Megatron's scripts go on from it.

Sources: megatron/training/checkpointing.py (generate_state_dict, load_checkpoint) and
megatron/core/optimizer/distrib_optimizer.py (sharded_state_dict), 0.16 to 0.19.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from liver_hpc.checkpoint.torch_dist.files import Reader, Table, read_common, read_table
from liver_hpc.config.schema import RunConfig, TrainSection
from liver_hpc.errors import CheckpointError, ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ramp import samples_before
from liver_hpc.protocol.messages import ScalarState

MODEL_SPACE = "fully_reshardable"
BUCKET_SPACE = "dp_reshardable"
_SHARDING = "distrib_optim_sharding_type"
_ONCE_MORE = "let the job save it once more (--dist-ckpt-optim-fully-reshardable)"
_STEPS = re.compile(r"^(chained_\d+\.)?optimizer\.distributed\.dp_group_idx_\d+\.optimizer/")

CONTENT: Mapping[str, Any] = {
    _SHARDING: MODEL_SPACE,
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
"""The content metadata of what is written here: the state of the optimizer lies as the parameters
do, so that a job of any layout loads it."""


@dataclass(frozen=True)
class Held:
    """The tensors of a checkpoint. content: its content metadata, which says how they lie."""

    path: Path
    table: Table
    content: Mapping[str, Any]

    @property
    def known_content(self) -> dict[str, Any]:
        """The content metadata without the groups of the job that saved it."""
        return {key: value for key, value in self.content.items() if not key.endswith("_group")}


@dataclass(frozen=True)
class Contents(Held):
    """All that a job goes on from.

    step: Megatron's iteration. args: of the job that saved it. schedule: the state of Megatron's
    OptimizerParamScheduler.
    """

    step: int
    consumed_samples: int
    optimizer_step: int
    args: Mapping[str, Any]
    schedule: Mapping[str, Any]

    @property
    def by_buckets(self) -> bool:
        return self.content.get(_SHARDING) == BUCKET_SPACE

    @property
    def layout(self) -> Layout:
        """That saved it, which matters where the optimizer's state lies as its buckets did
        (`by_buckets`). Raises CheckpointError for one that no run can have."""
        return _layout(self.path, self.args)

    @property
    def unscheduled_samples(self) -> int:
        """Samples by which the schedule is behind: of updates that the job skipped, as with
        --iterations-to-skip, or as their gradients were not finite."""
        return self.consumed_samples - int(self.schedule.get("num_steps", self.consumed_samples))

    def scalars(self, like: ScalarState, train: TrainSection) -> ScalarState:
        """The state that is in no tensor. like: that of the run's world; train: the run's.

        Raises as `check_samples`.
        """
        self.check_samples(train)
        return like.model_copy(
            update={
                "step": self.step,
                "consumed_samples": self.consumed_samples,
                "unscheduled_samples": self.unscheduled_samples,
                "optimizer_step": self.optimizer_step,
            }
        )

    def check_samples(self, train: TrainSection) -> None:
        """Raises CheckpointError where the job had come to other samples in as many steps."""
        samples = samples_before(train, self.step)
        if samples != self.consumed_samples:
            batch = f"train.global_batch of {train.global_batch}"
            if train.rampup is not None:
                batch = f"train.rampup to {train.global_batch}"
            raise CheckpointError(
                f"{self.path} is of step {self.step}, for which the run's {batch} takes {samples} "
                f"samples; it has consumed {self.consumed_samples}: a run keeps the batch of the "
                "job that it goes on with"
            )

    def check_schedule(self, wanted: Mapping[str, Any]) -> None:
        """Raises CheckpointError where the job had another schedule than `wanted`, as Megatron
        does; its numbers are the job's own to the last digit."""
        others = [
            f"{name} {self.schedule[name]}, wanted {value}"
            for name, value in wanted.items()
            if name in self.schedule and self.schedule[name] != value
        ]
        if others:
            raise CheckpointError(
                f"{self.path} has another schedule than the job's arguments (steps are samples): "
                f"{'; '.join(others)}. To go on by the checkpoint's, write its values into the "
                "arguments; with --override-opt-param-scheduler the arguments hold"
            )


def read_held(path: Path) -> Held:
    """Of the checkpoint in `path`, a release too; raises CheckpointError."""
    table = read_table(path)
    return Held(path, table, read_common(path, table).get("content_metadata") or {})


def read_contents(path: Path) -> Contents:
    """Of the checkpoint in `path`; raises CheckpointError for one that lacks what a run needs."""
    table = read_table(path)
    common = read_common(path, table)
    args = vars(common.get("args", argparse.Namespace()))
    step = common.get("iteration")
    if not isinstance(step, int):
        raise CheckpointError(f"{path} does not say of which iteration it is")
    content = common.get("content_metadata")
    if content is None:  # before 0.13
        own = bool(args.get("ckpt_fully_parallel_save"))
        content = {_SHARDING: "fully_sharded_model_space" if own else "dp_zero_gather_scatter"}
    sharding = content.get(_SHARDING)
    if sharding not in (None, BUCKET_SPACE, MODEL_SPACE):
        raise CheckpointError(
            f"{path} has the optimizer's state as {sharding}; wanted {BUCKET_SPACE} or "
            f"{MODEL_SPACE}: {_ONCE_MORE}"
        )
    return Contents(
        path,
        table,
        content,
        step,
        int(args.get("consumed_train_samples", 0)),
        _optimizer_step(path, common, table),
        args,
        common.get("opt_param_scheduler") or {},
    )


def _optimizer_step(path: Path, common: Mapping[str, Any], table: Table) -> int:
    """How often Adam has stepped: in the parameter groups, which are in common.pt or objects."""
    found = set(_steps(common.get("optimizer")))
    names = [name for name in table.objects if _STEPS.match(name)]
    with Reader(path) as reader:
        found.update(
            step for name in sorted(names) for step in _steps(reader.read(table.objects[name]))
        )
    if not found:
        raise CheckpointError(
            f"{path} has no state of the optimizer (--no-save-optim?), so nothing can go on from it"
        )
    if len(found) > 1:
        raise CheckpointError(f"{path}: Adam's step counters differ: {sorted(found)}")
    return found.pop()


def _steps(tree: Any) -> Iterator[int]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key in ("step", "common_step") and value is not None:
                yield int(value)
            else:
                yield from _steps(value)
    elif isinstance(tree, list | tuple):
        for each in tree:
            yield from _steps(each)


def _layout(path: Path, args: Mapping[str, Any]) -> Layout:
    def size(name: str) -> int:
        return int(args.get(name) or 1)

    tp, pp = size("tensor_model_parallel_size"), size("pipeline_model_parallel_size")
    cp, ep = size("context_parallel_size"), size("expert_model_parallel_size")
    expert_tp = int(args.get("expert_tensor_parallel_size") or tp)
    if args.get("num_experts") and expert_tp != tp:
        raise CheckpointError(
            f"{path} is of a job with --expert-tensor-parallel-size {expert_tp}, which must be its "
            f"--tensor-model-parallel-size of {tp}: {_ONCE_MORE}"
        )
    try:
        return Layout(
            tp,
            pp,
            max(size("data_parallel_size"), -(-ep // cp)),
            cp,
            ep,
            size("virtual_pipeline_model_parallel_size"),
            sequence_parallel=tp > 1 and bool(args.get("sequence_parallel")),
        )
    except ConfigError as error:
        raise CheckpointError(
            f"{path} says that it is of no layout: {error}; {_ONCE_MORE}"
        ) from error


# ---- written


def common_state(
    config: RunConfig,
    layout: Layout,
    scalars: ScalarState,
    groups: Iterable[Mapping[str, Any]],
    extras: Mapping[str, Any],
) -> dict[str, Any]:
    """common.pt of a run's checkpoint.

    groups: the optimizer's parameter groups of all workers. extras: what the recipe has to say
    (`Recipe.checkpoint_extras`); its args and its schedule are completed.
    """
    given = vars(extras.get("args", argparse.Namespace()))
    schedule = _schedule(config, scalars) | extras.get("opt_param_scheduler", {})
    args = argparse.Namespace(**(_least_args(layout) | given | _counters(scalars)))
    state: dict[str, Any] = {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": scalars.step,
        "num_floating_point_operations_so_far": 0,
        "optimizer": _optimizer_state(groups, args.expert_model_parallel_size > 1, scalars),
        "content_metadata": dict(CONTENT),
    }
    further = {key: value for key, value in extras.items() if key != "args"}
    return state | further | {"opt_param_scheduler": schedule}


def _least_args(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "data_parallel_size": layout.dp,
        "world_size": layout.workers,
        "use_distributed_optimizer": True,
        "ckpt_format": "torch_dist",
    }


def _counters(scalars: ScalarState) -> dict[str, Any]:
    """Arguments that a job counts in. Samples of skipped updates it only tells in its log. Random
    states are not saved: here dropout depends on the sample, and no rank has a stream of its own;
    so a script begins its streams by its seed."""
    return {
        "iteration": scalars.step,
        "consumed_train_samples": scalars.consumed_samples,
        "skipped_train_samples": scalars.unscheduled_samples,
        "no_save_optim": None,
        "no_save_rng": True,
    }


def _schedule(config: RunConfig, scalars: ScalarState) -> dict[str, Any]:
    """OptimizerParamScheduler's state: it counts samples."""
    train, schedule, options = config.train, config.schedule, config.optimizer
    batch, whole = train.global_batch, samples_before(train, train.steps)
    return {
        "max_lr": options.lr,
        "min_lr": options.min_lr,
        "lr_warmup_steps": schedule.warmup_steps * batch,
        "lr_decay_steps": whole if schedule.decay_steps is None else schedule.decay_steps * batch,
        "lr_decay_style": schedule.style,
        "num_steps": scalars.consumed_samples - scalars.unscheduled_samples,
        "start_wd": options.weight_decay,
        "end_wd": options.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": whole,
    }


def _optimizer_state(
    groups: Iterable[Mapping[str, Any]], experts_apart: bool, scalars: ScalarState
) -> dict[Any, Any]:
    """What Megatron's optimizer keeps beside tensors: of one optimizer, or of two where the job has
    experts of its own on each rank."""
    dense: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for group in groups:
        apart = experts_apart and group["is_expert_parallel"]
        kept = experts if apart else dense
        # In which layout a group was, and in which order, is nothing to be kept.
        known = {**group, "step": scalars.optimizer_step}
        if not experts_apart:
            known["is_expert_parallel"] = False
        if known not in kept:
            kept.append(known)
    if experts_apart and not experts:  # saved where ep is 1
        experts = [{**group, "is_expert_parallel": True} for group in dense]
    states = [
        {
            "optimizer": {"param_groups": one, "state": {"common_step": scalars.optimizer_step}},
            "param_state_sharding_type": MODEL_SPACE,
        }
        for one in (dense, experts)
        if one
    ]
    return states[0] if len(states) == 1 else dict(enumerate(states))
