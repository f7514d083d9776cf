"""What a sweep measures: its file, and the cells that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from benchmarks.baseline.methods import Method
from benchmarks.harness import order_of, software_digest
from benchmarks.models import layout_table
from liver_hpc.cli.check import check_run
from liver_hpc.config.load import parse_values, read_text
from liver_hpc.config.problems import key_text, validated
from liver_hpc.config.schema import (
    LayoutSection,
    NonNegativeInt,
    PositiveInt,
    RunConfig,
    Seconds,
    Section,
)
from liver_hpc.errors import ConfigError, problems_of
from liver_hpc.recipes.base import load_recipe

LIVE = "live"


class Transition(Section):
    """One change of the running job. `to` is the layout afterwards; with `replace` it stays what
    it is and one worker gives its seat to a fresh one. What is not `claimed` only leads on to the
    next: it is measured live, because it has to be done, and never restarted."""

    name: str
    to: LayoutSection
    replace: bool = False
    claimed: bool = True


class ArraySection(Section):
    """How cells become a Slurm job array: one task a cell, on a node of its own.

    node: the one that all cells are measured on; null: any, so that a handoff and its restart may
    be on different ones, as the result then says. parallel: tasks at a time, on nodes of one kind;
    with several, restarts share the storage of `directory`, which no handoff uses, and cells do not
    take turns.
    """

    partition: str | None = None
    node: str | None = None
    cpus_per_task: PositiveInt = 2
    gpus_per_node: NonNegativeInt = 0
    timeout_min: PositiveInt = 30
    parallel: PositiveInt = 1
    setup: list[str] = Field(default_factory=list)


class Variant(Section):
    """The same sweep with something else; the first of several is what the others are compared
    with.

    run: what is other in the run's file. methods: those that it is measured with; null: all.
    storage_bytes_per_s: what a restart's storage carries in all; null: as fast as it is. link: what
    each node's link carries, in each direction, as tc has it ("100mbit"); empty: as it is.
    """

    name: str
    run: dict[str, Any] = Field(default_factory=dict)
    methods: list[Literal["live"] | Method] | None = None
    storage_bytes_per_s: Annotated[float, Field(gt=0)] | None = None
    link: str = ""


ALONE = Variant(name="")
"""Of a sweep without variants."""


class Sweep(Section):
    """The file of `--config`; sizes in the units that names end in.

    models: name -> the run's `model` section. run: every other section of the run, the same for
    all methods. methods: "live" and names of benchmarks.baseline. settle_steps: undisturbed steps
    of every world, of which medians are taken. cores: "apart" gives each worker a core of its own,
    so that joiners boot on one that does not train. testbed: the test cluster on whose nodes the
    workers are, one on each.
    """

    name: str = "reconfigure"
    directory: Path = Path("runs/bench")
    repeats: PositiveInt = 5
    methods: list[Literal["live"] | Method] = Field(min_length=1)
    models: dict[str, dict[str, Any]] = Field(min_length=1)
    start: LayoutSection
    transitions: list[Transition] = Field(min_length=1)
    settle_steps: Annotated[int, Field(ge=3, strict=True)] = 6
    event_s: Seconds = 300.0
    cores: Literal["shared", "apart"] = "shared"
    testbed: str | None = None
    run: dict[str, Any]
    variants: list[Variant] = Field(default_factory=list)
    slurm: ArraySection = ArraySection()

    @model_validator(mode="after")
    def _consistent(self) -> Sweep:
        layout = self.start
        for transition in self.transitions:
            if transition.replace and transition.to != layout:
                raise ValueError(f"transition {transition.name!r} replaces a worker: `to` stays")
            layout = transition.to
        names = [variant.name for variant in self.variants]
        if len({*names, ""}) <= len(names):
            raise ValueError(f"variants are known by their names, and each has one: {names}")
        if self.testbed is None and any(variant.link for variant in self.variants):
            raise ValueError("a link is that of a node of a test cluster: wanted `testbed`")
        for variant in self.variants or [ALONE]:
            cluster = self.run_config(next(iter(self.models)), variant.name).cluster
            if self.testbed is None and (cluster.kind == "slurm" or cluster.parts):
                raise ValueError(
                    "run.cluster: a sweep measures within one node, as a restart knows no other; "
                    "`--cluster slurm` gives each cell one"
                )
        if 0 < self.slurm.gpus_per_node < (most := self.most_at_once):
            raise ValueError(
                f"slurm.gpus_per_node: {most} workers are there at once, with that of `replace`: "
                f"wanted {most} or more, got {self.slurm.gpus_per_node}"
            )
        return self

    @property
    def most_at_once(self) -> int:
        """Workers of the largest world, or of a world and those that join it."""
        most, before = 0, self.start.layout().workers
        for transition in self.transitions:
            after = transition.to.layout().workers
            most = max(most, before, after + transition.replace)
            before = after
        return most

    def variant(self, name: str) -> Variant:
        return next((each for each in self.variants if each.name == name), ALONE)

    def run_config(self, size: str, variant: str = "") -> RunConfig:
        """The run of one model size, whose workers begin in `start`. Raises ConfigError."""
        sections = [self.start, *(transition.to for transition in self.transitions)]
        table = layout_table(section.layout() for section in sections)
        values: dict[str, Any] = {
            "name": f"{self.name}-{size}",
            "runs_directory": str(self.directory),
            "workers": {"initial": self.start.layout().workers, "max": max(table)},
            "layouts": table,
            "model": self.models[size],
        }
        for other in (self.run, self.variant(variant).run):
            values = overlaid(values, other)
        return validated(RunConfig, values, lambda path: f"run of {size}: {key_text(path)}")

    def fingerprint(self) -> str:
        """Of all that a measured cell depends on, the code and a task's `slurm` section too; not of
        how many there are, nor of where."""
        parts = self.model_dump_json(
            include={
                *("models", "start", "transitions", "settle_steps"),
                *("run", "cores", "testbed", "variants"),
            }
        ) + self.slurm.model_dump_json(exclude={"parallel", "timeout_min"})
        return hashlib.sha256((software_digest() + parts).encode()).hexdigest()[:16]


def overlaid(values: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with those of `others` in their places, section by section."""
    both = {**values, **others}
    for name in values.keys() & others.keys():
        if isinstance(values[name], Mapping) and isinstance(others[name], Mapping):
            both[name] = overlaid(values[name], others[name])
    return both


class Cell(Section):
    """All transitions of one model size with one method, one after the other, once."""

    size: str
    method: str
    round: NonNegativeInt
    variant: str = ""

    @property
    def name(self) -> str:
        words = [self.size, self.method, *([self.variant] if self.variant else [])]
        return "-".join((*words, str(self.round))).replace(" ", "_").replace("/", "_")


def cells(sweep: Sweep) -> Iterator[Cell]:
    """Interleaved: all sizes, variants and methods once, then once more the other way round."""
    kinds = [
        (size, method, variant.name)
        for size in sweep.models
        for variant in sweep.variants or [ALONE]
        for method in sweep.methods
        if variant.methods is None or method in variant.methods
    ]
    count = dict.fromkeys(map(str, range(len(kinds))), 0)
    for number in order_of(list(count), sweep.repeats):
        size, method, variant = kinds[int(number)]
        yield Cell(size=size, method=method, variant=variant, round=count[number])
        count[number] += 1


def load_sweep(path: Path, quick: bool = False, cores: str | None = None) -> Sweep:
    """Reads a sweep file, in the YAML of run files; `quick` makes it as small as it can be, `cores`
    goes before its own. Raises ConfigError, also where a run of it would be refused."""
    values = parse_values(read_text(path), str(path))
    with problems_of(path):
        sweep = validated(Sweep, values if cores is None else {**values, "cores": cores}, key_text)
        sweep = _quick(sweep) if quick else sweep
        if problems := dict.fromkeys(_problems(sweep)):
            raise ConfigError(*problems)
    return sweep


def _problems(sweep: Sweep) -> Iterator[str]:
    """Of all runs, as far as that is seen without their models: cells before them take hours."""
    for size in sweep.models:
        for variant in sweep.variants or [ALONE]:
            config = sweep.run_config(size, variant.name)
            try:
                check_run(config, load_recipe(config))
            except ConfigError as error:
                yield from (f"run of {size}: {each}" for each in error.args)


def _quick(sweep: Sweep) -> Sweep:
    """One tiny model, one repeat, two transitions, two variants."""
    tiny = {"layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4, "query_groups": 2}
    size, model = next(iter(sweep.models.items()))
    return sweep.model_copy(
        update={
            "name": f"{sweep.name}-quick",
            "repeats": 1,
            "settle_steps": 3,
            "models": {size: {**model, **tiny}},
            "transitions": sweep.transitions[:2],
            "variants": [*sweep.variants[:1], *sweep.variants[-1:]][: len(sweep.variants)],
        }
    )
