"""Recipes are found by their name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from liver_hpc.recipes.base import find_recipe

RECIPE = """
import triton
from liver_hpc.recipes.base import Recipe

@triton.jit
def kernel(): ...

class Own(Recipe): ...
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is here")
def test_a_recipe_is_imported_where_megatron_wants_triton_and_no_cuda_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wants_triton.py").write_text(RECIPE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert find_recipe("wants_triton:Own", tmp_path).__name__ == "Own"
    assert "triton" not in sys.modules
