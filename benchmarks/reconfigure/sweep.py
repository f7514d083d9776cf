"""What a sweep measures: its file, and the cells that it is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from benchmarks.baseline.methods import Method
from benchmarks.harness import order_of, software_digest
from liver_hpc.config.schema import (
    LayoutSection,
    NonNegativeInt,
    PositiveInt,
    RunConfig,
    Seconds,
    Section,
)
from liver_hpc.errors import ConfigError

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

    parallel: tasks at a time; on nodes of one kind as many as there are nodes.
    """

    partition: str | None = None
    cpus_per_task: PositiveInt = 2
    gpus_per_node: NonNegativeInt = 0
    timeout_min: PositiveInt = 30
    parallel: PositiveInt = 1
    setup: list[str] = Field(default_factory=list)


class Sweep(Section):
    """The file of `--config`; sizes in the units that names end in.

    models: name -> the run's `model` section. run: every other section of the run, the same for
    all methods. methods: "live" and names of benchmarks.baseline. settle_steps: undisturbed steps
    of every world, of which medians are taken. page_cache: what a restart's load finds.
    """

    name: str = "reconfigure"
    directory: Path = Path("runs/bench")
    repeats: PositiveInt = 5
    methods: list[Literal["live"] | Method] = Field(min_length=1)
    models: dict[str, dict[str, Any]] = Field(min_length=1)
    start: LayoutSection
    transitions: list[Transition] = Field(min_length=1)
    settle_steps: Annotated[int, Field(ge=3, strict=True)] = 6
    page_cache: Literal["warm", "dropped"] = "warm"
    event_s: Seconds = 300.0
    run: dict[str, Any]
    slurm: ArraySection = ArraySection()

    @model_validator(mode="after")
    def _consistent(self) -> Sweep:
        layout = self.start
        for transition in self.transitions:
            if transition.replace and transition.to != layout:
                raise ValueError(f"transition {transition.name!r} replaces a worker: `to` stays")
            layout = transition.to
        return self

    def run_config(self, size: str) -> RunConfig:
        """The run of one model size, whose workers begin in `start`. Raises ConfigError."""
        sections = [self.start, *(transition.to for transition in self.transitions)]
        table: dict[int, list[dict[str, int]]] = {}
        for section in sections:
            entries = table.setdefault(section.layout().workers, [])
            if section.model_dump() not in entries:
                entries.append(section.model_dump())
        values = {
            "name": f"{self.name}-{size}",
            "runs_directory": str(self.directory),
            "workers": {"initial": self.start.layout().workers, "max": max(table)},
            "layouts": table,
            "model": self.models[size],
            **self.run,
        }
        try:
            return RunConfig.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"run of {size}: {where}: {first['msg']}") from error

    def fingerprint(self) -> str:
        """Of all that a measured cell depends on, the code too; not of how many there are, nor of
        where."""
        parts = self.model_dump_json(
            include={"models", "start", "transitions", "settle_steps", "page_cache", "run"}
        )
        return hashlib.blake2b((software_digest() + parts).encode(), digest_size=8).hexdigest()


class Cell(Section):
    """All transitions of one model size with one method, one after the other, once."""

    size: str
    method: str
    round: NonNegativeInt

    @property
    def name(self) -> str:
        return f"{self.size}-{self.method.replace(' ', '_')}-{self.round}"


def cells(sweep: Sweep) -> Iterator[Cell]:
    """Interleaved: all sizes and methods once, then once more the other way round."""
    count = dict.fromkeys(
        (f"{size}/{method}" for size in sweep.models for method in sweep.methods), 0
    )
    for name in order_of(list(count), sweep.repeats):
        size, _, method = name.partition("/")
        yield Cell(size=size, method=method, round=count[name])
        count[name] += 1


def load_sweep(path: Path, quick: bool = False) -> Sweep:
    """Reads a sweep file; `quick` makes it as small as it can be. Raises ConfigError."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        sweep = Sweep.model_validate(values)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{path}: {where}: {first['msg']}") from error
    return _quick(sweep) if quick else sweep


def _quick(sweep: Sweep) -> Sweep:
    """One tiny model, one repeat, two transitions."""
    tiny = {"layers": 4, "hidden": 64, "ffn_hidden": 96, "heads": 4, "query_groups": 2}
    size, model = next(iter(sweep.models.items()))
    return sweep.model_copy(
        update={
            "name": f"{sweep.name}-quick",
            "repeats": 1,
            "settle_steps": 3,
            "models": {size: {**model, **tiny}},
            "transitions": sweep.transitions[:2],
        }
    )
