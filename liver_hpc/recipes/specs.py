"""The spec of a run's model: derived by another process, kept in the run directory.

Deriving imports torch and megatron, which `submit` and the coordinator never do. The process is a
child, or where their host has no torch, or the run an image, a task on a node
(coordinator/derivation.py).
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError

from liver_hpc.config.load import dump_run
from liver_hpc.config.megatron_checkpoint import tracked_step
from liver_hpc.config.schema import AUTO, RunConfig
from liver_hpc.errors import CheckpointError, ConfigError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.files import write_whole
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe, load_recipe

SPEC_FILE = "spec.json"
DERIVE_MODULE = "liver_hpc.worker.derive"
CANNOT_DERIVE = "the spec of its model cannot be derived"
_IN_IMAGE = f"{CANNOT_DERIVE} here: its libraries are those of cluster.slurm.container"
_BY_HOST = (
    "layouts: auto is found by this host's libraries, not by those of cluster.slurm.container; "
    "layouts that are listed are tried in the image"
)
NOT_INSTALLED = "not installed"
_VERSIONS = ("liver-hpc", "torch", "megatron-core")
_WORKERS_LIBRARY = re.compile(r"No module named '(torch|megatron|einops|xxhash)\b")


Derive = Callable[[RunConfig], ModelSpec]
Value = TypeVar("Value")


class Answer(BaseModel, Generic[Value]):
    """What a process that imports torch leaves in a file: what it was asked, or why the model
    refuses."""

    value: Value | None = None
    refused: str = ""

    @classmethod
    def read(cls, path: Path, config: RunConfig, failed: str) -> Value:
        """Raises ConfigError for a model that cannot be built or moved; where there is no such
        file, LiverError, which says what has `failed`."""
        try:
            answer = cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            raise LiverError(f"recipe {config.recipe}: {failed}") from None
        if answer.value is None:
            raise ConfigError(f"recipe {config.recipe}: {answer.refused}")
        return answer.value


class _Kept(BaseModel):
    """spec.json. key: what the spec depends on; see `_key`."""

    key: str
    spec: ModelSpec


def load_run_recipe(config: RunConfig, run_directory: Path, derive: Derive | None = None) -> Recipe:
    """A run's recipe with its spec, from the run directory; it is derived, and put there, where
    what is there is of another recipe, other options, layouts or versions.

    derive: how; `derive_spec` without it. For who starts a run. Raises ConfigError as `load_recipe`
    and `derive` do, LiverError as the latter, and OSError.
    """
    recipe, kept = load_recipe(config), _kept_in(run_directory)
    if kept is not None and kept.key == _key(recipe):
        recipe.spec = kept.spec
    else:
        recipe.spec = (derive or derive_spec)(config)
        keep_spec(recipe, run_directory)
    return recipe


def load_workers_recipe(config: RunConfig, run_directory: Path) -> Recipe:
    """The same in a worker, which takes the spec as it is kept: its model is compared with it.

    Raises ConfigError, also where there is none.
    """
    recipe, kept = load_recipe(config), _kept_in(run_directory)
    if kept is None:
        raise ConfigError(f"{run_directory / SPEC_FILE}: no spec of the run's model can be read")
    recipe.spec = kept.spec
    return recipe


def _kept_in(run_directory: Path) -> _Kept | None:
    try:
        return _Kept.model_validate_json((run_directory / SPEC_FILE).read_bytes())
    except (OSError, ValidationError):
        return None


def keep_spec(recipe: Recipe, run_directory: Path) -> None:
    """Puts the spec of a run's recipe into the run's directory. Raises OSError."""
    kept = _Kept(key=_key(recipe), spec=recipe.spec)
    write_whole(run_directory / SPEC_FILE, kept.model_dump_json())


def _key(recipe: Recipe) -> str:
    config, train = recipe.config, recipe.config.train
    source, versions = code_of_spec(type(recipe))
    depends_on = (
        (config.recipe, source, config.model, sorted(map(str, config.layouts_listed))),
        (train.overlap_grad_reduce, train.bucket_elements, train.grad_reduce_in_bf16),
        config.optimizer.decoupled_lr is not None,
        _begins_with(config),
        versions,
    )
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


@cache
def code_of_spec(recipe: type[Recipe]) -> tuple[str, dict[str, str]]:
    """Source of a recipe's module, and versions. Once a process, and those that it forks have what
    it has: what is imported stays, whatever is installed or edited later."""
    source = ""
    with suppress(OSError, TypeError):  # it has none
        source = inspect.getsource(inspect.getmodule(recipe) or recipe)
    return source, versions_of(_VERSIONS)


def _begins_with(config: RunConfig) -> tuple[Any, ...]:
    """Which checkpoints a run may begin with, that must be of its model, and the layout of whose
    optimizer the spec must know."""
    load, weights = config.checkpoint.load, config.checkpoint.weights
    step = None
    with suppress(CheckpointError):  # who loads it tells; a run may go on from its own
        step = None if load is None else tracked_step(load.expanduser())
    return str(load), step, str(weights)


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Which versions of these packages are installed here."""
    versions = dict.fromkeys(packages, NOT_INSTALLED)
    for package in versions:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


def derive_spec(config: RunConfig) -> ModelSpec:
    """What the run's recipe builds in the run's layouts. Takes some seconds.

    Raises as `asked_of_model`, and LiverError where the model is built in an image; layouts that
    are to be found are asked of this host's environment all the same.
    """
    cluster = config.cluster
    in_image = cluster.kind == "slurm" and cluster.slurm.container is not None
    if in_image and config.layouts != AUTO:
        raise LiverError(f"recipe {config.recipe}: {_IN_IMAGE}")
    options = ["--own-gpus"] if config.cluster.kind == "local" else []
    try:
        return asked_of_model(config, DERIVE_MODULE, CANNOT_DERIVE, Answer[ModelSpec], options)
    except ConfigError as error:
        raise ConfigError(*error.args, *([_BY_HOST] if in_image else [])) from error


def asked_of_model(
    config: RunConfig,
    module: str,
    cannot: str,
    answer: type[Answer[Value]],
    options: Sequence[str] = (),
) -> Value:
    """What `python -m MODULE RUN.yaml ANSWER` finds of a run's model, in a child.

    cannot: what is told where it fails. Raises ConfigError for a recipe whose model cannot be built
    or moved, LiverError where the child fails otherwise, or takes longer than deadlines.derive_s.
    """
    limit_s = config.deadlines.derive_s
    with tempfile.TemporaryDirectory() as directory:
        run, found, log = (Path(directory, name) for name in ("run.yaml", "answer.json", "log"))
        run.write_text(dump_run(config), encoding="utf-8")
        words = [sys.executable, "-P", "-m", module, str(run), str(found), *options]
        name = f"{module} (deadlines.derive_s), recipe {config.recipe},"
        child = Child(Command(name, words, log=log, environment=os.environ))
        try:
            code = child.wait(limit_s)
        finally:
            child.end(0.0)
        said = log.read_text(errors="replace").strip().rpartition("\n")[2]
        if _WORKERS_LIBRARY.search(said):
            said += "; pip install 'liver_hpc[worker]' brings it"
        return answer.read(found, config, f"{cannot}: {said or f'exit code {code}'}")
