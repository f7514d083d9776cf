"""A run file as its user wrote it: what its recipe derives from the `model` section is put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from liver_hpc.config.completion import Derived, Where
from liver_hpc.config.load import load_run, parse_run
from liver_hpc.config.problems import KeyPath
from liver_hpc.config.schema import RunConfig, own_recipe_directory
from liver_hpc.errors import ConfigError
from liver_hpc.recipes.base import checked_options, find_recipe


def load_users_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """`load_run` of a file that may leave out what its recipe says of the run.

    The dump of what it returns is complete: `load_run` reads it, and needs no recipe for it.

    Raises ConfigError, also for values that differ from those that follow from `model`.
    """
    return load_run(path, overrides, _derive)


def parse_users_run(text: str, name: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The same from a text; `name` stands for it in errors."""
    return parse_run(text, name, overrides, _derive)


def _derive(values: dict[Any, Any], where: Where) -> Mapping[KeyPath, Derived]:
    """What the recipe derives; its checked options take the place of the `model` section."""
    name = values.get("recipe", RunConfig.model_fields["recipe"].default)
    directory, model = values.get("recipe_directory"), values.get("model")
    if not isinstance(name, str) or not isinstance(directory, str | None):
        return {}  # the schema says what is wanted
    try:
        own = own_recipe_directory(name, Path(directory) if directory else None)
    except RuntimeError:  # a home that there is not
        return {}
    recipe = find_recipe(name, own)
    options = checked_options(recipe, model or {}, lambda path: where(("model", *path)))
    try:
        derived = recipe.derived(options)
    except ConfigError as error:
        raise ConfigError(*(f"{where(('model',))}: {each}" for each in error.args)) from None
    if derived:
        values["model"] = options.model_dump(mode="json", exclude_unset=True)
    return derived
