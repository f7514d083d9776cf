"""With which code a worker says that it computes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch

from liver_hpc.recipes.base import find_recipe
from liver_hpc.world.code import code_of, imported_code
from liver_hpc.world.device import Device
from tests.fakes import TinyRecipe, tiny_recipe, tiny_run

RECIPE = """
from tests.fakes import TinyRecipe

class Mine(TinyRecipe): ...
"""


@pytest.fixture(autouse=True)
def no_module_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    for name in ("edited_recipe", "other_recipe"):
        monkeypatch.setitem(sys.modules, name, sys)
        monkeypatch.delitem(sys.modules, name)


def test_a_recipe_that_is_edited_later_is_that_which_was_imported(tmp_path: Path) -> None:
    """As in a warm process that forks workers afterwards."""
    digests = []
    for name in ("edited_recipe", "other_recipe"):
        file = tmp_path / f"{name}.py"
        file.write_text(RECIPE + ("# another loss\n" if digests else ""))
        find_recipe(f"{name}:Mine", tmp_path)
        code = imported_code(f"{name}:Mine")
        file.write_text("")
        assert imported_code(f"{name}:Mine") == code
        digests.append(code[name])
    assert digests[0] != digests[1]


def test_a_worker_says_what_it_has_imported_and_read() -> None:
    class Reader(TinyRecipe):
        def texts(self) -> dict[str, bytes]:
            return {"pretrain_gpt.py": b"import torch"}

    device = Device(torch.device("cpu"))
    plain = code_of(tiny_recipe(tiny_run()), device)
    assert plain["device"] == "cpu"
    assert plain["torch"] == torch.__version__
    assert plain["CUDA"] == str(torch.version.cuda)
    assert plain["megatron-core"] == megatron.core.__version__
    assert {"liver_hpc", "tests.fakes", "transformer-engine"} <= {*plain}
    options: Any = tiny_recipe(tiny_run()).options
    reads = code_of(Reader(options, tiny_run()), device)
    assert {*reads} - {*plain} == {"pretrain_gpt.py"}


def test_a_worker_says_which_samples_its_recipe_gives() -> None:
    """That `open` has shuffled by a seed of its own, or read a file that has grown."""

    class Shuffled(TinyRecipe):
        order: Any = range(480)

        def batch(self, step: int) -> Any:
            return [self.order[number] for number in self.sample_numbers(step)]

    options: Any = tiny_recipe(tiny_run()).options
    recipe, device = Shuffled(options, tiny_run()), Device(torch.device("cpu"))
    says = []
    for order in (
        range(480),
        torch.arange(480),
        [*range(479), 3],
        [5, *range(479)],
        [(f"{n}.txt", n) for n in range(480)],
        [object()] * 480,
    ):
        recipe.order = order
        code = code_of(recipe, device)
        says.append((code.get("batch(0)"), code.get("batch(59)")))
    first, second, third, fourth, fifth, last = says
    assert first == second
    assert (first[0] == third[0], first[1] == third[1]) == (True, False)
    assert first[0] != fourth[0]
    assert None not in fifth
    assert last == (None, None)
