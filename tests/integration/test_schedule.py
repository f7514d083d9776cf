"""The learning rate by the run file, as megatron's scheduler computes it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.config.schema import OptimizerSection, ScheduleSection, TrainSection
from tests.unit.config.runs import minimal


def rates(device: Any, **schedule: Any) -> list[float]:
    """Of the first steps of a run of ten whose largest rate is 1."""
    from liver_hpc.world.optimizer import build_scheduler

    del device  # megatron can be imported once it is open
    config = minimal().model_copy(
        update={
            "train": TrainSection(steps=10, global_batch=8),
            "optimizer": OptimizerSection(lr=1.0, min_lr=0.0),
            "schedule": ScheduleSection(**schedule),
        }
    )
    optimizer, seen = SimpleNamespace(param_groups=[{}]), []
    scheduler = build_scheduler(SimpleNamespace(config=config), optimizer)  # type: ignore[arg-type]
    for _ in range(11):
        seen.append(optimizer.param_groups[0]["lr"])
        scheduler.step(1)
    return seen


def test_a_warm_up_that_does_not_begin_at_0(device: Any) -> None:
    seen = rates(device, style="constant", warmup_steps=4, warmup_init=0.2)
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, *7 * [1.0]])


@pytest.mark.parametrize(
    ("style", "tail"),
    [
        ("linear", [0.75, 0.5, 0.25, 0.0]),
        ("exponential", [2 * 0.5 ** (n / 4) - 1 for n in (1, 2, 3, 4)]),
        ("minus_sqrt", [1 - (n / 4) ** 0.5 for n in (1, 2, 3, 4)]),
    ],
)
def test_warm_up_stable_decay(device: Any, style: str, tail: list[float]) -> None:
    seen = rates(device, style="WSD", warmup_steps=2, wsd_decay_steps=4, wsd_decay_style=style)
    assert seen == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, 1.0, *tail])
