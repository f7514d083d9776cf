"""The recipe of docs/how-to/own-model.md, taken from there, trained and reshaped."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.integration.runs import (
    ENDLESS,
    run_config,
    start,
    stop_and_read,
    wait_for_end,
    watch,
)

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PAGE = "own-model.md"


def recipe_of_page(name: str) -> str:
    """A how-to page's one Python block that defines a recipe."""
    text = (HOW_TO / name).read_text()
    blocks = re.findall(r"^```python[^\n]*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    recipes = [block for block in blocks if re.search(r"\((Recipe|GPT)\):", block)]
    assert len(recipes) == 1
    return str(recipes[0])


def test_it_has_fewer_than_40_lines() -> None:
    assert len([line for line in recipe_of_page(PAGE).splitlines() if line.strip()]) < 40


@pytest.mark.timeout(200)
def test_it_trains_and_is_reshaped_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mirror.py").write_text(recipe_of_page(PAGE))
    for stray in ("h5py", "queue"):  # beside the recipe, and yet not executed by anybody
        (tmp_path / f"{stray}.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    notices = [{"at_step": 5, "layout": {"dp": 2}}, {"at_step": 6, "layout": {"dp": 1}}]
    config = run_config(
        tmp_path,
        ENDLESS,
        initial=1,
        recipe="mirror:Mirror",
        layouts={1: {"dp": 1}, 2: {"dp": 2}},
        notices=notices,
        optimizer={"lr": 0.01, "min_lr": 0.01},
    ).model_copy(update={"model": {"width": 32}})
    try:
        run = start(config)
        watch(run, lambda status: status.handoffs_done == 2, 90.0)
        watch(run, lambda status: status.step >= 400, 30.0)
        records = stop_and_read(run)
    finally:
        sys.modules.pop("mirror", None)
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "executed").exists()
    assert [(r.outcome, r.digest_equal) for r in records.reconfigurations] == [
        ("completed", True),
        ("completed", True),
    ]
    assert records.steps[-1].loss < records.steps[0].loss / 2


FAILS = """
class Fails(Mirror):
    def batch(self, step):
        if step == 3:
            raise OSError("shard 7 is not there")
        return super().batch(step)
"""


def test_an_error_in_training_is_in_the_outcome_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fails.py"
    file.write_text(recipe_of_page(PAGE) + FAILS)
    monkeypatch.chdir(tmp_path)
    config = run_config(tmp_path, ENDLESS, initial=1, recipe="fails:Fails", layouts={1: {"dp": 1}})
    config = config.model_copy(update={"model": {"width": 32}})
    try:
        outcome = wait_for_end(start(config), 90.0)
    finally:
        sys.modules.pop("fails", None)
        sys.path.remove(str(tmp_path))
    assert outcome.state == "failed"
    line = file.read_text().splitlines().index('            raise OSError("shard 7 is not there")')
    told = f"OSError: shard 7 is not there ({file}, line {line + 1}); exit code 1; see logs/"
    assert told in outcome.reason
