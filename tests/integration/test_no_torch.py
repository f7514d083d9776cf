"""Where neither submit's host nor the coordinator's has torch, a node's task derives the spec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.recipes.specs import load_workers_recipe
from liver_hpc.report.store import read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.outcome import Outcome
from tests.integration.runs import run_config, tails

pytestmark = pytest.mark.timeout(200)

SLURM = {"components": [{"name": "main", "nodes": 1, "gpus_per_node": 4}]}
NO_TORCH = Path(__file__).parent / "no_torch"

SUBMIT = """
import sys
from pathlib import Path
from liver_hpc.cli.submission import checked_run, new_run
from liver_hpc.recipes.completion import load_users_run
print(new_run(*checked_run(load_users_run(Path(sys.argv[1])))).path)
"""

COORDINATE = """
import importlib.util, sys
from pathlib import Path
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.main import run_coordinator
try:
    import torch
except ModuleNotFoundError:
    run_coordinator(Path(sys.argv[1]), Control())
"""

NORMED = """
from pydantic import BaseModel

from liver_hpc.recipes.base import Recipe

class Normed(Recipe):
    class Options(BaseModel):
        pass

    def build(self, context):
        import torch
        from megatron.core.transformer import TransformerConfig
        from megatron.core.transformer.module import MegatronModule

        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        model = MegatronModule(config)
        model.norm = torch.nn.BatchNorm1d(8)
        return model

    def batch(self, step):
        return range(4)

    def loss(self, model, samples):
        raise NotImplementedError
"""


SCRIPT_WORDS = """
--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --transformer-impl local --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion
--micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr 1e-3
--mock-data --tokenizer-type NullTokenizer --vocab-size 62 --eval-iters 0
"""


def without_torch(script: str, argument: Path, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    repository = Path(__file__).parents[2]
    paths = [str(NO_TORCH), str(tmp_path), str(repository)]
    programs = tmp_path / "programs"
    programs.mkdir(exist_ok=True)
    (programs / "sbatch").touch(mode=0o755)
    environment = {**os.environ, "PYTHONPATH": ":".join(paths)}
    environment["PATH"] = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", script, str(argument)],
        env=environment, capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done


def submitted(tmp_path: Path, **sections: Any) -> tuple[RunDirectory, str]:
    """As `submitted_file`, of a GPT."""
    config = run_config(
        tmp_path, 6, initial=2, cluster={"kind": "slurm", "slurm": SLURM}, **sections
    )
    model = sections.get("model", config.model)
    return submitted_file(dump_run(config.model_copy(update={"model": model})), tmp_path)


def submitted_file(text: str, tmp_path: Path) -> tuple[RunDirectory, str]:
    """A run that was submitted where there is no torch, and what that said. Its one node is this
    machine; the run does without Slurm from here on."""
    path = tmp_path / "submitted.yaml"
    path.write_text(text)
    done = without_torch(SUBMIT, path, tmp_path)
    run = RunDirectory(Path(done.stdout.strip()))
    assert not (run.path / "spec.json").exists()
    values = run.config().model_dump()
    values["cluster"]["kind"] = "local"
    run.config_path.write_text(dump_run(RunConfig.model_validate(values)))
    return run, done.stderr


def outcome_of(run: RunDirectory, tmp_path: Path) -> Outcome:
    without_torch(COORDINATE, run.path, tmp_path)
    outcome = run.outcome()
    assert outcome is not None, tails(run)
    return outcome


def test_a_task_on_a_node_derives_the_spec_and_submit_says_what_it_left_out(
    tmp_path: Path,
) -> None:
    run, said = submitted(tmp_path)
    notes = [line for line in said.splitlines() if line.startswith("liver: note: ")]
    assert "cannot be derived: ModuleNotFoundError: No module named 'torch'" in notes[0]
    assert len(notes) == 5
    for note, what in zip(
        notes[1:], ("can be built", "options and state", "layouts", "memory"), strict=True
    ):
        assert "before a worker boots, on the run's nodes" in note
        assert what in note
    outcome = outcome_of(run, tmp_path)
    assert outcome.state == "finished", f"{outcome.reason}\n{tails(run)}"
    assert len(read_run(run.path).steps) == 6
    log = (run.path / "logs" / "coordinator.log").read_text()
    assert log.index("a task on this machine derives it") < log.index("launching 2 workers")
    assert (run.path / "logs" / "agent-derivation.log").exists()
    spec = load_workers_recipe(run.config(), run.path).spec
    assert {"pp1", "pp2"} <= spec.stages.keys()


def test_a_script_of_megatron_lm(tmp_path: Path, megatron_lm: Path) -> None:
    values = {
        "runs_directory": str(tmp_path / "runs"),
        "recipe": "liver_hpc.recipes.megatron_lm:Pretrain",
        "model": {"script": str(megatron_lm / "pretrain_gpt.py"), "args": SCRIPT_WORDS},
        "cluster": {"kind": "slurm", "slurm": SLURM},
        "workers": {"initial": 2, "max": 2},
        "layouts": {2: {"tp": 2}},
    }
    run, said = submitted_file(yaml.safe_dump(values), tmp_path)
    assert "cannot be derived: ModuleNotFoundError" in said
    outcome = outcome_of(run, tmp_path)
    assert outcome.state == "finished", f"{outcome.reason}\n{tails(run)}"
    assert len(read_run(run.path).steps) == 4


def test_a_model_that_no_handoff_could_move_is_refused_before_a_worker_boots(
    tmp_path: Path,
) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    run, _ = submitted(
        tmp_path, recipe="normed:Normed", model={}, recipe_directory=str(tmp_path),
        layouts={1: {"dp": 1}, 2: {"dp": 2}},
    )  # fmt: skip
    outcome = outcome_of(run, tmp_path)
    assert outcome.state == "failed"
    assert "norm (BatchNorm1d) keeps running statistics" in outcome.reason
    assert sorted(path.name for path in (run.path / "logs").glob("agent-*")) == [
        "agent-derivation.log"
    ]


def test_layouts_that_the_model_cannot_take_are_named_before_a_worker_boots(
    tmp_path: Path,
) -> None:
    run, _ = submitted(tmp_path, policy={"memory_bytes": 2_000_000})
    outcome = outcome_of(run, tmp_path)
    assert outcome.state == "failed"
    assert "layout tp1 pp1 dp1: its fullest worker holds" in outcome.reason
    assert not [*(run.path / "logs").glob("worker-*")]
