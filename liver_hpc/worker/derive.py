"""Derives the spec of a run's model: `python -m liver_hpc.worker.derive RUN.yaml DERIVED.json`.

A process of its own because it imports torch; `recipes/specs.py` starts it, or the coordinator on
a node (`coordinator/derivation.py`). It uses no device but for layers of Transformer Engine, which
cannot be built without one.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from liver_hpc import __version__
from liver_hpc.checkpoint.newest import goes_on_from
from liver_hpc.config.load import load_run
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE, weights_checkpoint
from liver_hpc.config.schema import AUTO
from liver_hpc.errors import MODELS_ERRORS, LiverError, told_of
from liver_hpc.host.files import write_whole
from liver_hpc.host.version import version_fault
from liver_hpc.layout.candidates import layouts_to_derive
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe, load_recipe, put_first_on_path
from liver_hpc.recipes.specs import DERIVE_MODULE, Answer

if TYPE_CHECKING:
    from liver_hpc.world.derive import Derivation


def main() -> int:
    """Leaves an `Answer`, also for a model that cannot be built or moved."""
    parser = argparse.ArgumentParser(prog="liver_hpc.worker.derive", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("derived", type=Path)
    parser.add_argument("--version", default=__version__, help="the asking host's liver_hpc")
    parser.add_argument("--own-gpus", action="store_true", help="this host's GPUs are the run's")
    parser.add_argument("--on-gpu", action="store_true", help="the model is built on one")
    options = parser.parse_args()
    if fault := version_fault(options.version, "the host that asks"):
        # Before the run file is read, whose keys may be others.
        refused = Answer[ModelSpec](refused=fault)
        write_whole(options.derived, refused.model_dump_json())
        return 0
    environment = {**os.environ}
    if not options.on_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the login node's devices are not ours
    warnings.simplefilter("ignore")
    config = load_run(options.run)
    put_first_on_path(config)
    from liver_hpc.world.device import open_device

    open_device(0)  # before megatron is imported: it brings the stand-in for CUDA
    from liver_hpc.world.derive import Derivation
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.megatron import prepare_process

    install_sentinel(0)
    prepare_process(config.train.seed)
    gc.disable()  # nearly all that is built here goes without it, and looking takes a third longer
    try:
        recipe = load_recipe(config)
        recipe.check_options()
        derivation = Derivation(recipe)
        layouts = (
            layouts_to_derive(config, derivation.layers, derivation.experts)
            if config.layouts == AUTO
            else config.layouts_listed
        )
        derived = Answer[ModelSpec](value=_derived(derivation, recipe, list(layouts)))
    except MODELS_ERRORS as error:
        said = str(error)
        if isinstance(error, SyntaxError):
            said = f"{error.filename}:{error.lineno}: {error.msg}"
        elif not isinstance(error, LiverError):
            said = told_of(error)
        if not options.on_gpu and (why := _why_not_here(error)):
            if options.own_gpus:
                words = [sys.executable, "-P", "-m", DERIVE_MODULE, *sys.argv[1:], "--on-gpu"]
                os.execve(sys.executable, words, environment)
            print(f"{why}: {said}", file=sys.stderr)
            return 1
        derived = Answer[ModelSpec](refused=said)
    write_whole(options.derived, derived.model_dump_json())
    return 0


_NODES_MATTER = {
    "transformer_engine": "Transformer Engine builds its layers on a GPU",
    "ctypes": "a library cannot be loaded here",
}


def _why_not_here(error: BaseException) -> str:
    """Why the nodes may do what this host cannot, where it, or what it was made of, was raised in
    such a package or in what is called there; else empty."""
    cause: BaseException | None = error
    while cause is not None:
        for frame, _ in traceback.walk_tb(cause.__traceback__):
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            if package in _NODES_MATTER:
                return _NODES_MATTER[package]
        cause = cause.__cause__ or cause.__context__
    return ""


def _derived(derivation: Derivation, recipe: Recipe, layouts: list[Layout]) -> ModelSpec:
    """The spec for the run's layouts, and for that of the checkpoint that it begins with, where
    that lies as it did there. Raises CheckpointError where it is not one of this model."""
    found, weights = goes_on_from(recipe.config), recipe.config.checkpoint.weights
    if found is None and weights is None:
        return derivation.spec(layouts)
    from liver_hpc.checkpoint.torch_dist.contents import read_contents, read_held
    from liver_hpc.checkpoint.torch_dist.reads import Source

    if found is None:
        spec = derivation.spec(layouts)
        assert weights is not None
        if (weights.expanduser() / TRACKER_FILE).is_file():  # else a run has its own by now
            held = read_held(weights_checkpoint(weights))
            pieces = derivation.stored(held.known_content).tensors
            Source(held, spec, pieces, weights=True)
        return spec
    contents = read_contents(found)
    contents.check_samples(recipe.config.train)
    contents.check_schedule(recipe.loaded_schedule())
    if contents.by_buckets:
        layouts = [*layouts, contents.layout]
    spec = derivation.spec(layouts)
    Source(contents, spec, derivation.stored(contents.known_content).tensors)
    return spec


if __name__ == "__main__":
    sys.exit(main())
