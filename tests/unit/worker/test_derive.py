"""The process that derives a spec, as far as it goes without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.config.megatron_checkpoint import METADATA_FILE, iteration_path
from liver_hpc.errors import ConfigError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.specs import Answer
from liver_hpc.worker import derive
from tests.fakes import tiny_run
from tests.unit.checkpoint.disk import Disk, pieces_of
from tests.unit.config.runs import minimal
from tests.unit.layout.models import TIED


def test_one_of_another_release_reads_no_run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    derived = tmp_path / "derived.json"
    words = ["derive", str(tmp_path / "missing.yaml"), str(derived), "--version", "0.0.1"]
    monkeypatch.setattr(sys, "argv", words)
    assert derive.main() == 0
    with pytest.raises(ConfigError, match=r"and 0\.0\.1 for the host that asks: install the same"):
        Answer[ModelSpec].read(derived, minimal(), "no answer")


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("transformer_engine.pytorch.module.base", "Transformer Engine builds its layers"),
        ("ctypes", "a library cannot be loaded here"),
    ],
)
def test_what_the_nodes_may_be_able_to_do_is_known_behind_another_error(
    module: str, why: str
) -> None:
    raising: dict[str, Any] = {"__name__": module}
    exec("def build(): raise AssertionError('needs CUDA')", raising)

    def told(build: Callable[[], None]) -> str:
        try:
            try:
                build()
            except (AssertionError, KeyError) as error:
                raise ConfigError(f"layouts.2: {error}") from error
        except ConfigError as error:
            return derive._why_not_here(error)
        raise AssertionError("nothing was raised")

    assert told(raising["build"]).startswith(why)
    assert not told(lambda: {}["no engine"])


def test_a_damaged_checkpoint_keeps_no_run_from_the_one_before(tmp_path: Path) -> None:
    """Of a job whose --load is its --save; the tracker file names the damaged one."""
    disk = Disk(TIED, tmp_path / "run")
    for step in (8, 9):
        disk.save(Layout(1, 1, 2), step)
    (iteration_path(disk.directory, 9) / METADATA_FILE).unlink()
    config = tiny_run(checkpoint={"load": disk.directory, "directory": disk.directory})
    recipe: Any = SimpleNamespace(config=config, loaded_schedule=dict[str, Any])
    stored = SimpleNamespace(tensors=pieces_of(TIED))
    derivation: Any = SimpleNamespace(spec=lambda _: TIED, stored=lambda _: stored)
    assert derive._derived(derivation, recipe, [Layout(1, 1, 1)]) == TIED
