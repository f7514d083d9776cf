"""`liver submit --dry-run`: what a run would be and cost, without launching anything."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from liver_hpc.cluster.launcher import AGENT_MODULE
from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.cluster.slurm.commands import sbatch_words
from liver_hpc.cluster.slurm.container import step_words
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.launcher import srun_words
from liver_hpc.cluster.slurm.script import (
    BURST_SCRIPT,
    RUN_SCRIPT,
    batch_script,
    burst_options,
    burst_script,
)
from liver_hpc.config.load import dump_run
from liver_hpc.config.problems import key_text
from liver_hpc.config.schema import NoticeSection, RunConfig, TrainSection
from liver_hpc.layout.budget import Budget, Change
from liver_hpc.layout.candidates import workers_of_a_node
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import fullest_worker, handoff_bytes
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.ramp import stretches
from liver_hpc.layout.snapshots import largest_snapshot, most_held_bytes, most_wards
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.recipes.base import Recipe
from liver_hpc.report.wording import bytes_text
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.requests import noticed_layout

STAMP = "DATE-TIME"
TOKEN = "TOKEN"
JOB, NODE, AGENT = "JOB", "NODE", "AGENT"
"""In the place of what a launch makes up."""
_WIDEST = 80
"""Characters of a value in a table."""


def describe_run(config: RunConfig, recipe: Recipe) -> str:
    """The resolved run file, bytes a worker holds in each layout and during a handoff, bytes that
    each scripted handoff moves, and on Slurm what would be submitted; without bytes where the
    model's spec cannot be derived here. The run must have passed its checks."""
    parts = [dump_run(config).rstrip(), *_derived(recipe), *_ramp(config.train)]
    if recipe.knows_spec:
        facts = "".join(f"# {name}: {text}\n" for name, text in recipe.summary().items())
        parts += [
            f"{facts}# layouts: state of the fullest worker (no activations, no buffers)",
            _table(_layout_rows(config, recipe.spec)),
            *_most_memory(config, recipe),
        ]
    if config.notices and recipe.knows_spec:
        parts += [
            "# scripted handoffs: bytes held by the fullest worker, moved, and copied",
            _table(_handoff_rows(config, recipe)),
        ]
    if config.cluster.kind == "slurm":
        parts += _submissions(config)
    return "\n".join([*parts, "# nothing was launched"])


def _derived(recipe: Recipe) -> list[str]:
    """Which of these values follow from the recipe's options, and from which."""
    derived = recipe.derived(recipe.options)
    rows = [
        [key_text(path), _short(one.value), f"{key_text(one.at)}: {_short(one.source)}"]
        for path, one in derived.items()
    ]
    return ["# values that follow from the model section", _table(rows)] if rows else []


def _ramp(train: TrainSection) -> list[str]:
    """The batches of a ramp-up, and at which steps they change."""
    if train.rampup is None:
        return []
    rows = [
        list(map(str, stretch)) for stretch in stretches(train) if stretch.first_step < train.steps
    ]
    return [
        "# ramp-up: from which step on the global batch has how many samples",
        _table([["from step", "samples before", "global batch"], *rows]),
    ]


def _short(value: object) -> str:
    """A blend may be of hundreds of files."""
    text = str(value)
    return text if len(text) <= _WIDEST else f"{text[:_WIDEST]}..."


def _submissions(config: RunConfig) -> list[str]:
    """The batch scripts as they would be written, and the words of each sbatch, as comments."""
    run = config.runs_directory / f"{config.name}-{STAMP}"
    directory = RunDirectory(run)
    script = directory.jobs_path / RUN_SCRIPT
    parts = [
        *_file(script, batch_script(config.cluster, directory)),
        "# submitted by",
        _indented([shlex.join(sbatch_words([], script))]),
    ]
    slurm = config.cluster.slurm
    if slurm.container is not None or slurm.step_options:
        parts += [
            "# agents that start together are started by",
            _indented([_agent_line(config, run)]),
        ]
    alone = [part.name for part in slurm.components if part.nodes == 1]
    if alone and len(slurm.components) > 1:
        parts += [
            f"# one node only: {', '.join(alone)}; when any node is lost, Slurm cancels all of",
            "#   a job of which a component has one node; with two or more in each the run goes on",
        ]
    if (burst := slurm.burst) is not None:
        request = Request(burst.nodes_per_request, burst.time_min)
        options = burst_options(slurm, burst, request, f"{run.name}-burst-{TOKEN}", run)
        script = run / BURST_SCRIPT
        parts += [
            *_file(script, burst_script(config.cluster)),
            "# submitted by the coordinator, whenever it could use more workers, by",
            _indented([shlex.join(sbatch_words(options, script, [str(run)]))]),
        ]
    return parts


def _agent_line(config: RunConfig, run: Path) -> str:
    """How the step of an agent begins, on a node of the first component."""
    part, step = config.cluster.slurm.components[0], step_words(config, run)
    held = Allocation(part.name, JOB, (), 0, gpus_per_node=part.gpus_per_node)
    words = [*srun_words(held, AGENT, [NODE]), *step.options, *step.python, AGENT_MODULE]
    told = (f"{name}={shlex.quote(value)}" for name, value in step.environment.items())
    return " ".join([*told, shlex.join(words), "..."])


def _file(path: Path, text: str) -> list[str]:
    return [f"# {path}:", _indented(text.splitlines())]


def _indented(lines: Sequence[str]) -> str:
    return "\n".join(f"#   {line}".rstrip() for line in lines)


def _layout_rows(config: RunConfig, model: ModelSpec) -> list[list[str]]:
    rows = []
    for layout in config.layouts_listed:
        held = fullest_worker(model, layout)
        figures = [bytes_text(count) for count in (*held.values(), sum(held.values()))]
        rows.append([str(layout.workers), str(layout), *figures])
    return [["workers", "layout", *held, "together"], *rows]


def _most_memory(config: RunConfig, recipe: Recipe) -> list[str]:
    """What a handoff takes of a worker, in the change that takes most."""
    budget = Budget(config, recipe.spec, recipe.rehearsal_bytes)
    change = budget.fullest_change(config.layouts_listed)
    held = change.held
    rehearsal = f"{bytes_text(held.rehearsal)} for the rehearsal"
    if config.handoff.warm_up and recipe.rehearsal_bytes(change.target) is None:
        rehearsal = "activations of the rehearsal, which the recipe does not tell"
    spares = config.workers.standby
    beside = f"#   each of {spares} standbys takes one world and the rehearsal, of its own slot"
    return [
        f"# memory: a handoff takes up to {bytes_text(held.together)} of a worker ({change}): "
        f"{bytes_text(held.source)} and {bytes_text(held.target)}",
        f"#   of both worlds, {bytes_text(held.staging)} of staging and {rehearsal}; "
        "training's activations come on top",
        *([beside] if spares else ()),
        *_snapshots(config, recipe.spec),
        *_bounded_memory(budget, change, config.layouts_listed),
    ]


def _snapshots(config: RunConfig, model: ModelSpec) -> list[str]:
    """What copies for the day that a worker is lost take of host memory."""
    if config.snapshots.every_steps is None:
        return []
    shares = {layout: largest_snapshot(model, layout) for layout in config.layouts_listed}
    largest = max((size for layout, size in shares.items() if layout.workers > 1), default=0)
    nodes = _nodes(config)
    wards = {
        layout: most_wards(first_rank_map(layout, range(layout.workers), nodes))
        for layout in shares
    }
    held = {layout: (1 + wards[layout]) * share for layout, share in shares.items()}
    most = max(wards.values())
    whose = "its ward's" if most < 2 else f"those of up to {most} wards"
    return [
        f"# snapshots: a share is up to {bytes_text(largest)}; a worker holds up to "
        f"{bytes_text(most_held_bytes(held))} of host memory:",
        f"#   its own and {whose}, of two boundaries, right after a handoff of three",
    ]


def _bounded_memory(budget: Budget, change: Change, layouts: Sequence[Layout]) -> list[str]:
    """Why some handoffs are made in bounded memory, and what that takes."""
    why = budget.bounded_because(change.source, change.target)
    if not why:
        return []
    peak, *_ = budget.fullest_bounded_change(layouts)
    return [
        f"# bounded memory, at most {bytes_text(peak)} of a worker, where {why}:",
        "#   training stands while a checkpoint of the boundary is written, which is the way back",
    ]


def _handoff_rows(config: RunConfig, recipe: Recipe) -> list[list[str]]:
    columns = ["after step", "notice", "source", "target", "memory", "fullest worker"]
    columns += ["moved", "stays"]
    model, slots = recipe.spec, workers_of_a_node(config)
    budget = Budget(config, model, recipe.rehearsal_bytes)
    rows = [columns if slots is None else [*columns, "between nodes"]]
    first = config.allowed_layouts(config.workers.initial)[0]
    rank_map, born = first_rank_map(first, range(first.workers), _nodes(config)), first.workers
    for notice in sorted(config.notices, key=lambda notice: notice.at_step):
        target, born = _next_rank_map(config, model, rank_map, notice, born)
        sizes = [bytes_text(count) for count in handoff_bytes(model, rank_map, target)]
        sizes = sizes if slots is not None else sizes[:2]
        mode, held = "both", budget.fullest_worker_of(rank_map, target).together
        if budget.bounded_because(rank_map.layout, target.layout):
            mode, held = "bounded", budget.bounded_bytes(rank_map.layout, target.layout)
        which = [str(notice.at_step), _notice_text(notice), str(rank_map), str(target)]
        rows.append([*which, mode, bytes_text(held), *sizes])
        rank_map = target
    return rows


def _next_rank_map(
    config: RunConfig, model: ModelSpec, rank_map: RankMap, notice: NoticeSection, born: int
) -> tuple[RankMap, int]:
    """Who sits where after a notice, and how many workers there have been by then."""
    available = list(rank_map.workers)
    if notice.replace is not None:
        layout, joiners = rank_map.layout, 1
        if notice.replace in available:
            available.remove(notice.replace)
    else:
        layout = noticed_layout(config, notice)
        joiners = max(0, layout.workers - len(available))
    available += range(born, born + joiners)
    return place(model, rank_map, layout, available, _nodes(config)), born + joiners


def _nodes(config: RunConfig) -> dict[int, int]:
    """The node of each worker that the notices may lead to, if all nodes are as small as the
    smallest and are filled one after the other."""
    slots, most = workers_of_a_node(config), config.workers.max * (2 + len(config.notices))
    return {worker: 0 if slots is None else worker // slots for worker in range(most)}


def _notice_text(notice: NoticeSection) -> str:
    if notice.replace is not None:
        return f"replace worker {notice.replace}"
    return "layout" if notice.workers is None else f"{notice.workers} workers"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, the first row their names; YAML comments, so that the output is YAML."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return _indented(["  ".join(map(str.ljust, row, widths)) for row in rows])
