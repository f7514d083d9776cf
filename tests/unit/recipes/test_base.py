"""Recipes are found by their name."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def test_options_that_are_no_model_of_pydantics_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ("from liver_hpc.recipes.base import Recipe", "class Own(Recipe): Options = dict")
    (tmp_path / "with_a_dict.py").write_text("\n".join(lines))
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(
        ConfigError, match=r"with_a_dict:Own.Options: wanted a subclass of pydantic"
    ):
        find_recipe("with_a_dict:Own", tmp_path)


class Plain(BaseModel):
    """As a page of the documentation shows it."""

    width: int = Field(64, alias="w")
    model_config = ConfigDict(populate_by_name=True)


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class Careless(BaseModel):
    model_config = ConfigDict(extra="ignore")


def options_of(kind: type[BaseModel], model: dict[str, Any]) -> BaseModel:
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


@dataclass
class Inner:
    width: int = 64


@dataclass
class Own:
    inner: Inner | None = None


class Nested(BaseModel):
    head: Plain = Plain()
    own: Own = Own()
    heads: list[Plain] = []
    named: dict[str, Plain] = {}
    others: Open = Open()
    rows: RootModel[list[Plain]] = RootModel[list[Plain]]([])


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"head": {"wdith": 1}}, "head"),
        ({"heads": [{"w": 1}, {"wdith": 1}]}, "heads.1"),
        ({"named": {"a": {"wdith": 1}}}, "named.a"),
        ({"rows": [{"wdith": 1}]}, "rows.0"),
        ({"own": {"inner": {"wdith": 1}}}, "own.inner"),
    ],
)
def test_a_misspelt_option_of_a_section_is_refused(model: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{key}.wdith: unknown key; did you mean 'width'"):
        options_of(Nested, model)


def test_a_section_may_say_that_it_takes_any_key() -> None:
    options: Any = options_of(Nested, {"others": {"wdith": 1}, "head": {"w": 2}})
    assert options.others.model_extra == {"wdith": 1}
    assert options.head.width == 2
