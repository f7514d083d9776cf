"""A job of Megatron's own: parallel_state, its distributed optimizer, dist_checkpointing, over gloo
in real processes. It saves and loads by the calls of megatron/training/checkpointing.py.

Every element of its state is a function of the checkpoint's key and of its place in the tensor that
lies there, whatever the layout.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import multiprocessing
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from liver_hpc.layout.coordinates import Layout
from tests.integration.random_tokens import RandomTokenGPT, RandomTokens, tiny_config

ADAM_STEP = 7
SIZES = {"layers": 4, "hidden": 32, "ffn_hidden": 48, "seq_length": 8, "vocab_size": 64}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout, how its optimizer is saved: the sharding type; and further sections of
    the run file."""

    layout: str
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sharding: str = "dp_reshardable"
    overlap: bool = False
    distributed: bool = True
    sections: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def sizes(self) -> Layout:
        return Layout.parse(self.layout)


def recipe_of(model: Mapping[str, Any], **sections: Any) -> RandomTokenGPT:
    config = tiny_config(**{**SIZES, **model})
    config = type(config).model_validate({**config.model_dump(), **sections})
    recipe = RandomTokenGPT(RandomTokenGPT.Options.model_validate(config.model), config)
    recipe.open(Path())
    return recipe


def value_of(
    kind: str, key: str, shape: tuple[int, ...], offset: tuple[int, ...], like: Any
) -> Any:
    """What lies at an offset of a key's tensor, of the shape of `like`, fp32."""
    import torch

    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    lengths = (1,) * (len(shape) - like.dim()) + tuple(like.shape)
    index = torch.zeros(lengths, dtype=torch.float64)
    for dim, (stride, start, length) in enumerate(zip(strides, offset, lengths, strict=True)):
        places = (torch.arange(length, dtype=torch.float64) + start) * stride
        index += places.view([-1 if d == dim else 1 for d in range(len(shape))])
    shift = zlib.crc32((kind + key).encode()) % 97
    return ((index % 1021 + shift) / 1024).float().reshape(like.shape)


def parts_of(item: Any, data: Any) -> Iterator[Any]:
    """The sharded tensors of `data`, which is in the place of a parameter's."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    if isinstance(item, ShardedTensorFactory):
        yield from nested_values(item.build_fn(item.key, data, item.replica_id, None))
    else:
        yield dataclasses.replace(item, data=data, dtype=data.dtype)


def expected(item: Any, kind: str, data: Any) -> Any:
    """What a parameter's place in the checkpoint says that its state of a kind is, fp32."""
    import torch

    found = torch.zeros(data.shape)
    for part in parts_of(item, found):
        part.data.copy_(
            value_of(kind, part.key, tuple(part.global_shape), tuple(part.global_offset), part.data)
        )
    return found


class MegatronJob:
    """One rank of a job, of which a test calls methods on all ranks at once."""

    def __init__(self, store: str, ranks: int, rank: int) -> None:
        import torch.distributed as dist

        from liver_hpc.world.device import open_device

        open_device(0)
        # Megatron's writer has processes of its own, which daemons must not have.
        vars(multiprocessing.current_process())["_config"]["daemon"] = False
        dist.init_process_group("gloo", init_method=f"file://{store}", world_size=ranks, rank=rank)
        self._rank = rank
        _keep_steps_apart()

    def save(
        self,
        case: Case,
        path: str,
        step: int,
        samples: int,
        weights: bool = False,
        skipped: int = 0,
    ) -> Any:
        """Saves a state as a script's job would after so many steps, of so many samples in all;
        only with the ranks that the layout has. weights: them alone, as with --no-save-optim.
        skipped: samples that its schedule has not counted."""
        from megatron.core import dist_checkpointing
        from megatron.core.dist_checkpointing.serialization import (
            get_default_save_sharded_strategy,
        )

        with _Job(case) as job:
            job.fill()
            job.set_steps(ADAM_STEP)
            args = argparse.Namespace(
                tensor_model_parallel_size=case.sizes.tp,
                pipeline_model_parallel_size=case.sizes.pp,
                virtual_pipeline_model_parallel_size=case.sizes.vpp if case.sizes.vpp > 1 else None,
                context_parallel_size=case.sizes.cp,
                expert_model_parallel_size=case.sizes.ep,
                data_parallel_size=case.sizes.dp,
                sequence_parallel=case.sizes.sequence_parallel,
                world_size=case.sizes.workers,
                consumed_train_samples=samples,
            )
            content = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
            if case.distributed:
                content["distrib_optim_sharding_type"] = case.sharding
            metadata = job.metadata(content)
            state = job.state_dict(metadata, is_loading=False)
            state |= {"args": args, "checkpoint_version": 3.0, "iteration": step}
            if weights:
                del state["optimizer"]
            elif skipped:
                state["opt_param_scheduler"] = {"num_steps": samples - skipped}
            if self._rank == 0:
                Path(path).mkdir(parents=True)
            dist_checkpointing.save(
                state,
                path,
                get_default_save_sharded_strategy("torch_dist"),
                content_metadata=content,
            )
            _end_writers()

    def train(self, case: Case, first: Mapping[str, Any], steps: int) -> list[tuple[float, float]]:
        """Loss and gradient norm of steps of one worker, as a script's loop has them. first: values
        of parameters, by name."""
        import torch
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward(samples: Iterator[Any], model: Any) -> Any:
            tokens, labels, _ = (part[None] for part in next(samples))
            losses = model(tokens, torch.arange(tokens.shape[1])[None], None, labels=labels)
            return losses, lambda losses: (losses.mean(), losses.mean().item())

        course = []
        with _Job(case) as job:
            (chunk,) = job.chunks
            for name, parameter in chunk.bare.named_parameters():
                parameter.data.copy_(torch.from_numpy(first[name]))
            job.optimizer.reload_model_params()
            chunk.config.finalize_model_grads_func = finalize_model_grads
            job.set_steps(0)
            batch = case.sections["train"]["global_batch"]
            data = RandomTokens(SIZES["seq_length"], SIZES["vocab_size"])
            samples = map(data.sample, itertools.count())
            for _ in range(steps):
                chunk.zero_grad_buffer()
                job.optimizer.zero_grad()
                losses = get_forward_backward_func()(
                    forward_step_func=forward,
                    data_iterator=samples,
                    model=[chunk],
                    num_microbatches=batch,
                    seq_length=SIZES["seq_length"],
                    micro_batch_size=1,
                    forward_only=False,
                )
                _, grad_norm, _ = job.optimizer.step()
                job.scheduler.step(1)
                course.append((sum(losses) / batch, grad_norm))
        return course

    def load(self, case: Case, path: str) -> Any:
        """Loads a checkpoint; (iteration, samples, Adam's steps, what differs)."""
        import torch
        from megatron.core import dist_checkpointing

        with _Job(case) as job:
            common = dist_checkpointing.load_common_state_dict(path)
            content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
            metadata = job.metadata(content)
            wanted = job.state_dict(metadata, is_loading=True)
            state = dist_checkpointing.load(wanted, path, strict="assume_ok_unexpected")
            for number, chunk in enumerate(job.chunks):
                chunk.module.load_state_dict(state[job.key(number)], strict=True)
            with torch.no_grad():
                job.optimizer.load_state_dict(state["optimizer"])
            return (
                state["iteration"],
                state["args"].consumed_train_samples,
                sorted(job.steps()),
                list(job.differences()),
                state.get("opt_param_scheduler"),
            )


def _keep_steps_apart() -> None:
    """torch's Adam counts steps beside its moments, where Megatron's distributed optimizer looks
    for tensors of the parameter's shape when it loads (0.16)."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    kind: Any = DistributedOptimizer
    plain = kind._set_main_param_and_optimizer_states

    def put(self: Any, parameter: Any, tensors: Any) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        plain(self, parameter, {**tensors, "step": self.optimizer.state[main]["step"]})

    kind._set_main_param_and_optimizer_states = put


def _end_writers() -> None:
    """Megatron's writer leaves a process behind, which would outlive this one."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    for child in multiprocessing.active_children():
        child.terminate()
        child.join()
    filesystem_async._results_queue = None


class _Job:
    """Model and optimizer of one rank; a context manager."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def __enter__(self) -> _Job:
        import torch
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.transformer.module import Float16Module

        from liver_hpc.recipes.base import BuildContext

        sizes = self._case.sizes
        parallel_state.initialize_model_parallel(
            sizes.tp,
            sizes.pp,
            sizes.vpp if sizes.vpp > 1 else None,
            context_parallel_size=sizes.cp,
            expert_model_parallel_size=sizes.ep,
            create_gloo_process_groups=False,
        )
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        recipe = recipe_of(self._case.model, **self._case.sections)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        at = sizes.coordinate(torch.distributed.get_rank())
        bf16 = recipe.options.dtype == "bf16"
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=not recipe.config.train.grad_reduce_in_bf16,
            use_distributed_optimizer=self._case.distributed,
            overlap_grad_reduce=self._case.overlap,
            bucket_size=10_000 if self._case.overlap else None,
        )
        self.chunks = []
        for number in range(sizes.vpp):
            module = recipe.build(BuildContext(sizes, at, groups, number))
            for parameter in module.parameters():
                parameter.data.zero_()
            wrapped = Float16Module(module.config, module) if bf16 else module
            chunk = DistributedDataParallel(
                module.config, options, wrapped, disable_bucketing=number > 0
            )
            chunk.bare = module
            self.chunks.append(chunk)
        adam = recipe.config.optimizer
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=adam.lr,
                min_lr=adam.min_lr,
                decoupled_lr=adam.decoupled_lr,
                decoupled_min_lr=adam.decoupled_min_lr,
                weight_decay=adam.weight_decay,
                adam_beta1=adam.beta1,
                adam_beta2=adam.beta2,
                adam_eps=adam.eps,
                clip_grad=adam.clip_grad,
                bf16=bf16,
                params_dtype=torch.bfloat16 if bf16 else torch.float32,
                use_distributed_optimizer=self._case.distributed,
            ),
            self.chunks,
            use_gloo_process_groups=False,
        )
        self._begin_adam()
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=adam.lr,
            min_lr=adam.min_lr,
            lr_warmup_steps=0,
            lr_decay_steps=1,
            lr_decay_style="constant",
            start_wd=adam.weight_decay,
            end_wd=adam.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        return self

    def __exit__(self, *_error: object) -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    def key(self, number: int) -> str:
        return f"model{number}" if len(self.chunks) > 1 else "model"

    def metadata(self, content: Mapping[str, Any] | None) -> dict[str, Any]:
        from megatron.core import parallel_state

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return {**(content or {}), "dp_cp_group": group}

    def state_dict(self, metadata: dict[str, Any], is_loading: bool) -> dict[str, Any]:
        state: dict[str, Any] = {
            self.key(number): chunk.bare.sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(self.chunks)
        }
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, metadata=metadata, is_loading=is_loading
        )
        return state

    def _parameters(self) -> Iterator[tuple[Any, Any]]:
        """Every parameter or buffer, and what sharded_state_dict says of it."""
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        for chunk in self.chunks:
            for item in nested_values(chunk.bare.sharded_state_dict(metadata=self.metadata({}))):
                if getattr(item, "data", None) is not None and hasattr(item.data, "shape"):
                    yield item.data, item

    def _shards(self) -> Iterator[tuple[str, Any, Any, slice]]:
        """(kind, what is there, parameter, the part of it) of the optimizer's state."""
        for one in self.optimizer.chained_optimizers:
            if hasattr(one, "gbuf_ranges"):
                for buffer in one.gbuf_ranges:
                    for buckets in buffer.values():
                        for bucket in buckets:
                            for parameter, ranges in bucket["param_map"].items():
                                group, place = one.model_param_group_index_map[parameter]
                                main = one.optimizer.param_groups[group]["params"][place]
                                part = slice(ranges["param"].start, ranges["param"].end)
                                yield from self._kinds(one, main, parameter, part)
            else:
                groups = getattr(one, "float16_groups", None)
                if groups is None:
                    pairs = [(p, p) for g in one.optimizer.param_groups for p in g["params"]]
                else:
                    pairs = [
                        pair
                        for low, full in zip(groups, one.fp32_from_float16_groups, strict=True)
                        for pair in zip(low, full, strict=True)
                    ]
                for parameter, main in pairs:
                    yield from self._kinds(one, main, parameter, slice(None))

    def _kinds(
        self, one: Any, main: Any, parameter: Any, part: slice
    ) -> Iterator[tuple[str, Any, Any, slice]]:
        yield "", main.data, parameter, part
        for kind in ("exp_avg", "exp_avg_sq"):
            yield kind, one.optimizer.state[main][kind], parameter, part

    def _begin_adam(self) -> None:
        """Makes Adam's state; torch's has none before its first step, which Megatron's fallback to
        it does not expect when it loads."""
        import torch

        for one in self.optimizer.chained_optimizers:
            for group in one.optimizer.param_groups:
                for main in group["params"]:
                    one.optimizer.state[main] = {
                        "exp_avg": torch.zeros_like(main.data),
                        "exp_avg_sq": torch.zeros_like(main.data),
                        "step": torch.tensor(1.0),
                    }

    def fill(self) -> None:
        items = {}
        for data, item in self._parameters():
            items[data] = item
            data.data.copy_(expected(item, "", data))
        for kind, state, parameter, part in self._shards():
            whole = expected(items[parameter], kind, parameter)
            state.copy_(whole.flatten()[part].view(state.shape))

    def set_steps(self, number: int) -> None:
        for one in self.optimizer.chained_optimizers:
            for state in one.optimizer.state.values():
                state["step"].fill_(number)

    def steps(self) -> set[float]:
        return {
            float(state["step"])
            for one in self.optimizer.chained_optimizers
            for state in one.optimizer.state.values()
        }

    def differences(self) -> Iterator[str]:
        """What is not as it must be."""
        import torch

        items = {}
        for data, item in self._parameters():
            items[data] = item
            if not torch.equal(data.float(), expected(item, "", data).to(data.dtype).float()):
                yield f"parameter {item.key}"
        for kind, state, parameter, part in self._shards():
            whole = expected(items[parameter], kind, parameter).flatten()[part]
            if not torch.equal(state.flatten(), whole):
                yield f"{kind or 'main'} of {items[parameter].key}"
