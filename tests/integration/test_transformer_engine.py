"""Layers of Transformer Engine, by small stand-ins: they are built on a GPU alone, and known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.recipes.specs import derive_spec
from liver_hpc.world.megatron import computes_by_transformer_engine
from tests.integration.runs import run_config

RECIPE = "tests.integration.engine_built:EngineGPT"


def test_on_a_login_node_a_spec_is_left_to_a_task_on_a_node(tmp_path: Path) -> None:
    config = run_config(tmp_path, 5, recipe=RECIPE, cluster={"kind": "slurm"})
    with pytest.raises(LiverError, match="on a GPU: AssertionError: TransformerEngine") as raised:
        derive_spec(config)
    assert not isinstance(raised.value, ConfigError), "that would be the model's fault"


def test_on_this_machine_the_model_is_built_on_its_gpu(tmp_path: Path) -> None:
    assert derive_spec(run_config(tmp_path, 5, recipe=RECIPE)).tensors


def test_its_layers_are_known_by_what_they_are_made_of() -> None:
    engines = type("Linear", (torch.nn.Linear,), {"__module__": "transformer_engine.pytorch"})
    wrapped = type("TELinear", (engines,), {})
    plain, model = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2), wrapped(2, 2))
    assert computes_by_transformer_engine([plain, model])
    assert not computes_by_transformer_engine([plain])
