"""A run's recipe with its spec, for the coordinator: checked against the run before anything boots.

Where this host cannot derive the spec, as its image has no torch, or as it has no GPU for layers
that are built on one, one task does so on a node of the run, in the environment that the workers
there will have.
"""

from __future__ import annotations

import logging
from pathlib import Path

from liver_hpc import __version__
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.launcher import Launcher
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.files import look_anew
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import (
    CANNOT_DERIVE,
    DERIVE_MODULE,
    Answer,
    derive_spec,
    load_run_recipe,
)
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.events import Seat

TASK = "derivation"
"""What the task is called in the place of an agent's name."""
DERIVED_FILE = "derived.json"
_LOOK_S = 0.05

log = logging.getLogger(__name__)


def task_words(run_directory: Path) -> list[str]:
    """What runs in the place of an agent, after the program."""
    directory = run_directory.absolute()
    files = [str(directory / "run.yaml"), str(directory / DERIVED_FILE)]
    return [DERIVE_MODULE, *files, "--version", __version__, "--own-gpus"]


def checked_recipe(
    config: RunConfig, run_directory: Path, task: Launcher, node: str = ""
) -> Recipe:
    """The run's recipe, whose model can be had in all layouts of the run.

    task: starts what `task_words` say on a node; it is closed. Raises ConfigError with everything
    that is wrong, LiverError where the spec can be derived neither here nor by the task.
    """

    def derive(config: RunConfig) -> ModelSpec:
        try:
            return derive_spec(config)
        except ConfigError:
            raise
        except LiverError as error:
            log.info("%s; a task on %s derives it", error, node or "this machine")
            return _derive_by(task, config, run_directory, node)

    try:
        recipe = load_run_recipe(config, run_directory, derive)
    finally:
        task.close()
    budget = Budget(config, recipe.spec, recipe.rehearsal_bytes)
    problems = [fault for one in config.layouts_listed if (fault := _fault(budget, recipe, one))]
    if not problems and (fault := budget.change_fault(config.layouts_listed)):
        problems.append(f"handoff {fault}")
    if problems:
        raise ConfigError(*problems)
    return recipe


def _derive_by(task: Launcher, config: RunConfig, run_directory: Path, node: str) -> ModelSpec:
    derived, limit_s = run_directory / DERIVED_FILE, config.deadlines.derive_s
    derived.unlink(missing_ok=True)
    where = f"on {node or 'this machine'}; see logs/*{TASK}.log"
    deadline = Deadline.after(
        SystemClock(),
        limit_s,
        f"the task that derives the model's spec {where} (deadlines.derive_s)",
    )
    task.launch(LaunchAgent(TASK, Seat(node, (0,)), Layout(1, 1, 1)))
    poll_until(lambda: not task.alive(TASK), deadline, _LOOK_S)
    look_anew(run_directory)  # it was asked for, and was not there, just before the task began
    failed = f"{CANNOT_DERIVE}: exit code {task.exit_code(TASK)} {where}"
    return Answer[ModelSpec].read(derived, config, failed)


def _fault(budget: Budget, recipe: Recipe, layout: Layout) -> str:
    """What submit has found already, unless it could not derive the spec."""
    try:
        recipe.check_layout(layout)
    except ConfigError as error:
        return f"layout {layout}: {error}"
    fault = budget.layout_fault(layout)
    return f"layout {layout}: {fault}" if fault else ""
