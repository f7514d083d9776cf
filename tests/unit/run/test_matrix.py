"""Every fault in every phase of a run, played over the core: the run goes on, in the old world, the
new one or one that was filled again, or ends and says why."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from liver_hpc.run.lifecycle import RunState
from tests.unit.run.choices import Choices
from tests.unit.run.endings import comes_to_rest
from tests.unit.run.faults import FAULTS, HALTING, PHASES, REFILLING, WORKERS, reach, turn, victims
from tests.unit.run.play import Play
from tests.unit.run.scenes import SCENES

EXAMPLES = 12
MANY_EXAMPLES = 400
"""Other ones each time."""
STRUCK = [scene for scene in SCENES if scene.name not in ("short and scripted", "nowhere to go")]
RECOVERS = [scene for scene in SCENES if scene.config.snapshots.every_steps is not None]

each_phase = pytest.mark.parametrize("phase", PHASES)
each_fault = pytest.mark.parametrize("fault", FAULTS)


def struck_in(phase: str, fault: str, data: bytes) -> bool:
    """Plays a run that is struck once; False where it does not come to that phase."""
    choices = Choices(data)
    scene = choices.one_of(RECOVERS if phase in (HALTING, REFILLING) else STRUCK)
    play = Play(scene, choices)
    play.begin()
    play.settle()
    for _ in range(choices.below(8)):
        turn(play)
    if play.run.state is not RunState.TRAINING or not reach(play, phase, choices.below(6)):
        return False
    found = victims(play, choices.one_of(WORKERS)) or victims(play, "staying")
    if not found:
        return False
    FAULTS[fault](play, choices.one_of(found))
    comes_to_rest(play)
    return True


def play_many(phase: str, fault: str, examples: int) -> None:
    struck = 0

    @settings(
        derandomize=examples == EXAMPLES,
        database=None,
        deadline=None,
        max_examples=examples,
        phases=(Phase.generate, Phase.shrink),
    )
    @given(st.binary(min_size=48, max_size=96))
    def whatever_comes(data: bytes) -> None:
        nonlocal struck
        struck += struck_in(phase, fault, data)

    whatever_comes()
    assert struck >= examples / 8


@each_phase
@each_fault
def test_a_fault_in_a_phase(phase: str, fault: str) -> None:
    play_many(phase, fault, EXAMPLES)


@pytest.mark.long
@pytest.mark.timeout(600)
@each_phase
@each_fault
def test_a_fault_in_a_phase_over_many_schedules(phase: str, fault: str) -> None:
    play_many(phase, fault, MANY_EXAMPLES)
