"""Files in the current directory that are called like a library are not executed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from liver_hpc.cli.client import stop
from liver_hpc.config.load import absolute_paths
from liver_hpc.run.directory import find_run
from tests.unit.config.runs import minimal, write_minimal
from tests.unit.standin import sitecustomize_in

STRAYS = ("h5py", "queue", "submitit", "pydantic")
RECIPE = """
from tests.fakes import TinyRecipe

class Mine(TinyRecipe):
    def build(self, context):
        import torch
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        model = MegatronModule(config)
        model.body = torch.nn.Linear(8, 8)
        return model
"""
LIMIT_S = 60.0


@pytest.fixture
def here(tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current directory with strays, beside which the stand-in for the coordinator lies."""
    here = tmp_path / "here"
    here.mkdir()
    for name in STRAYS:
        (here / f"{name}.py").write_text(
            f"open({str(tmp_path / 'executed')!r}, 'a').write('{name} ')"
        )
    monkeypatch.chdir(here)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{repository}")
    sitecustomize_in(tmp_path, repository, by_rule=False)
    return here


def executed(here: Path) -> str:
    path = here.parent / "executed"
    return path.read_text() if path.exists() else ""


def submit(*words: str, module: str = "liver_hpc.submit") -> str:
    command = [sys.executable, "-m", module, *words, "--cluster", "local"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("words", [("liver_hpc.submit",), ("liver_hpc", "submit")])
def test_a_dry_run_executes_none(here: Path, words: tuple[str, ...]) -> None:
    path = write_minimal(here)
    shown = submit(*words[1:], "--config", str(path), "--dry-run", module=words[0])
    assert "# nothing was launched" in shown
    assert executed(here) == ""


@pytest.mark.long
def test_a_local_run_executes_none(here: Path) -> None:
    submit("--config", str(write_minimal(here)), "--no-follow")
    stop(find_run("latest", here / "runs"), timeout_s=LIMIT_S)
    assert executed(here) == ""


def test_a_recipe_of_ones_own_is_found_there_and_executes_none(here: Path) -> None:
    (here / "mine.py").write_text(RECIPE)
    path = write_minimal(here, recipe="mine:Mine", model={})
    assert f"recipe_directory: {here}\n" in submit("--config", str(path), "--dry-run")
    assert executed(here) == ""


@pytest.mark.long
def test_a_recipe_of_ones_own_is_found_from_elsewhere(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers on other nodes do, and a run that is resumed."""
    (here / "mine.py").write_text(RECIPE)
    resolved = here / "resolved.yaml"
    path = write_minimal(here, recipe="mine:Mine", model={})
    resolved.write_text(submit("--config", str(path), "--dry-run"))
    monkeypatch.chdir(tmp_path)
    assert f"recipe_directory: {here}\n" in submit("--config", str(resolved), "--dry-run")


def test_for_a_recipe_of_the_package_no_directory_is_looked_through(here: Path) -> None:
    ours = minimal(recipe="liver_hpc.recipes.gpt:GPT", recipe_directory=here)
    assert ours.own_recipe_directory is None
    assert absolute_paths(ours).recipe_directory is None


# ---- every place in which Python is started


def launches(path: Path) -> Iterator[tuple[int, str]]:
    """Line and following word of every list or tuple that `sys.executable` stands in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.List | ast.Tuple):
            for word, after in zip(node.elts, node.elts[1:], strict=False):
                if ast.unparse(word) == "sys.executable":
                    yield node.lineno, ast.unparse(after)


def test_python_is_nowhere_started_with_the_current_directory_first(repository: Path) -> None:
    found = [
        (path.relative_to(repository), line, word)
        for path in (repository / "liver_hpc").rglob("*.py")
        for line, word in launches(path)
    ]
    assert len(found) >= 6
    assert [one for one in found if one[2] not in ("'-P'", "'-I'")] == []


def test_the_hand_written_batch_script_does_not_either(repository: Path) -> None:
    lines = (repository / "slurm" / "liver.sbatch").read_text().splitlines()
    assert [line for line in lines if "-m liver_hpc" in line and " -P " not in line] == []
