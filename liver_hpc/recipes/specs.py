"""The spec of a run's model: derived by a child process, kept in the run directory.

Deriving imports torch and megatron, which `submit` and the coordinator never do.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from pydantic import BaseModel, TypeAdapter, ValidationError

from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.child import Child, Command
from liver_hpc.host.files import write_whole
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe, load_recipe

SPEC_FILE = "spec.json"
EXIT_REFUSED = 2
"""Exit status of the child for a model that cannot be built or moved."""
_VERSIONS = ("liver-hpc", "torch", "megatron-core")


class _Kept(BaseModel):
    """spec.json. key: what the spec depends on; see `_key`."""

    key: str
    spec: ModelSpec


def load_run_recipe(config: RunConfig, run_directory: Path) -> Recipe:
    """A run's recipe with its spec, from the run directory; it is derived, and put there, where
    what is there is of another recipe, other options, layouts or versions.

    For who starts a run. Raises ConfigError as `load_recipe` and `derive_spec` do, and OSError.
    """
    recipe, kept = load_recipe(config), _kept_in(run_directory)
    if kept is None or kept.key != _key(config):
        kept = keep_spec(config, derive_spec(config), run_directory)
    recipe.spec = kept.spec
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


def keep_spec(config: RunConfig, spec: ModelSpec, run_directory: Path) -> _Kept:
    """Puts a run's spec into its directory. Raises OSError."""
    kept = _Kept(key=_key(config), spec=spec)
    write_whole(run_directory / SPEC_FILE, kept.model_dump_json())
    return kept


def _key(config: RunConfig) -> str:
    layouts = sorted(map(str, config.layouts_listed))
    depends_on = (config.recipe, config.model, layouts, [*map(version, _VERSIONS)])
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def derive_spec(config: RunConfig) -> ModelSpec:
    """What the run's recipe builds in the run's layouts. Takes some seconds.

    Raises as `asked_of_model`.
    """
    found = asked_of_model(config, "liver_hpc.worker.derive", "derive the model's spec")
    return TypeAdapter(ModelSpec).validate_json(found)


def asked_of_model(config: RunConfig, module: str, what: str) -> bytes:
    """What `python -m MODULE RUN.yaml ANSWER` finds of a run's model, in a child.

    Raises ConfigError for a recipe whose model cannot be built or moved, LiverError where the child
    fails otherwise, or takes longer than deadlines.boot_s.
    """
    limit_s = config.deadlines.boot_s
    with tempfile.TemporaryDirectory() as directory:
        run, answer, log = (Path(directory, name) for name in ("run.yaml", "answer", "log"))
        run.write_text(dump_run(config), encoding="utf-8")
        words = [sys.executable, "-P", "-m", module, str(run), str(answer)]
        name = f"a child to {what} (deadlines.boot_s), recipe {config.recipe},"
        child = Child(Command(name, words, log=log, environment=os.environ))
        try:
            code = child.wait(limit_s)
        finally:
            child.end(0.0)
        if code == 0:
            return answer.read_bytes()
        said = log.read_text(errors="replace").strip()
    if code == EXIT_REFUSED:
        raise ConfigError(f"recipe {config.recipe}: {said.rpartition('error: ')[2]}")
    last = said.rpartition("\n")[2] or f"exit code {code}"
    raise LiverError(f"recipe {config.recipe}: cannot {what}: {last}")
