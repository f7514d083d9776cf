"""Runs whose checkpoints are Megatron's: they go on from their own, and begin with others'."""

from __future__ import annotations

from pathlib import Path

import pytest

from liver_hpc.config.load import dump_run
from liver_hpc.config.megatron_checkpoint import TRACKER_FILE, tracked_step
from liver_hpc.coordinator.checkpoints import newest_checkpoint
from tests.integration.runs import finish, start, worst_difference
from tests.integration.test_checkpoint import STEPS, by_step, go_on, short_run

pytestmark = pytest.mark.timeout(400)

EVERY = 8


def test_a_run_goes_on_from_its_own_and_another_begins_with_it(tmp_path: Path) -> None:
    """Of the last run's job nothing is known but Megatron's files."""
    saved = tmp_path / "saved"
    section = {"format": "torch_dist", "directory": saved, "every_steps": EVERY, "keep": 3}
    first = start(short_run(tmp_path / "first", steps=EVERY, checkpoint=section))
    whole = finish(start(short_run(tmp_path / "whole")))
    finish(first)
    assert tracked_step(saved) == EVERY
    newest = newest_checkpoint(saved)
    assert newest is not None
    assert newest.path.name == f"iter_{EVERY:07d}"
    assert {part.file for part in newest.index.further} == {
        ".metadata",
        "common.pt",
        "metadata.json",
    }

    config = first.config()
    train = config.train.model_copy(update={"steps": STEPS})
    first.config_path.write_text(dump_run(config.model_copy(update={"train": train})))
    go_on(first, tp=2)
    records = finish(first)
    assert [record.step for record in records.steps] == list(range(STEPS))
    assert tracked_step(saved) == STEPS

    (newest.path / "checkpoint.json").unlink()
    (saved / TRACKER_FILE).write_text(str(EVERY))
    section = {"load": saved}
    other = start(short_run(tmp_path / "other", checkpoint=section))
    continued = finish(other)
    assert [record.step for record in continued.steps] == list(range(EVERY, STEPS))
    mine = [(record.loss, record.grad_norm) for record in continued.steps]
    assert mine == by_step(whole)[EVERY:]
    assert worst_difference(by_step(records), by_step(whole)) <= 1e-4
