"""What a crossing does after the vote, in which order, and when in it the source's last boundary is
copied."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.errors import TransferError
from liver_hpc.handoff.crossing import Crossing
from liver_hpc.handoff.session import HandoffAborted
from liver_hpc.protocol.messages import Abort

SCALARS = SimpleNamespace(step=7)


class Told:
    """A world and what copies it, both of which note what is asked of them."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def taken(self) -> None:
        self.asked.append("taken")

    def keep_pace(self, step: int) -> None:
        self.asked.append(f"keep pace {step}")

    def update(self, step: int) -> None:
        self.asked.append(f"update {step}")

    def agree(self, *_arguments: Any) -> None:
        self.asked.append("agree")


@pytest.mark.parametrize("stays", [True, False])
def test_the_state_changes_after_the_verdict_and_once_the_boundary_is_copied(
    stays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a leaver the state goes with the end of the crossing."""
    told = Told()
    context = SimpleNamespace(
        worker=0,
        send=lambda _message: None,
        clock=SystemClock(),
    )
    session: Any = SimpleNamespace(context=context, generation=1, limits=None, check=lambda: None)
    target: Any = SimpleNamespace(world=told if stays else None)

    def cross(_crossing: Crossing, _scalars: Any, gradients: list[Any]) -> Any:
        gradients.append(None)
        return SimpleNamespace(ok=True, started_s=1.0)

    def verdict(_crossing: Crossing) -> Any:
        told.asked.append("verdict")
        return SimpleNamespace(scalars=SCALARS)

    monkeypatch.setattr(Crossing, "_cross", cross)
    monkeypatch.setattr(Crossing, "_verdict", verdict)
    Crossing(session, target, None, told).run(None)
    first_step = ["update 7", "keep pace 8", "agree"] if stays else []
    assert told.asked == ["verdict", "taken", *first_step]


def test_peers_are_freed_once_the_coordinator_has_been_told_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else they may be heard first, with nothing to say but that a connection was closed."""
    done: list[str] = []
    context = SimpleNamespace(
        worker=0,
        recipe=SimpleNamespace(spec=SimpleNamespace(digest="")),
        send=lambda message: done.append(message.reason),
        clock=SystemClock(),
    )
    session: Any = SimpleNamespace(context=context, generation=1, limits=None, check=lambda: None)
    transport = SimpleNamespace(close=lambda: done.append("closed"))
    target: Any = SimpleNamespace(world=None, transport=transport)
    told = Told()

    def work(*_of: Any) -> Any:
        raise TransferError("a digest differs")

    def verdict(_crossing: Crossing) -> Any:
        raise HandoffAborted(Abort(generation=1, reason=done[0]))

    monkeypatch.setattr(Crossing, "_work", work)
    monkeypatch.setattr(Crossing, "_verdict", verdict)
    with pytest.raises(HandoffAborted):
        Crossing(session, target, None, told).run(None)
    place = f"{__file__}, line {work.__code__.co_firstlineno + 1}"  # as in a recipe or a script
    assert done == [f"TransferError: a digest differs ({place})", "closed"]
    assert told.asked == []
