"""A journal played again: to the same decisions, or said to be otherwise; and what it leaves for
the next start."""

from __future__ import annotations

import random
from typing import Any

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.run.codec import memory_of
from liver_hpc.run.entries import Entry
from liver_hpc.run.events import Memory
from tests.unit.run.choices import Choices
from tests.unit.run.endings import replays, schedule
from tests.unit.run.play import Play
from tests.unit.run.replay import differences
from tests.unit.run.scenes import FASTEST, SCENES, observed
from tests.unit.run.storm import storm


def entry(number: int, event: dict[str, Any], *actions: dict[str, Any]) -> Entry:
    return Entry(number, 1_000.0 + number, event, [*actions])


def remember(ceiling: int, *drained: str) -> dict[str, Any]:
    return {"type": "remember", "ceiling": ceiling, "drained": [*drained]}


def row(generation: int) -> dict[str, Any]:
    return {"type": "record", "table": "reconfigurations", "row": {"generation": generation}}


TICK = {"type": "tick"}
STARTED = {"type": "coordinator_started", "attributes": {}, "checkpoints": ""}


# ---- the same again


@pytest.fixture
def played() -> Play:
    """A run that trains, told of in a journal."""
    play = Play(SCENES[0], Choices(b""))
    play.begin()
    play.settle()
    for _ in range(3):
        play.train()
        play.settle()
    return play


def test_a_journal_leads_to_the_same_decisions(played: Play) -> None:
    assert not [*differences(played.journal(), played.scene.new_run)]


@pytest.mark.parametrize("seed", range(8))
def test_so_does_one_of_several_starts(seed: int) -> None:
    found = schedule(random.Random(seed).randbytes(300))
    assert not [*differences(found.journal(), found.scene.new_run)]


@pytest.mark.parametrize("observe", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_so_does_one_whose_best_layout_is_another_one_from_step_to_step(
    seed: int, observe: bool
) -> None:
    scene = observed(FASTEST) if observe else FASTEST
    play = Play(scene, Choices(random.Random(seed).randbytes(600)))
    play.begin()
    play.settle()
    storm(play)
    replays(play)


def test_what_was_decided_otherwise_is_told_with_its_entry(played: Play) -> None:
    journal = played.journal()
    at = next(n for n, each in enumerate(journal) if each.event["type"] == "agent_met")
    wanted = journal[at].actions[0]
    agent, wanted["workers"] = wanted["agent"], [7]
    (found,) = differences(journal, played.scene.new_run)
    assert found.number == at
    assert found.wanted == [{"type": "admit", "agent": agent, "workers": [7]}]
    assert found.got == [{"type": "admit", "agent": agent, "workers": [0]}]


def test_a_core_of_another_run_file_decides_otherwise(played: Play) -> None:
    assert [*differences(played.journal(), SCENES[3].new_run)]


def test_an_event_that_nobody_knows_is_refused(played: Play) -> None:
    journal = [*played.journal(), entry(99, {"type": "of_next_year"})]
    with pytest.raises(ConfigError, match="of_next_year"):
        [*differences(journal, played.scene.new_run)]


# ---- what the next start is to know


def test_an_empty_journal_leaves_nothing() -> None:
    assert memory_of([]) == Memory()


def test_what_was_remembered_last_counts() -> None:
    journal = [
        entry(0, STARTED),
        entry(1, TICK, remember(4, "n1")),
        entry(2, TICK, remember(2, "n1", "n2")),
        entry(3, STARTED),
    ]
    assert memory_of(journal) == Memory(-1, 2, ("n1", "n2"))


def test_the_newest_checkpoint_is_known() -> None:
    written = {"type": "checkpoint_written", "step": 8}
    assert memory_of([entry(0, STARTED), entry(1, written), entry(2, STARTED)]).wrote == 8


def test_agents_of_all_starts_are_counted() -> None:
    launch = {"type": "launch", "agents": [{"agent": "a0"}, {"agent": "a1"}]}
    start = {"type": "start_agent", "agent": "a2", "node": "n1"}
    journal = [entry(0, STARTED, launch), entry(1, TICK, start), entry(2, STARTED, launch)]
    assert memory_of(journal).agents == 5


@pytest.mark.parametrize(
    "last",
    [
        entry(1, {"type": "step_done", "generation": 7}),
        entry(1, {"type": "transports", "generation": 7}),
        entry(1, {"type": "said_together", "messages": [{"type": "refilled", "generation": 7}]}),
        entry(1, TICK, row(7)),
    ],
    ids=["a step", "a world that stood", "worlds that stood", "an attempt"],
)
def test_no_number_of_a_world_or_an_attempt_is_used_again(last: Entry) -> None:
    journal = [entry(0, STARTED, row(3)), last, entry(2, STARTED)]
    assert memory_of(journal).last_generation == 7


@pytest.mark.parametrize("seed", range(8))
def test_a_journal_remembers_what_the_core_does(seed: int) -> None:
    play = schedule(bytes([seed]) + random.Random(seed).randbytes(200))
    found, known = memory_of(play.journal()), play.run.memory
    if any(each["type"] == "remember" for e in play.journal() for each in e.actions):
        assert found.ceiling == known.ceiling
        assert found.drained == known.drained
    assert found.last_generation <= known.last_generation
