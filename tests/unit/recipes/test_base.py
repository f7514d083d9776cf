"""Recipes are found by their name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel

from liver_hpc.config.problems import key_text
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.base import Recipe, checked_options, find_recipe

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


class Plain(BaseModel):
    """As a page of the documentation shows it."""

    width: int = Field(64, alias="w")
    model_config = ConfigDict(populate_by_name=True)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Careless(BaseModel):
    model_config = ConfigDict(extra="ignore")


def options_of(kind: type[BaseModel], model: dict[str, int]) -> BaseModel:
    found: BaseModel = checked_options(type("Own", (Recipe,), {"Options": kind}), model, key_text)
    return found


def test_a_misspelt_option_is_refused_unless_its_model_says_otherwise() -> None:
    for known in ("width", "w"):
        options = options_of(Plain, {known: 1})
        assert type(options) is Plain
        assert options.width == 1
    with pytest.raises(ConfigError, match=r"^wdith: unknown key; did you mean 'width'"):
        options_of(Plain, {"wdith": 1})
    assert options_of(Open, {"wdith": 1}).model_extra == {"wdith": 1}
    assert options_of(Careless, {"wdith": 1}) == Careless()
    assert options_of(RootModel[dict[str, int]], {"wdith": 1}).model_dump() == {"wdith": 1}
