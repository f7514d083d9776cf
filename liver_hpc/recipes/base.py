"""The recipe interface: the one place where the runtime learns what is trained.

Importing a recipe and asking for its tensors must not import torch; `build`, `batch` and `loss`
run in workers and may import it.
"""

from __future__ import annotations

import importlib
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, RootModel

from liver_hpc.config.completion import Derived
from liver_hpc.config.problems import KeyPath, key_text, validated
from liver_hpc.config.schema import RunConfig, Section
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Coordinate, Layout
from liver_hpc.layout.ramp import samples_before
from liver_hpc.layout.tensors import ModelSpec, TensorSpec, contradictions

if TYPE_CHECKING:
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.module import MegatronModule

LossFunction = Callable[["torch.Tensor"], tuple["torch.Tensor", dict[str, "torch.Tensor"]]]


class NoOptions(Section):
    """The `model` section of a recipe that takes no options."""


@dataclass(frozen=True)
class BuildContext:
    """What a recipe needs to build its model: where it sits, and the groups to talk over.

    chunk: which of its stage's chunks is to be built; Megatron's vp_stage.
    draws: whether what the model fills its parameters with is recorded, for `Recipe.initial`:
        Megatron's perform_initialization. Else the runtime replaces it.
    """

    layout: Layout
    at: Coordinate
    groups: ProcessGroupCollection
    chunk: int = 0
    draws: bool = False

    @property
    def is_first_stage(self) -> bool:
        """Whether the chunk is the model's first one."""
        return self.at.pp == 0 and self.chunk == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether the chunk is the model's last one."""
        return self.at.pp == self.layout.pp - 1 and self.chunk == self.layout.vpp - 1

    @property
    def vp_stage(self) -> int | None:
        """The chunk as Megatron has it: None without an interleaved pipeline."""
        return self.chunk if self.layout.vpp > 1 else None


def megatron_sizes(layout: Layout) -> dict[str, Any]:
    """A layout as keywords of Megatron's TransformerConfig."""
    return {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp if layout.vpp > 1 else None,
        "context_parallel_size": layout.cp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
    }


class Recipe(ABC):
    """What is trained. One object a process; `model` is the checked `model` section."""

    Options: ClassVar[type[BaseModel]] = NoOptions
    """pydantic model of the run file's `model` section, in which a key that it does not know is
    refused, unless its configuration says otherwise (`extra`)."""
    loss_communicates: ClassVar[bool] = False
    """Whether its loss function may be collective over data-parallel ranks, all of which compute
    equally many micro-batches then."""

    def __init__(self, options: Any, config: RunConfig) -> None:
        self.options = options
        self.config = config
        self._spec: ModelSpec | None = None
        self.reading = threading.RLock()
        """Held while samples are read: a data set has one reader at a time, whoever reads ahead."""

    @classmethod
    def derived(cls, options: Any) -> Mapping[KeyPath, Derived]:
        """Values of the run file that follow from the checked `model` section, by key: the run file
        need not have them, and where it has, they must be equal, or say that they may differ. Must
        not import torch.

        Raises ConfigError for options that cannot be had.
        """
        return {}

    @classmethod
    def notes(cls, options: Any) -> Sequence[str]:
        """What a user is told of the checked options at submit. Must not import torch."""
        return ()

    def check_options(self) -> None:  # noqa: B027 - pydantic has checked them
        """Raises ConfigError for options that only a process with torch can judge; called once, by
        the one that derives the model's spec."""

    def check_data(self) -> None:  # noqa: B027 - a recipe may know nothing
        """Raises ConfigError for data that is not there, or too little, where that is seen on the
        host where a run is submitted. Must not import torch."""

    @abstractmethod
    def build(self, context: BuildContext) -> MegatronModule:
        """One chunk of the model at one coordinate. Not collective: it must not communicate.

        Parameters need no values but where `context.draws`, and random numbers are not drawn: the
        runtime fills them from `initial` or from the source world. Buffers begin with the values
        that they are built with, alike on every worker: what is drawn for one comes from a
        generator of its own.
        """

    @abstractmethod
    def batch(self, step: int) -> Sequence[Any]:
        """The samples of global batch `step`, as cheap handles such as indices; a function of the
        step alone. `sample_numbers` says which and how many."""

    def sample_numbers(self, step: int) -> range:
        """The samples of global batch `step` by their numbers in the run, from 0:
        `train.global_batch` of them, fewer during `train.rampup`."""
        train = self.config.train
        return range(samples_before(train, step), samples_before(train, step + 1))

    def fetch(self, samples: Sequence[Any], layout: Layout, at: Coordinate) -> Any:
        """What `loss` gets of a micro-batch's samples, on the worker that sits at `at`: reads them
        from where they lie. Not collective; draws random numbers from generators of its own alone,
        which the samples seed; leaves the device alone.

        Where a recipe has its own, it is called `train.read_ahead` micro-batches ahead, in a
        thread beside training; for validation in the thread that computes. By default it gives
        the samples as they are.
        """
        return samples

    @abstractmethod
    def loss(self, model: MegatronModule, samples: Any) -> tuple[torch.Tensor, LossFunction]:
        """Runs the forward of one micro-batch; samples: as `fetch` gives them.

        Returns the stage's output tensor, and the function that turns the last stage's output
        into (mean loss over the micro-batch, {"loss": detached mean}). With context parallelism
        each rank gives its share, of which the mean is the sum. Where the second has "tokens", the
        number of tokens that this mean is over, of whole samples, the step's loss is the mean over
        tokens. Whatever else the second has is a metric of the step, recorded by its name: a mean
        that is treated as the loss is, or two values, a sum and what the mean of it is over, of
        this rank's share, as in the reports of Megatron's scripts. Validation leaves metrics out.
        """

    def validation_batch(self, number: int) -> Sequence[Any]:
        """The `train.global_batch` samples of a global batch of the validation set, for `loss`, as
        `batch`; number: counts the validation batches of the whole run, from 0.

        Raises ConfigError where the recipe has no validation set.
        """
        raise ConfigError(
            f"eval: recipe {type(self).__name__} has no validation set (validation_batch)"
        )

    def initial(self, tensor: TensorSpec, generator: torch.Generator) -> torch.Tensor:
        """First value of a whole tensor, fp32, of the tensor's global shape.

        The generator is seeded by (run seed, tensor name): the start is the same everywhere.
        Without one of the recipe's own it is what the model fills a tensor with as it is built with
        nothing split, drawn from this generator; a model of which that cannot be had is refused.
        """
        from liver_hpc.recipes.first_values import replayed

        return replayed(tensor, generator)

    def python_path(self) -> Sequence[Path]:
        """Directories that go first on Python's path, before torch and megatron are imported."""
        return ()

    def checks_gradients(self) -> bool:
        """Whether gradients that are not finite end a step before its update, and the run with it.
        Asked as a world is built, whose groups are in use on the calling thread."""
        return False

    def checkpoint_extras(self, step: int) -> Mapping[str, Any]:
        """What a job's checkpoint of step `step` holds beside what the runtime knows of, by the
        names of Megatron's checkpoints: `args`, a namespace, for one. Called on rank 0 of a world,
        whose groups are in use on the calling thread.
        """
        return {}

    def loaded_schedule(self) -> Mapping[str, Any]:
        """What the schedule in a checkpoint must be that a run of it loads, by the names in
        Megatron's; what is not named may be anything."""
        return {}

    def open(self, run_directory: Path) -> None:  # noqa: B027 - a recipe without data needs none
        """Opens the data; called once in every worker before the first `loss`."""

    def texts(self) -> Mapping[str, bytes]:
        """What this process has read of the run's code beside the recipe's module, as it has read
        it, by name: workers in which it differs do not train together. Called after `open`."""
        return {}

    def hidden_shape(self) -> tuple[int, ...]:
        """[sequence, micro batch, hidden] of the tensor between pipeline stages; for pp > 1."""
        name = type(self).__name__
        raise ConfigError(f"recipe {name} gives no hidden_shape, so it allows pp=1 only")

    def tokens(self) -> int:
        """Tokens of one sample, for throughput figures."""
        return 1

    def rehearsal_bytes(self, layout: Layout) -> int | None:
        """The most bytes of activations that a worker of a layout holds while it rehearses a step:
        of one micro-batch, in an interleaved pipeline of one for each stage. None: the recipe does
        not know, and they are not counted. Must not import torch."""
        return None

    def summary(self) -> Mapping[str, str]:
        """Facts for `--dry-run`, name -> text."""
        return {}

    @property
    def knows_spec(self) -> bool:
        return self._spec is not None

    @property
    def spec(self) -> ModelSpec:
        """The spec of the model, which is derived before a run (`specs.py`)."""
        if self._spec is None:
            raise ConfigError(
                f"recipe {type(self).__name__}: the spec of its model is not known yet"
            )
        return self._spec

    @spec.setter
    def spec(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a spec that contradicts itself."""
        if problem := next(contradictions(spec), ""):
            raise ConfigError(f"the spec of the model contradicts itself: {problem}")
        self._spec = spec

    def check_options_in(self, layout: Layout) -> None:  # noqa: B027 - a recipe may know nothing
        """Raises ConfigError where options alone say that the model cannot be laid out so: before
        its spec is derived, which takes long, or cannot be done where a run is submitted."""

    def check_layout(self, layout: Layout) -> None:
        """Raises ConfigError when the model cannot be laid out so."""
        self.check_options_in(layout)
        if layout.pp > 1:
            self.hidden_shape()
        self.spec.check_layout(layout)


def find_recipe(name: str, directory: Path | None) -> type[Recipe]:
    """Imports a recipe, "module:Class".

    One of the user's own is found on Python's path, else in its directory: what lies there besides
    takes no library's place. Raises ConfigError naming what was wanted and what came.
    """
    module_name, _, class_name = name.partition(":")
    if not class_name or "" in module_name.split("."):
        raise ConfigError(f"recipe: wanted module:Class, got {name!r}")
    if directory is not None and str(directory) not in sys.path:
        sys.path.append(str(directory))
    try:
        module = _imported(module_name)
    except SyntaxError as error:
        where = f"{error.filename}:{error.lineno}: {error.msg}"
        raise ConfigError(f"recipe: cannot import {module_name!r}: {where}") from error
    except ImportError as error:
        too = "" if directory is None else f"; it was looked for in {directory} too"
        if error.name is not None and error.name.partition(".")[0] in ("torch", "megatron"):
            too = "; where that is on the nodes alone, import it in the recipe's methods"
        raise ConfigError(f"recipe: cannot import {module_name!r}: {error}{too}") from error
    recipe_class = getattr(module, class_name, None)
    if not (isinstance(recipe_class, type) and issubclass(recipe_class, Recipe)):
        raise ConfigError(f"recipe: {module_name!r} has no subclass of Recipe named {class_name!r}")
    if not (isinstance(recipe_class.Options, type) and issubclass(recipe_class.Options, BaseModel)):
        raise ConfigError(f"recipe: {name}.Options: wanted a subclass of pydantic.BaseModel")
    return recipe_class


def _imported(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
    # megatron-core >= 0.17 wants it, which is not where no CUDA is.
    from liver_hpc.world.cpu_shim import import_only_triton

    with import_only_triton():
        return importlib.import_module(name)


def load_recipe(config: RunConfig) -> Recipe:
    """The run's recipe, its `model` section checked. Raises ConfigError for what is wrong."""
    recipe_class = find_recipe(config.recipe, config.own_recipe_directory)
    if config.eval is not None and recipe_class.validation_batch is Recipe.validation_batch:
        raise ConfigError(
            f"eval: {recipe_class.__name__} has no validation set: validation_batch is missing"
        )
    options = checked_options(recipe_class, config.model, lambda path: key_text(("model", *path)))
    return recipe_class(options, config)


def checked_options(
    recipe_class: type[Recipe], model: Mapping[Any, Any], where: Callable[[KeyPath], str]
) -> Any:
    """A recipe's options of a `model` section. Raises ConfigError with all that is wrong, each
    after what `where` says of its path."""
    options = _checked(recipe_class.Options, model, where)
    for path, section, given in _sections_below(options, model):

        def below(at: KeyPath, path: KeyPath = path) -> str:
            return where((*path, *at))

        _checked(section, given, below)
    return options


def _checked(options: type[BaseModel], given: Any, where: Callable[[KeyPath], str]) -> BaseModel:
    if "extra" not in options.model_config and not issubclass(options, RootModel):
        # pydantic would drop what is misspelt.
        strict = type(options.__name__, (options,), {"model_config": ConfigDict(extra="forbid")})
        validated(strict, given, where)
    return validated(options, given, where)


def _sections_below(
    value: Any, given: Any, path: KeyPath = ()
) -> Iterator[tuple[KeyPath, type[BaseModel], Mapping[Any, Any]]]:
    """The models that checked options hold, with their paths and what they were made of."""
    value = value.root if isinstance(value, RootModel) else value
    parts: Mapping[Any, Any] = value if isinstance(value, Mapping) else {}
    if isinstance(value, BaseModel):
        fields = type(value).model_fields.items()
        keys = [(key, name) for name, field in fields for key in (name, field.validation_alias)]
        parts = {key: getattr(value, name) for key, name in keys if isinstance(key, str)}
    elif isinstance(value, list | tuple) and isinstance(given, list):
        parts, given = dict(enumerate(value)), dict(enumerate(given))
    for key in parts.keys() & given if isinstance(given, Mapping) else ():
        at = (*path, key)
        if isinstance(parts[key], BaseModel) and isinstance(given[key], Mapping):
            yield at, type(parts[key]), given[key]
        yield from _sections_below(parts[key], given[key], at)


def put_first_on_path(config: RunConfig) -> None:
    """Puts a recipe's `python_path` first on this process's; before megatron is imported.

    Raises ConfigError as `load_recipe`.
    """
    wanted = [str(path) for path in load_recipe(config).python_path()]
    sys.path[:0] = [path for path in wanted if path not in sys.path]
