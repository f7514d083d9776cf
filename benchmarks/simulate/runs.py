"""The small runs that the model is fitted to: given ones, or made here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.models import MODEL_25M, text_data
from benchmarks.simulate.timings import Measured, measured_handoffs
from liver_hpc.cli.submission import submit_run
from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.config.load import parse_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.report.store import read_run

LIMIT_S = 400.0
POLL_S = 0.2
MODELS: tuple[Mapping[str, Any], ...] = (
    {"layers": 4, "hidden": 256, "ffn_hidden": 512, "heads": 4},
    MODEL_25M,
)
LAYOUTS = {2: [{"dp": 2}, {"tp": 2}], 4: [{"tp": 2, "dp": 2}, {"pp": 2, "dp": 2}, {"dp": 4}]}
CHANGES: tuple[dict[str, Any], ...] = (
    {"layout": {"tp": 2, "dp": 2}},
    {"layout": {"pp": 2, "dp": 2}},
    {"replace": 2},
    {"layout": {"tp": 2}},
    {"layout": {"dp": 2}},
)
BETWEEN_STEPS = 15


def handoffs_of(directories: Sequence[Path]) -> list[Measured]:
    """All completed handoffs of some runs, by their own metrics."""
    found = []
    for directory in directories:
        records = read_run(directory)
        config = parse_run(records.attributes["config"], str(directory))
        found += measured_handoffs(load_run_recipe(config, directory).spec, records)
    return found


def make_runs(directory: Path, models: Sequence[Mapping[str, Any]] = MODELS) -> list[Path]:
    """One run a model, with five scripted changes, one after the other. Takes minutes."""
    made = []
    for number, model in enumerate(models):
        run = submit_run(_config(directory / str(number), model), "local")
        deadline = Deadline.after(SystemClock(), LIMIT_S, f"the end of {run}")
        while (outcome := run.outcome()) is None:
            deadline.check()
            Event().wait(POLL_S)
        if outcome.state != "finished":
            raise LiverError(f"{run}: {outcome}")
        made.append(run.path)
    return made


def _config(directory: Path, model: Mapping[str, Any]) -> RunConfig:
    notices = [
        {"at_step": BETWEEN_STEPS * number, **change} for number, change in enumerate(CHANGES, 1)
    ]
    return RunConfig.model_validate(
        {
            "name": "simulate",
            "runs_directory": str(directory / "runs"),
            "model": dict(model),
            "data": text_data(directory),
            "train": {"steps": 20 * BETWEEN_STEPS, "global_batch": 4, "micro_batch": 1},
            "workers": {"initial": 2, "max": 4},
            "layouts": LAYOUTS,
            "cluster": {"kind": "local"},
            "checkpoint": {"every_steps": None},
            "notices": notices,
        }
    )
