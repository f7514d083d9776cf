"""What takes long to make and is the same for all tests: made once in a session, by whichever of
its processes wants it first."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from liver_hpc.cli import check_model, submission
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes import specs
from liver_hpc.recipes.base import load_recipe
from tests.integration.forked import child


@contextmanager
def made_once(paths: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """Where it lies for all processes of the session; nobody else is there meanwhile."""
    base = paths.getbasetemp()
    path = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "once" / name
    path.parent.mkdir(exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


@contextmanager
def derived_once(paths: pytest.TempPathFactory) -> Iterator[None]:
    """Runs whose specs depend on the same get the same one, and who derives one is forked: a
    process that begins anew has to import torch."""
    derive = specs.derive_spec

    def derive_once(config: RunConfig) -> ModelSpec:
        with made_once(paths, specs._key(load_recipe(config))) as path:
            if not path.exists():
                answer = specs.Answer[ModelSpec](value=derive(config))
                path.write_text(answer.model_dump_json())
            return specs.Answer[ModelSpec].read(path, config, "made by another test")

    with pytest.MonkeyPatch.context() as patch:
        for module in (submission, check_model):
            patch.setattr(module, "derive_spec", derive_once)
        patch.setattr(specs, "Child", child)
        yield
