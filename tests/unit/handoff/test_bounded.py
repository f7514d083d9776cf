"""In bounded memory a kind of the source's state goes before the next one of the target's comes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from liver_hpc.clock import SystemClock
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.handoff.crossing import Crossing, Part
from liver_hpc.transport.moved import Moved
from liver_hpc.world import hollow

TAKEN = frozenset({64})
STEPS = (
    "the boundary is saved",
    "free gradient",
    "allocate parameter",
    "move parameter",
    "free parameter",
    "allocate main",
    "move main",
    "free main",
    "allocate gradient",
    "forward and backward 7",
    "computed",
)


@pytest.mark.parametrize(
    ("was", "will_be", "left_out"),
    [
        (True, True, ()),
        (True, False, ("allocate", "forward", "computed")),
        (False, True, ("free",)),
    ],
    ids=["stays", "leaves", "joins"],
)
def test_no_kind_of_state_is_held_twice_but_the_one_that_moves(
    was: bool, will_be: bool, left_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    source: Any = SimpleNamespace() if was else None
    world: Any = None
    if will_be:
        forward = lambda step, gathered: done.append(f"forward and backward {step}")  # noqa: E731
        world = SimpleNamespace(taken=TAKEN, forward_backward=forward)

    def free(of: Any, kinds: Any, spared: Any) -> None:
        assert of is source
        assert spared == (TAKEN if will_be else frozenset())
        done.append(f"free {' '.join(kinds)}")

    def allocate(of: Any, kinds: Any) -> None:
        assert of is world
        done.append(f"allocate {' '.join(kinds)}")

    def move(_crossing: Crossing, kinds: tuple[str, ...]) -> Part:
        done.append(f"move {' '.join(kinds)}")
        return Part(kinds, Moved({}, {}, {}))

    def boundary(_crossing: Crossing, _limit_s: float) -> Any:
        done.append("the boundary is saved")
        return SimpleNamespace(step=7)

    monkeypatch.setattr(hollow, "free", free)
    monkeypatch.setattr(hollow, "allocate", allocate)
    monkeypatch.setattr(Crossing, "_move", move)
    monkeypatch.setattr(Crossing, "_boundary", boundary)
    monkeypatch.setattr(Crossing, "_computed", lambda *_of: done.append("computed"))
    freed: list[int] = []
    device = SimpleNamespace(return_free_memory=lambda: freed.append(len(done)))
    context = SimpleNamespace(clock=SystemClock(), device=device)
    session: Any = SimpleNamespace(context=context, bounded=True, limits=DeadlineSection())
    target: Any = SimpleNamespace(world=world, parts={("parameter",): None, ("main",): None})
    copying: Any = None
    Crossing(session, target, source, copying)._work(None, [])
    assert done == [step for step in STEPS if step.split()[0] not in left_out]
    # The device gets it back at once: its allocator would keep it.
    assert freed == [place for place, step in enumerate(done, 1) if step.startswith("free")]
