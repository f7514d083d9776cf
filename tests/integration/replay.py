"""The journal of a real run, played again to cores of its own.

    python -m tests.integration.replay RUN_DIRECTORY ...

says how many entries it has, and every decision that a core would take otherwise today.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from liver_hpc.config.load import parse_run
from liver_hpc.recipes.specs import load_run_recipe
from liver_hpc.run.codec import memory_of
from liver_hpc.run.entries import JOURNAL_FILE, read_entries
from liver_hpc.run.events import CoordinatorStarted
from liver_hpc.run.machine import Run
from tests.unit.run.replay import Difference, differences


def core_of(run_directory: Path, started: CoordinatorStarted) -> Run:
    """What a coordinator makes of the same run file, with the same model."""
    config = parse_run(started.attributes["config"])
    recipe = load_run_recipe(config, run_directory)
    return Run(config, recipe.spec, recipe.check_layout, rehearsal_bytes=recipe.rehearsal_bytes)


def played_again(run_directory: Path) -> list[Difference]:
    core = partial(core_of, run_directory)
    return [*differences(read_entries(run_directory / JOURNAL_FILE), core)]


def check_replay(run_directory: Path) -> None:
    """Raises AssertionError with the first decision that is taken otherwise."""
    different = played_again(run_directory)
    assert not different, f"{run_directory}: {different[0]}"


def main(directories: list[str]) -> int:
    failed = 0
    for directory in map(Path, directories):
        entries = [*read_entries(directory / JOURNAL_FILE)]
        starts = sum(entry.event["type"] == "coordinator_started" for entry in entries)
        different = played_again(directory)
        print(
            f"{directory}: {len(entries)} entries of {starts} starts, {len(different)} decided "
            f"otherwise; remembers {memory_of(entries)}"
        )
        for each in different:
            print(f"  entry {each.number}: wanted {each.wanted}, got {each.got}")
        failed += len(different)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
