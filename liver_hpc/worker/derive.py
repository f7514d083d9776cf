"""Derives the spec of a run's model: `python -m liver_hpc.worker.derive RUN.yaml SPEC.json`.

A process of its own because it imports torch; `recipes/specs.py` starts it. It needs no device.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

from pydantic import TypeAdapter

from liver_hpc.config.load import load_run
from liver_hpc.config.schema import AUTO
from liver_hpc.layout.candidates import layouts_to_derive
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.specs import EXIT_REFUSED


def main() -> int:
    """EXIT_REFUSED for a model that cannot be built or moved, with the reason on stderr."""
    parser = argparse.ArgumentParser(prog="liver_hpc.worker.derive", description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("spec", type=Path)
    options = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the login node's devices are not ours
    warnings.simplefilter("ignore")
    from liver_hpc.world.device import open_device

    open_device(0)  # before megatron is imported: it brings the stand-in for CUDA
    from liver_hpc.world.derive import MODELS_ERRORS, Derivation
    from liver_hpc.world.groups import install_sentinel
    from liver_hpc.world.megatron import prepare_process

    config = load_run(options.run)
    install_sentinel(0)
    prepare_process(config.train.seed)
    try:
        derivation = Derivation(load_recipe(config))
        layouts = (
            layouts_to_derive(config, derivation.layers, derivation.experts)
            if config.layouts == AUTO
            else config.layouts_listed
        )
        spec = derivation.spec(layouts)
    except MODELS_ERRORS as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    options.spec.write_bytes(TypeAdapter(ModelSpec).dump_json(spec))
    return 0


if __name__ == "__main__":
    sys.exit(main())
