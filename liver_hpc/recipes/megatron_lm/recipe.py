"""The recipe: a pretraining script of Megatron-LM, unchanged."""

from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from liver_hpc.config.completion import Derived
from liver_hpc.config.problems import KeyPath
from liver_hpc.config.schema import AUTO, RunConfig
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ramp import samples_before, step_of
from liver_hpc.recipes.base import BuildContext, LossFunction, Recipe
from liver_hpc.recipes.megatron_lm.arguments import (
    check_data_of,
    derived_from,
    notes_of,
    schedule_to_load,
)
from liver_hpc.recipes.megatron_lm.options import ScriptOptions
from liver_hpc.recipes.megatron_lm.owned import Owned, schedule_in_samples
from liver_hpc.recipes.megatron_lm.words import number_of

if TYPE_CHECKING:
    import torch
    from megatron.core.transformer.module import MegatronModule

    from liver_hpc.recipes.megatron_lm.capture import Captured, Script
    from liver_hpc.recipes.megatron_lm.datasets import Datasets


WHOLE = Layout(1, 1, 1)


class Sample(NamedTuple):
    """A sample of one of the script's datasets."""

    of_validation: bool
    number: int


class Pretrain(Recipe):
    """`model:` is a ScriptOptions. What is trained, on what, and by which loss: the script's."""

    Options = ScriptOptions
    options: ScriptOptions
    loss_communicates = True  # earlier scripts take the mean to report over data-parallel ranks

    def __init__(self, options: ScriptOptions, config: RunConfig) -> None:
        super().__init__(options, config)
        self._script: Script | None = None
        self._datasets: Datasets | None = None

    @classmethod
    def derived(cls, options: Any) -> Mapping[KeyPath, Derived]:
        return derived_from(options.words)

    @classmethod
    def notes(cls, options: Any) -> Sequence[str]:
        return notes_of(options.words)

    def python_path(self) -> Sequence[Path]:
        """The script's own, as where Python runs it, and the checkout's."""
        return [*dict.fromkeys((self.options.script.parent, self.options.checkout))]

    def texts(self) -> Mapping[str, bytes]:
        return {self.options.script.name: self.script.text, **self.script.lists}

    def hidden_shape(self) -> tuple[int, ...]:
        micro_batch = self.config.train.micro_batch
        return (self._number("seq_length"), micro_batch, self._number("hidden_size"))

    def tokens(self) -> int:
        return self._number("seq_length")

    def summary(self) -> Mapping[str, str]:
        script = f"{self.options.script}, {len(self.options.words)} arguments"
        return {"script": script, "parameters": f"{self.spec.elements / 1e6:.2f} M"}

    def _number(self, name: str) -> int:
        found = number_of(self.options.words, name)
        if found is None:
            raise ConfigError(f"model.args: wanted --{name.replace('_', '-')} with a whole number")
        return found

    # ---- the script

    @property
    def script(self) -> Script:
        """Where torch is."""
        if self._script is None:
            from liver_hpc.recipes.megatron_lm import cpu_layers
            from liver_hpc.recipes.megatron_lm.capture import Script

            cpu_layers.install()
            self._script = Script(self.options)
        return self._script

    def check_options(self) -> None:
        self.script.check(self.config.layouts_listed[0] if self.config.layouts != AUTO else WHOLE)

    def build(self, context: BuildContext) -> MegatronModule:
        from megatron.core import tensor_parallel

        captured = self.script.answer_for(context.groups, context.layout, context.at)
        self.script.arguments_of(context.groups).perform_initialization = context.draws
        self._check_embeddings(captured, context.layout)
        with _told_without_an_engine():
            model = _built(captured, context)
        model.model_type = captured.model_type
        if context.vp_stage is not None:
            model.vp_stage = context.vp_stage
        for parameter in model.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        return model

    def checks_gradients(self) -> bool:
        from liver_hpc.world import thread

        args = self.script.arguments_of(thread.here.groups)
        return bool(getattr(args, "check_for_nan_in_loss_and_grad", False))

    def _check_embeddings(self, captured: Captured, layout: Layout) -> None:
        """Copies of the embedding are on the first stage and the last one, and their gradients are
        summed there."""
        if captured.embedding_ranks is None:
            return
        stages = [*range(layout.pp)]
        ranks = {*captured.embedding_ranks(stages)}
        if not ranks <= {0, layout.pp - 1}:
            raise ConfigError(
                f"{self.options.script}: get_embedding_ranks gives stages {sorted(ranks)} of "
                f"{layout.pp}; supported are the first and the last"
            )

    # ---- data

    def check_data(self) -> None:
        check_data_of(self.options.words)

    def open(self, run_directory: Path) -> None:
        from liver_hpc.recipes.megatron_lm.datasets import open_datasets

        layout, limit_s = self.config.layouts_listed[0], self.config.limits.boot_s
        self._datasets = open_datasets(self.script, layout, run_directory / "data-cache", limit_s)
        if self.config.eval is not None and self._datasets.validation is None:
            raise ConfigError(
                "eval: the script's dataset provider gives no validation set; write --eval-iters 0 "
                "into model.args"
            )
        self._check_lengths(self._datasets)

    def _check_lengths(self, datasets: Datasets) -> None:
        """A blend without weights is gone through once, however many samples the steps take."""
        train, evaluation = self.config.train, self.config.eval
        parts = [("training", datasets.train, samples_before(train, train.steps))]
        if evaluation is not None:
            batches = train.steps // evaluation.every_steps * evaluation.steps
            parts.append(("validation", datasets.validation, batches * train.global_batch))
        for part, dataset, wanted in parts:
            held = len(dataset) if hasattr(dataset, "__len__") else wanted
            if held < wanted:
                raise ConfigError(
                    f"the script's {part} set has {held} samples, the run takes {wanted}: want "
                    "fewer, or give each part of a blend a weight, with which samples come again"
                )

    def batch(self, step: int) -> Sequence[Any]:
        """In the order of Megatron's sampler of one epoch."""
        return [Sample(False, number) for number in self.sample_numbers(step)]

    def validation_batch(self, number: int) -> Sequence[Any]:
        size = self.config.train.global_batch
        return [Sample(True, one) for one in range(number * size, (number + 1) * size)]

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        """Of the first tensor-parallel rank at either end of the pipeline, which Megatron's scripts
        read on. What another one wants is read as it asks."""
        ahead = at.tp == 0 and at.pp in (0, layout.pp - 1)
        return samples, self._collated(samples) if ahead else None

    def _collated(self, samples: Sequence[Any]) -> Any:
        import torch
        from torch.utils.data import _utils, default_collate

        pin: Any = _utils.pin_memory.pin_memory
        with self.reading:
            batch = default_collate([self._sample(sample) for sample in samples])
            return pin(batch) if torch.cuda.is_available() else batch  # as Megatron's loader

    def _sample(self, sample: Sample) -> Any:
        if self._datasets is None:
            raise ConfigError("the recipe's data is not open")
        found = self._datasets.validation if sample.of_validation else self._datasets.train
        return found[sample.number]

    def checkpoint_extras(self, step: int) -> Mapping[str, Any]:
        """The script's arguments in the layout that is saved, and what a job of it counts."""
        from liver_hpc.world import thread

        train, evaluation = self.config.train, self.config.eval
        args = copy.copy(self.script.arguments_of(thread.here.groups))
        evaluated = 0 if evaluation is None else step // evaluation.every_steps * evaluation.steps
        args.consumed_valid_samples = evaluated * train.global_batch
        samples = samples_before(train, step)
        operations = self.script.training.num_floating_point_operations(args, samples)
        return {
            "args": args,
            "num_floating_point_operations_so_far": operations,
            "opt_param_scheduler": schedule_in_samples(Owned.of(self.options.words)),
        }

    def loaded_schedule(self) -> Mapping[str, Any]:
        return schedule_to_load(self.options.words)

    # ---- one micro-batch

    def loss(self, model: MegatronModule, samples: Any) -> tuple[torch.Tensor, LossFunction]:
        """The script's own forward step, which takes a batch where it wants one: Megatron's first
        tensor-parallel rank reads it, and passes it on."""
        from megatron.core.num_microbatches_calculator import update_num_microbatches

        from liver_hpc.recipes.megatron_lm.losses import mean_of
        from liver_hpc.world import thread

        samples, batch = samples

        def batches() -> Any:
            yield self._collated(samples) if batch is None else batch

        groups = thread.here.groups
        captured, args = self.script.captured_of(groups), self.script.arguments_of(groups)
        if not samples[0].of_validation:
            train = self.config.train
            args.curr_iteration = step_of(train, samples[0].number)
            args.consumed_train_samples = samples_before(train, args.curr_iteration)
            update_num_microbatches(args.consumed_train_samples, consistency_check=False)
        output, loss_function = captured.forward_step(batches(), model)
        return output, mean_of(loss_function)


@contextlib.contextmanager
def _told_without_an_engine() -> Iterator[None]:
    """Raises ConfigError where Megatron wants a class of Transformer Engine's, which it has not
    imported: of an ImportError it takes no notice before."""
    try:
        yield
    except NameError as error:
        if not str(error.name).startswith("TE"):
            raise
        try:
            importlib.import_module("transformer_engine")
        except ImportError as why:
            raise ConfigError(
                "model.args: --transformer-impl transformer_engine, which is Megatron's default: "
                f"Transformer Engine cannot be imported: {why}; install it, or write "
                "--transformer-impl local"
            ) from why
        raise


def _built(captured: Captured, context: BuildContext) -> Any:
    """The model, or a chunk of it, as Megatron has the script build it."""
    ends = {"pre_process": context.is_first_stage, "post_process": context.is_last_stage}
    if captured.model_builder is not None:
        config = copy.deepcopy(captured.model_config)
        # As the arguments of a world have them, of which this was made before.
        config.transformer.overlap_p2p_comm = False
        config.transformer.perform_initialization = context.draws
        builder = captured.model_builder(config)
        return builder.build_model(context.groups, **ends, vp_stage=context.vp_stage)
    assert captured.model_provider is not None
    offered = {**ends, "vp_stage": context.vp_stage, "pg_collection": context.groups}
    taken = inspect.signature(captured.model_provider).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in taken.values()):
        offered = {name: value for name, value in offered.items() if name in taken}
    return captured.model_provider(**offered)
