"""`liver check-model`: a model's loss and gradient norm in each of a run's layouts.

What a module says of itself can be wrong: one that declares an even split of a tensor in which
several blocks lie one behind the other is another model at tp=2 than at tp=1. Only the numbers
show it, so a few steps are trained in the smallest layout of each kind that the run has, and
compared with those of one worker. In another dp a rank has another number of micro-batches, which
shows in a buffer that counts them, and in a gradient that is not in proportion to the loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from liver_hpc.cli.check import local_workers_limit
from liver_hpc.cli.client import stop
from liver_hpc.cli.submission import submit_run, with_prepared_data
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import AUTO, LayoutSection, RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.memory import worker_bytes
from liver_hpc.layout.ramp import decay_steps
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import load_recipe
from liver_hpc.recipes.specs import Answer, asked_of_model, derive_spec
from liver_hpc.report.store import read_run

STEPS = 3
WHOLE = Layout(1, 1, 1)
TWO_REPLICAS = Layout(1, 1, 2)
LIMITS = {4: 1e-4, 2: 2e-2}
"""How far apart values may be, relatively, by the bytes of a parameter: some ten times as much as
another order of summation makes."""
STEP_S = 60.0
"""The longest that a step may take; such a model is too large to be checked so."""
POLL_S = 0.1


def check_model(config: RunConfig, tell: Callable[[str], None]) -> bool:
    """Trains STEPS steps on this machine in the least of each of the run's layouts, in which each
    worker's model is the same, and on two replicas where the run may have several, and says how far
    each is from one worker's; whether all are near enough.

    Raises ConfigError for a run that cannot be run here, LiverError where one fails.
    """
    if config.layouts == AUTO:
        raise ConfigError("check-model compares the layouts that `layouts` lists, got auto")
    listed = config.layouts_listed
    several = {TWO_REPLICAS for one in listed if one.dp > one.least.dp}
    whole, *others = sorted({WHOLE, *several, *(one.least for one in listed)})
    spec = derive_spec(config)
    free_bytes = _free_bytes()
    problems = [_too_large(spec, layout, free_bytes) for layout in (whole, *others)]
    if any(problems):
        raise ConfigError(*filter(None, problems))
    limit = LIMITS[spec.parameter_bytes]
    wanted = _train(config, whole)
    tell(f"{whole}: loss {', '.join(f'{loss:.6g}' for loss in wanted[::2])}")
    equal = True
    for layout in others:
        apart = _apart(_train(config, layout), wanted)
        near = apart <= limit  # false for NaN
        verdict = "the same" if near else f"ANOTHER MODEL (at most {limit:g} apart is the same)"
        tell(f"{layout}: at most {apart:.2g} apart: {verdict}")
        equal &= near
    tell(f"what these runs have logged is in {_runs_of(config)}")
    return equal


def measured_times(config: RunConfig) -> str:
    """The run file's line with the times of the model's layers on this machine; takes some seconds.

    Raises ConfigError for a recipe that takes none, or whose model cannot be timed.
    """
    if "layer_times" not in load_recipe(config).Options.model_fields:
        raise ConfigError(f"recipe {config.recipe} has no option layer_times")
    asked = with_prepared_data(config)
    found = asked_of_model(
        asked, "liver_hpc.worker.times", "its layers cannot be timed", Answer[dict[str, Any]]
    )
    values = ", ".join(f"{name}: {value}" for name, value in found.items())
    return f"model:\n  layer_times: {{{values}}}"


def _free_bytes() -> int:
    """Memory of this machine that could be used."""
    return int(psutil.virtual_memory().available)


def _too_large(spec: ModelSpec, layout: Layout, free_bytes: int) -> str:
    """Why a layout cannot be checked on this machine, and what to do; empty where it can."""
    spec.check_layout(layout)
    most = local_workers_limit()
    if layout.workers > most:
        return (
            f"{layout} wants {layout.workers} workers, this machine may have {most}: check it on "
            "a larger one, or a like one of smaller axes, which --set layouts={2: {tp: 2}} gives"
        )
    needed = sum(sum(worker_bytes(spec, layout, at).values()) for at in layout.coordinates())
    if needed <= free_bytes:
        return ""
    return (
        f"{layout}: the model's state has {needed / 2**30:.1f} GiB, and {free_bytes / 2**30:.1f} "
        "GiB of this machine are free: check the model at small widths and with few layers, which "
        "--set model.KEY=... gives; how it is split does not depend on them"
    )


def _apart(found: Sequence[float], wanted: Sequence[float]) -> float:
    """The largest relative difference; NaN where a value is not finite."""
    if not all(map(math.isfinite, (*found, *wanted))):
        return math.nan  # which `max` would step over
    both = zip(found, wanted, strict=True)
    return max(abs(mine - theirs) / max(abs(theirs), 1e-30) for mine, theirs in both)


def _train(config: RunConfig, layout: Layout) -> list[float]:
    """Loss and gradient norm of each of the first steps in one layout, in turn."""
    run = submit_run(_alone(config, layout), "local")
    limit_s = config.deadlines.boot_s + STEPS * STEP_S
    try:
        deadline = Deadline.after(SystemClock(), limit_s, f"{STEPS} steps of {run} in {layout}")
        poll_until(lambda: run.outcome() is not None, deadline, POLL_S)
    finally:
        outcome = run.outcome() or stop(run)
    if outcome.state != "finished":
        raise LiverError(f"{layout}: {outcome}; {run.where_logs_are()}")
    steps = read_run(run.path).steps
    return [value for step in steps for value in (step.loss, step.grad_norm)]


def _alone(config: RunConfig, layout: Layout) -> RunConfig:
    """A short run that has this layout only, in a directory of its own beside other runs."""
    values = config.model_dump()
    workers = layout.workers
    values["runs_directory"] = _runs_of(config)
    values["schedule"]["decay_steps"] = decay_steps(config.schedule, config.train)
    values["train"]["steps"] = STEPS
    values["workers"] = {"initial": workers, "max": workers}
    values["layouts"] = {workers: [LayoutSection.of(layout).model_dump()]}
    values["notices"], values["eval"] = [], None
    values["checkpoint"] = {"every_steps": None}  # nobody goes on from these
    return RunConfig.model_validate(values)


def _runs_of(config: RunConfig) -> Path:
    return config.runs_directory / "check-model"
