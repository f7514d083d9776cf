"""The boundary of a handoff, on a worker whose world is none."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.clock import FakeClock, SystemClock
from liver_hpc.handoff.crossing import Crossed
from liver_hpc.protocol.messages import ScalarState
from liver_hpc.worker.trainer import Trainer
from tests.unit.config.runs import minimal

SCALARS = ScalarState(step=5, consumed_samples=40, optimizer_step=5, loss_scale=1.0, seed=1)


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


@pytest.mark.parametrize("bounded", [False, True])
def test_lost_time_begins_with_the_end_of_the_last_step_whatever_comes_before_the_boundary(
    bounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters that are gathered, or in bounded memory the checkpoint."""
    trainer, _ = trainer_at_a_boundary()
    clock = FakeClock(12.5)
    trainer._context = SimpleNamespace(clock=clock, checkpoints=Path(), worker=0)
    trainer._tell_ranks = trainer._save = lambda _: clock.advance(80.0)
    told: list[Any] = []
    crossed = Crossed(SCALARS, None, 100.0, 101.0)
    crossing = SimpleNamespace(run=lambda boundary: told.append(boundary) or crossed)
    monkeypatch.setattr("liver_hpc.worker.trainer.Crossing", lambda *_: crossing)
    monkeypatch.setattr(trainer, "_arrive", lambda *_: None, raising=False)
    session: Any = SimpleNamespace(prepared=object(), bounded=bounded, generation=4, target=None)
    source: Any = SimpleNamespace(
        settle=lambda: clock.advance(80.0), scalar_state=lambda _step: SCALARS
    )
    trainer._hand_off(session, source, 12.5)
    assert clock.now_s() > 90.0
    assert [boundary.last_step_ended_s for boundary in told] == [12.5]


@pytest.mark.parametrize("comes", ["before", "after it", "never"])
def test_an_abort_that_breaks_the_gathering_of_parameters_leads_back(comes: str) -> None:
    """It may have reached a peer first, that was through it: the source's groups that the target
    has, too, end there."""
    trainer, back = trainer_at_a_boundary()
    trainer._context = SimpleNamespace(clock=SystemClock())
    trainer._limits = SimpleNamespace(control_s=0.2 if comes == "never" else 20.0)
    abort = SimpleNamespace(reason="a joiner is lost")
    session: Any = SimpleNamespace(
        prepared=object(), bounded=False, crosses=False, shared_groups=True, halted=None
    )
    session.aborted = abort if comes == "before" else None
    later = threading.Timer(0.1, lambda: setattr(session, "aborted", abort))

    def gathers_in_vain() -> None:
        assert not session.crosses  # else the Abort would have ended what others still gather in
        if comes == "after it":
            later.start()
        raise RuntimeError("the group was aborted")

    source = SimpleNamespace(settle=gathers_in_vain)
    if comes == "never":  # then it is another failure
        with pytest.raises(RuntimeError, match="the group was aborted"):
            trainer._hand_off(session, source, 0.0)
        assert back == []
        return
    trainer._hand_off(session, source, 0.0)
    assert back == [(session, source, abort)]
