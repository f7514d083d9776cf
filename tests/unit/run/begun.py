"""Plays of the run's core that have come so far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from liver_hpc.protocol import messages as m
from liver_hpc.run import actions as a
from liver_hpc.run import events as e
from liver_hpc.run.lifecycle import RunState
from liver_hpc.run.records import RecoveryRecord
from tests.unit.run.choices import Choices
from tests.unit.run.play import Play
from tests.unit.run.scenes import SCENES

TWO_NODES, MACHINE = SCENES[0], SCENES[1]


def training(scene: object = TWO_NODES) -> Play:
    """Two workers that train; whatever is on its way has arrived."""
    play = Play(scene, Choices(b""))  # type: ignore[arg-type]
    play.begin()
    play.settle()
    assert play.run.state is RunState.TRAINING
    return play


def of(kind: type[a.Action], actions: list[a.Action]) -> list[a.Action]:
    return [action for action in actions if isinstance(action, kind)]


def that_recovers(name: str = "snapshots", **policy: float) -> Play:
    """Two workers that have trained, and hold snapshots."""
    scene = next(scene for scene in SCENES if scene.name == name)
    policies = scene.config.policy.model_copy(update=policy)
    each_step = scene.config.snapshots.model_copy(update={"every_steps": 1})
    config = scene.config.model_copy(update={"policy": policies, "snapshots": each_step})
    play = training(replace(scene, config=config))
    for _ in range(3):
        play.train()
        play.settle()
    return play


def goes_on_until(play: Play, reached: Callable[[], bool]) -> None:
    for _ in range(300):
        if not reached() and not play.go_on(draw=False):
            play.train()
    assert reached()


def lose(play: Play, worker: int) -> list[a.Action]:
    play.workers[worker].dead = True
    return play.feed(e.WorkerGone(worker, "signal 9"))


def recoveries(play: Play) -> list[RecoveryRecord]:
    rows = [each.row for _, _, done in play.entries for each in of(a.Record, done)]  # type: ignore[attr-defined]
    return [row for row in rows if isinstance(row, RecoveryRecord)]


def that_has_replaced() -> Play:
    """Worker 1 has left for worker 2; worker 0 stays."""
    play = that_recovers()
    assert play.ask(m.ReplaceRequest(replace=1)).ok
    while play.run.world is None or play.run.world.rank_map.workers != (0, 2):
        play.train()
        play.settle()
    return play


def told_to_exit(play: Play) -> set[int]:
    sends = (each for _, _, done in play.entries for each in of(a.Send, done))  # type: ignore[attr-defined]
    return {w for send in sends if isinstance(send.message, m.Exit) for w in send.workers}  # type: ignore[attr-defined]
