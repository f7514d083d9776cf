"""When a run's spec is derived anew, and what a derivation's file says."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks.gpt_spec import gpt_spec
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes import specs
from liver_hpc.recipes.gpt_config import GPTConfig
from liver_hpc.recipes.specs import CANNOT_DERIVE, Answer, derive_spec, load_run_recipe
from tests.unit.config.runs import minimal

TRAIN = {"steps": 10, "global_batch": 8}


def derivations(tmp_path: Path, *configs: RunConfig) -> int:
    derived: list[RunConfig] = []

    def derive(config: RunConfig) -> ModelSpec:
        derived.append(config)
        return gpt_spec(GPTConfig.model_validate(config.model))

    for config in configs:
        load_run_recipe(config, tmp_path, derive)
    return len(derived)


def test_a_spec_is_kept_and_not_derived_again(tmp_path: Path) -> None:
    assert derivations(tmp_path, minimal(), minimal(name="other"), minimal()) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"model": {"layers": 8}},
        {"layouts": {2: {"dp": 2}}},
        {"train": TRAIN | {"overlap_grad_reduce": True}},
        {"train": TRAIN | {"grad_reduce_in_bf16": True}},
        {"optimizer": {"decoupled_lr": 1e-4}},
    ],
)
def test_it_is_where_what_it_depends_on_has_changed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    assert derivations(tmp_path, minimal(), minimal(**changed)) == 2


def test_it_is_where_the_checkpoint_to_begin_with_is_another_one(tmp_path: Path) -> None:
    """Of a tracker file that names none, who loads it tells: a run may go on from its own."""
    config = minimal(checkpoint={"load": tmp_path})
    assert derivations(tmp_path, config) == 1
    (tmp_path / TRACKER_FILE).write_text("50")
    assert derivations(tmp_path, config, config) == 1
    (tmp_path / TRACKER_FILE).write_text("")
    assert derivations(tmp_path, config, config) == 1


def test_a_host_without_torch_keeps_one_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> NoReturn:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert derivations(tmp_path, minimal(), minimal()) == 1


def test_a_spec_that_contradicts_itself_is_not_taken(tmp_path: Path) -> None:
    def derive(config: RunConfig) -> ModelSpec:
        spec = gpt_spec(GPTConfig.model_validate(config.model))
        return ModelSpec(spec.tensors[:-1], spec.stages, spec.parameter_bytes)

    with pytest.raises(ConfigError, match="the spec of the model contradicts itself: pp1: stage 0"):
        load_run_recipe(minimal(), tmp_path, derive)


def test_a_derivation_that_left_nothing_says_how_it_failed(tmp_path: Path) -> None:
    path, answer = tmp_path / "derived.json", Answer[ModelSpec]
    with pytest.raises(LiverError, match="cannot be derived: exit code 9"):
        answer.read(path, minimal(), f"{CANNOT_DERIVE}: exit code 9")
    path.write_text(answer(refused="PlanError: body._extra_state is not moved").model_dump_json())
    with pytest.raises(ConfigError, match=r"PlanError: body\._extra_state is not moved"):
        answer.read(path, minimal(), "")


WANTS = "model.script wants the module sentencepiece, which this Python lacks"


def in_image(**changed: Any) -> RunConfig:
    container = {"runtime": "charliecloud", "image": "/images/liver"}
    slurm = {"components": [{"name": "main", "nodes": 1}], "container": container}
    return minimal(cluster={"kind": "slurm", "slurm": slurm}, **changed)


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host's environment has torch, but not all that the model wants."""

    def refuses(*asked: object) -> NoReturn:
        raise ConfigError(WANTS)

    monkeypatch.setattr(specs, "asked_of_model", refuses)


def test_a_model_that_is_built_in_an_image_is_not_judged_here(lacking: None) -> None:
    """A LiverError leaves it to the run's nodes."""
    with pytest.raises(LiverError, match=r"libraries are those of cluster\.slurm\.con") as raised:
        derive_spec(in_image())
    assert not isinstance(raised.value, ConfigError)
    with pytest.raises(ConfigError) as refused:
        derive_spec(minimal())
    assert refused.value.args == (WANTS,)


def test_who_has_layouts_found_for_an_image_is_told_by_whose_libraries(lacking: None) -> None:
    with pytest.raises(ConfigError, match="is found by this host's libraries") as refused:
        derive_spec(in_image(layouts="auto", policy={"memory_bytes": 2**34}))
    assert refused.value.args[0] == WANTS
