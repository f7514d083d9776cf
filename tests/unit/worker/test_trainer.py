"""The boundary of a handoff, on a worker whose world is none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.worker.trainer import Trainer
from tests.unit.config.runs import minimal


def trainer_at_a_boundary() -> tuple[Any, list[object]]:
    """And to what it goes back."""
    trainer: Any = object.__new__(Trainer)
    back: list[object] = []
    trainer.step = 5
    trainer._snapshots = SimpleNamespace(begin=lambda *_of, **_how: None)
    trainer._go_back = lambda *went: back.append(went)
    return trainer, back


def test_a_checkpoint_that_was_not_made_where_it_goes_on_from_is_begun_first() -> None:
    trainer, _ = trainer_at_a_boundary()
    saved: list[tuple[object, int]] = []
    trainer._owes_evaluation, trainer._owes_checkpoint = False, True
    trainer._world = world = SimpleNamespace()
    trainer._last, trainer._limits, trainer._check_halt = 5, minimal().limits, lambda: None
    trainer._saving = SimpleNamespace(
        begin=lambda *of: saved.append(of), finish=lambda _limit_s: None
    )
    trainer._context = SimpleNamespace(
        clock=FakeClock(), config=minimal(), send=lambda _message: None, worker=0
    )
    trainer.train()
    trainer.train()
    assert saved == [(world, 5)]


def gathers_in_vain() -> None:
    raise RuntimeError("the group was aborted")


@pytest.mark.parametrize("aborted", [SimpleNamespace(reason="a joiner is lost"), None])
def test_an_abort_that_breaks_the_gathering_of_parameters_leads_back(aborted: Any) -> None:
    """The source's groups that the target has, too, end with the attempt."""
    trainer, back = trainer_at_a_boundary()
    session = SimpleNamespace(prepared=object(), bounded=False, crosses=False, aborted=aborted)
    source = SimpleNamespace(settle=gathers_in_vain)
    if aborted is None:  # then it is another failure
        with pytest.raises(RuntimeError, match="the group was aborted"):
            trainer._hand_off(session, source, 0.0)
        assert back == []
        return
    trainer._hand_off(session, source, 0.0)
    assert session.crosses
    assert back == [(session, source, aborted)]
