"""Layers of Transformer Engine. By small stand-ins: they are built on a GPU alone, and known. By
its own Python code on a CPU (tests/engine): they are handed off live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.recipes.specs import derive_spec
from liver_hpc.report.store import RunRecords
from liver_hpc.world.megatron import computes_by_transformer_engine
from tests.integration.elastic import elastic_run, losses
from tests.integration.runs import finish, run_config, start, worst_difference

LAYOUTS = {
    2: [{"dp": 2}, {"tp": 2, "sequence_parallel": True}, {"pp": 2}],
    4: [{"tp": 2, "dp": 2}],
}
TP, PP = LAYOUTS[2][1:]
EP = {"dp": 2, "ep": 2}

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


def test_what_is_built_while_training_seeds_its_dropout_has_dropout_too(device: Any) -> None:
    """A layer asks once, as it is built, whether there are random streams for it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    from liver_hpc.world.megatron import prepare_process, seed_dropout

    prepare_process(1)
    tracker = get_cuda_rng_tracker()
    tracker.reset()  # as each seeding begins
    try:
        assert tracker.is_initialized()
    finally:
        seed_dropout(1, tp_rank=0)


# ---- its own code


def _moved_and_quiet(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shapes: list[dict[str, Any]],
    recipe: str | None = None,
    **model: Any,
) -> tuple[RunRecords, RunRecords]:
    """A run that goes through these shapes, and one of as many steps that keeps its own."""
    layouts = {2: [*LAYOUTS[2], EP]} if "experts" in model else LAYOUTS
    if recipe is not None:
        layouts = {2: LAYOUTS[2]}
    sections = {"model": {"implementation": "te", **model}, "layouts": layouts}
    sections |= {} if recipe is None else {"recipe": recipe}
    notices = [{"at_step": 2 + number, **shape} for number, shape in enumerate(shapes)]
    moved = elastic_run(tmp_path, notices, **sections)
    outcomes = [(each.outcome, each.digest_equal) for each in moved.reconfigurations]
    assert outcomes == [("completed", True)] * len(shapes)
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    return moved, finish(start(run_config(tmp_path, len(moved.steps), **sections)))


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("engine", "unhurried_steps")
def test_a_run_of_its_layers_trains_as_one_whose_shape_does_not_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = {"layout": LAYOUTS[4][0]}
    shapes = [{"layout": TP}, {"layout": PP}, {"replace": 1}, four, {"layout": {"dp": 2}}]
    moved, quiet = _moved_and_quiet(tmp_path, monkeypatch, shapes)
    assert worst_difference(losses(moved), losses(quiet)) <= 1e-4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("engine", "unhurried_steps")
def test_its_dropout_is_the_same_after_a_handoff(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [{"layout": PP}, {"layout": {"dp": 2}}]
    moved, quiet = _moved_and_quiet(tmp_path, monkeypatch, shapes, dropout=0.1)
    assert worst_difference(losses(moved), losses(quiet)) <= 1e-4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("engine", "unhurried_steps")
def test_its_experts_compute_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [{"layout": EP}, {"layout": TP}, {"layout": PP}]
    experts = {"number": 4, "topk": 2, "grouped": True}
    moved, quiet = _moved_and_quiet(tmp_path, monkeypatch, shapes, experts=experts)
    assert worst_difference(losses(moved), losses(quiet)) <= 1e-4


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("engine", "unhurried_steps")
def test_its_layers_are_handed_off_in_bf16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are split otherwise round otherwise; one in which they are not does not."""
    shapes = [{"replace": 0}, {"layout": TP}]
    moved, quiet = _moved_and_quiet(tmp_path, monkeypatch, shapes, dtype="bf16")
    before = moved.reconfigurations[1].step
    assert losses(moved)[:before] == losses(quiet)[:before]
    assert worst_difference(losses(moved), losses(quiet)) <= 0.05


LATENT = "tests.integration.latent:LatentGPT"


@pytest.mark.usefixtures("engine")
def test_what_latent_attention_projects_down_is_whole_on_each_tp_rank(tmp_path: Path) -> None:
    """Transformer Engine marks it as if it was split."""
    model = {"implementation": "te", "query_groups": 4}
    config = run_config(tmp_path, 5, recipe=LATENT, model=model, layouts={2: LAYOUTS[2]})
    spec = derive_spec(config)
    assert spec.refused == {}
    down = [tensor for tensor in spec.tensors if "down_proj.weight" in tensor.name]
    assert len(down) == 2 * 4
    assert {tensor.tp_dim for tensor in down} == {None}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("engine", "unhurried_steps")
def test_latent_attention_trains_the_same_however_tensors_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tp rank projects down alone, by layers that Transformer Engine marks as if they were
    split."""
    shapes = [{"layout": TP}, {"layout": PP}]
    elastic, quiet = _moved_and_quiet(tmp_path, monkeypatch, shapes, LATENT, query_groups=4)
    assert worst_difference(losses(elastic), losses(quiet)) < 1e-5
