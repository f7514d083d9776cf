"""configs/reference.yaml names every key, with its default and a comment; both files are right."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from liver_hpc.cli.check import check_run
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import (
    BurstSection,
    ClusterSection,
    ComponentSection,
    ContainerSection,
    DataSection,
    EvalSection,
    LayoutSection,
    NoticeSection,
    OpenMetricsSection,
    RampupSection,
    RunConfig,
    StragglersSection,
    TensorBoardSection,
    WandbSection,
    WorkersSection,
)
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.completion import load_users_run
from liver_hpc.recipes.gpt_config import GPTConfig, LayerTimes
from tests.unit.layout.models import gpt_recipe

LISTED = {"layouts", "notices", "cluster.slurm.components"}
"""Sections whose entries are compared on their own."""
OPTIONAL = {
    "data": DataSection,
    "train.rampup": RampupSection,
    "eval": EvalSection,
    "cluster.slurm.burst": BurstSection,
    "cluster.slurm.container": ContainerSection,
    "model.layer_times": LayerTimes,
    "policy.stragglers": StragglersSection,
    "tracking.tensorboard": TensorBoardSection,
    "tracking.wandb": WandbSection,
    "tracking.openmetrics": OpenMetricsSection,
}
"""Sections that may be null; the file shows them, although for most that is the default."""
ANY_VALUE = {"data.text", "data.split"}
"""Keys that the file must give a value although null is their default."""


@pytest.fixture
def reference(configs: Path) -> dict[str, Any]:
    values = yaml.safe_load((configs / "reference.yaml").read_text())
    assert isinstance(values, dict)
    return values


def differences(model: type[BaseModel], values: dict[str, Any], path: str = "") -> Iterator[str]:
    """Keys that are missing, that are no keys, and values that are not the default."""
    yield from (f"{path}{key}: no such key" for key in values.keys() - model.model_fields.keys())
    for key, field in model.model_fields.items():
        name = f"{path}{key}"
        if key not in values:
            yield f"{name}: missing"
        elif name in LISTED or name == "model":
            continue
        elif isinstance(values[key], dict) and values[key]:
            section = OPTIONAL.get(name, field.annotation)
            assert isinstance(section, type)
            yield from differences(section, values[key], f"{name}.")
        elif not field.is_required() and name not in ANY_VALUE:
            default = field.get_default(call_default_factory=True)
            if values[key] != (str(default) if isinstance(default, Path) else default):
                yield f"{name}: {values[key]!r}, the default is {default!r}"


def test_every_key_with_its_default(reference: dict[str, Any]) -> None:
    assert list(differences(RunConfig, reference)) == []


def test_every_key_of_the_model_section(reference: dict[str, Any]) -> None:
    assert list(differences(GPTConfig, reference["model"], "model.")) == []


def test_every_key_of_layouts_and_notices(reference: dict[str, Any]) -> None:
    layouts = [entry for entries in reference["layouts"].values() for entry in entries]
    assert {key for entry in layouts for key in entry} == set(LayoutSection.model_fields)
    notices = {key for notice in reference["notices"] for key in notice}
    assert notices == set(NoticeSection.model_fields)


def test_every_key_of_the_components(reference: dict[str, Any]) -> None:
    first, second = reference["cluster"]["slurm"]["components"]
    assert set(first) == set(ComponentSection.model_fields)
    assert set(second) <= set(first)
    shown = {"nodes": 2}  # one is the default
    defaults = {
        key: field.default
        for key, field in ComponentSection.model_fields.items()
        if not field.is_required()
    }
    assert {key: first[key] for key in defaults} == {**defaults, **shown}


def test_a_missing_key_would_be_noticed(reference: dict[str, Any]) -> None:
    del reference["workers"]["max"]
    reference["deadlines"]["boot_s"] = 1.0
    reference["handoff"]["more"] = 1
    assert "max" in WorkersSection.model_fields
    assert set(differences(RunConfig, reference)) == {
        "workers.max: missing",
        "deadlines.boot_s: 1.0, the default is 180.0",
        "handoff.more: no such key",
    }


def test_every_key_has_a_comment(configs: Path) -> None:
    """At its line's end or above it."""
    lines = (configs / "reference.yaml").read_text().splitlines()
    bare = [
        line
        for above, line in itertools.pairwise(lines)
        if ":" in line and "# " not in line and not above.startswith("#")
    ]
    assert bare == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [("demo.yaml", "local"), ("reference.yaml", "local"), ("reference.yaml", "slurm"),
     ("slurm.yaml", "slurm")],
)  # fmt: skip
def test_the_shipped_files_pass_all_checks(
    configs: Path, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all trackers are installed."""
    monkeypatch.setattr("liver_hpc.tracking.base.find_spec", lambda name: object())
    container = "cluster.slurm.container=null"  # is Slurm's alone
    overrides = [f"cluster.kind={kind}", *([container] if kind == "local" else [])]
    config = load_run(configs / name, overrides)
    check_run(config, gpt_recipe(config))


def test_the_demo_shows_every_kind_of_change(configs: Path) -> None:
    config = load_run(configs / "demo.yaml")
    layout = config.allowed_layouts(config.workers.initial)[0]
    changes = []
    for notice in config.notices:
        target = layout if notice.layout is None else notice.layout.layout()
        changes.append((str(layout), str(target)))
        layout = target
    assert changes == [
        ("tp1 pp1 dp2", "tp2 pp1 dp2"),
        ("tp2 pp1 dp2", "tp1 pp2 dp2"),
        ("tp1 pp2 dp2", "tp1 pp2 dp2"),
        ("tp1 pp2 dp2", "tp2 pp1 dp1"),
        ("tp2 pp1 dp1", "tp2 pp1 dp2"),
    ]


def test_the_file_for_a_script_of_megatron_lm_is_complete(configs: Path) -> None:
    path = configs / "megatron-lm.yaml"
    assert len(path.read_text().splitlines()) <= 15
    config = load_users_run(path)
    config = config.model_copy(update={"cluster": ClusterSection(kind="local")})
    check_run(config, load_recipe(config))
    assert (config.train.steps, config.schedule.style) == (400, "cosine")
