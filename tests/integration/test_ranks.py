"""What a user's code reads of its rank, in a run whose shape changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.elastic import elastic_run
from tests.integration.noting_ranks import NOTES

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("unhurried_steps"),
]


def test_rank_and_world_size_are_those_of_the_world_that_takes_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv(NOTES, str(notes))
    notices = [{"at_step": 3, "layout": {"dp": 4}}, {"at_step": 6, "layout": {"dp": 2}}]
    run = elastic_run(tmp_path, notices, recipe="tests.integration.noting_ranks:NotingGPT")
    of_generation = {r.generation: len(r.target_workers.split(",")) for r in run.reconfigurations}
    sizes = {step.step: of_generation.get(step.generation, 2) for step in run.steps}
    assert {*sizes.values()} == {2, 4}
    found: dict[int, set[tuple[str, ...]]] = {}
    for path in notes.iterdir():
        for line in path.read_text().splitlines():
            step, *told = line.split()
            found.setdefault(int(step), set()).add(tuple(told))
    for step, size in [*sizes.items()][1:-1]:  # rehearsals use the samples of the first step
        wanted = {(str(rank), str(size), str(size)) for rank in range(size)}
        assert {(rank, world, local) for rank, world, _, local in found[step]} == wanted
        assert {place for _, _, place, _ in found[step]} == {str(place) for place in range(size)}
