"""Pure: what starts Python in the step of an agent, on the node itself or in an image.

In the image run agents, all below them, and the task that derives a spec. None of them asks Slurm
anything, while there is a coordinator: that does, and it runs on the host, as what keeps a burst
allocation does.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from liver_hpc.cluster.slurm.script import option_words, python_words
from liver_hpc.config.schema import ContainerSection, RunConfig

_MOUNTS = "--container-mounts="


class StepWords(NamedTuple):
    """options: srun's, behind those that every step has. python: what starts Python, to which a
    module is added. environment: what srun is told there, as others see command lines, which Slurm
    keeps, too."""

    options: tuple[str, ...]
    python: tuple[str, ...]
    environment: Mapping[str, str]


def step_words(config: RunConfig, run_directory: Path) -> StepWords:
    """Those of the steps of a run's agents. `run_directory` has the run's secret in it."""
    slurm = config.cluster.slurm
    given = dict(slurm.step_options)
    told: dict[str, str] = {}
    if isinstance(given.get("export"), str):
        told["SRUN_EXPORT_ENV"] = str(given.pop("export"))
    options = tuple(option_words(given))
    container = slurm.container
    if container is None:
        return StepWords(options, (*python_words(config.cluster), "-m"), told)
    mounts = _mounts(container, config, run_directory)
    python = (*shlex.split(container.python), "-P", "-m")
    image, further = container.image, container.options
    match container.runtime:
        case "pyxis":
            # Of an option that is given twice Slurm tells its nodes the last.
            mounts += [one.removeprefix(_MOUNTS) for one in further if one.startswith(_MOUNTS)]
            others = [one for one in further if not one.startswith(_MOUNTS)]
            mounted = f"{_MOUNTS}{','.join(mounts)}"
            options = (*options, f"--container-image={image}", mounted, *others)
            return StepWords(options, python, told)
        case "apptainer":
            binds = [f"--bind={mount}" for mount in mounts]
            gpus = () if "--rocm" in further else ("--nv",)  # together, before 1.3: --nv alone
            python = ("apptainer", "exec", *gpus, *binds, *further, image, *python)
            return StepWords(options, python, told)
        case "charliecloud":
            binds = [f"--bind={mount}" for mount in mounts]
            return StepWords(options, ("ch-run", *binds, *further, image, "--", *python), told)


def _mounts(container: ContainerSection, config: RunConfig, run_directory: Path) -> list[str]:
    """Those of the run file, and what the run needs at the same path, where they lack it: a
    directory before what is mounted below it, which it would hide."""
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    there = [Path(mount.partition(":")[2]) for mount in mounts]
    for path in needed_in_image(config, run_directory):
        if not any(path.is_relative_to(each) for each in there):
            mounts.append(f"{path}:{path}")
            there.append(path)
    return sorted(mounts, key=lambda mount: len(Path(mount.partition(":")[2]).parts))


def needed_in_image(config: RunConfig, run_directory: Path) -> Iterator[Path]:
    """The directories that a run file's keys name, but for those that are a recipe's own."""
    yield run_directory.absolute()
    of_checkpoints = config.checkpoint
    directories = [of_checkpoints.directory, of_checkpoints.load, of_checkpoints.weights]
    directories.append(config.own_recipe_directory)
    if (data := config.data) is not None:
        prefixes = [data.prefix, *(source.prefix for source in data.blend or ())]
        directories += [prefix.parent for prefix in prefixes if prefix is not None]
        if data.text is not None:  # of which a pair is made there
            directories.append(data.directory)
    for directory in directories:
        if directory is not None:
            yield directory.expanduser().absolute()
