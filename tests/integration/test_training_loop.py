"""The training loop of a real world of one worker, told things while a step runs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from liver_hpc.config.schema import EvalSection
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol.messages import (
    Abort,
    Begin,
    Evaluated,
    Finished,
    Resume,
    StepDone,
    Stop,
    WireRankMap,
)
from tests.integration.processes import WorkerProcess, closable, run_workers
from tests.integration.random_tokens import tiny_recipe

ARMED_IN, STOPPED_IN = 1, 3


class _Armed:
    """As much of a Session as the loop looks at."""

    aborted = None
    bounded = False
    generation = 1

    def __init__(self) -> None:
        self.armed = threading.Event()


def trainer_of(process: WorkerProcess, recipe: Any, sent: list[Any]) -> Any:
    """That of a run of this worker alone, in its first world."""
    import torch.distributed as dist

    from liver_hpc.worker.trainer import Trainer

    trainer = Trainer(process.context(recipe, closable(dist.HashStore), sent.append))
    rank_map = RankMap(Layout(1, 1, 1), (process.worker,))
    trainer.begin(Begin(rank_map=WireRankMap.of(rank_map), generation=0))
    return trainer


def told_while_steps_run(
    process: WorkerProcess, validation: Any = None, steps: int | None = None
) -> dict[str, Any]:
    sent: list[Any] = []
    recipe = tiny_recipe()
    train = recipe.config.train.model_copy(update={"steps": steps or recipe.config.train.steps})
    nothing = recipe.config.checkpoint.model_copy(update={"every_steps": None})
    sections = {"eval": validation, "train": train, "checkpoint": nothing}
    recipe.config = recipe.config.model_copy(update=sections)
    trainer = trainer_of(process, recipe, sent)
    session: Any = _Armed()
    handed_off_at: list[int] = []
    stood_s: list[float] = []
    loss = recipe.loss

    def loss_and_orders(*arguments: Any) -> Any:
        if trainer.step == ARMED_IN:
            session.armed.set()
        if trainer.step == STOPPED_IN:
            trainer.ask_to_stop(Stop())
        return loss(*arguments)

    def hand_off(_session: Any, _source: Any, ended_s: float) -> None:
        handed_off_at.append(trainer.step)
        stood_s.append(ended_s)
        trainer.session = None

    trainer.session = session
    with (
        mock.patch.object(recipe, "loss", loss_and_orders),
        mock.patch.object(trainer, "_hand_off", hand_off),
    ):
        trainer.train()
    return {
        "steps": [message.step for message in sent if isinstance(message, StepDone)],
        "bounds_s": [(m.started_s, m.ended_s) for m in sent if isinstance(m, StepDone)],
        "handed_off_at": handed_off_at,
        "stood_s": stood_s,
        "evaluations": [message for message in sent if isinstance(message, Evaluated)],
        "finished": [message.step for message in sent if isinstance(message, Finished)],
    }


def test_what_is_told_while_a_step_runs_counts_at_its_end(tmp_path: Path) -> None:
    (answer,) = run_workers(told_while_steps_run, 1, tmp_path)
    assert answer["handed_off_at"] == [ARMED_IN + 1]
    assert answer["steps"] == list(range(STOPPED_IN + 1))
    begun_s, ended_s = zip(*answer["bounds_s"], strict=True)
    assert begun_s[1:] == ended_s[:-1], "what is late between two steps is counted"
    assert answer["finished"] == [STOPPED_IN + 1]


def test_an_evaluation_comes_before_the_handoff_and_not_before_a_stop(tmp_path: Path) -> None:
    """One is due after steps 2, where the handoff is agreed on, and 4, where the run stops."""
    every = EvalSection(every_steps=2, steps=2)
    (answer,) = run_workers(told_while_steps_run, 1, tmp_path, every)
    assert answer["handed_off_at"] == [ARMED_IN + 1] == [2]
    assert answer["finished"] == [STOPPED_IN + 1] == [4]
    (done,) = answer["evaluations"]
    assert (done.step, done.batches) == (2, 2)
    assert 4.0 < done.loss < 6.0, "about the logarithm of 128 words"
    assert answer["stood_s"] == [done.ended_s], "from where the handoff's lost time counts"
    assert answer["bounds_s"][2][0] == done.ended_s, "it is in no step"


def test_it_comes_before_a_stop_where_the_run_is_done(tmp_path: Path) -> None:
    """There is no next start that would do it."""
    every = EvalSection(every_steps=2, steps=2)
    (answer,) = run_workers(told_while_steps_run, 1, tmp_path, every, STOPPED_IN + 1)
    assert [done.step for done in answer["evaluations"]] == [2, STOPPED_IN + 1]
    assert answer["finished"] == [STOPPED_IN + 1]


def stops_by_interval(process: WorkerProcess, begun: int) -> tuple[Any, Any]:
    """Where a start ends that goes on after `begun` steps, and how often it has saved."""
    recipe = tiny_recipe()
    train = recipe.config.train.model_copy(update={"stop_every_steps": 3})
    recipe.config = recipe.config.model_copy(update={"train": train})
    sent: list[Any] = []
    trainer = trainer_of(process, recipe, sent)
    trainer.step = begun
    trainer._stand(trainer._world)
    with mock.patch.object(trainer, "_save") as save:
        trainer.train()
    return [message.step for message in sent if isinstance(message, Finished)], save.call_count


@pytest.mark.parametrize(("begun", "ends"), [(0, 3), (2, 3), (3, 6)])
def test_a_start_ends_at_the_next_multiple(tmp_path: Path, begun: int, ends: int) -> None:
    (answer,) = run_workers(stops_by_interval, 1, tmp_path, begun)
    assert answer == ([ends], 1)


def went_back(process: WorkerProcess, step: int, adams: int, room: int | None) -> tuple[Any, ...]:
    """A world's scalar state, and that of the one that is built again in its place; digests of
    both; how much is left of what was held when its last kind of state has gone over."""
    from liver_hpc.world.device import Device

    trainer = trainer_of(process, tiny_recipe(), [])
    source = trainer._world
    kinds, state = source.recipe.spec.kinds, source.state
    digests = state.digests(kinds)
    storages = [each.untyped_storage() for kind in kinds[1:] for each in state.memory(kind)]
    storages += [tensor.untyped_storage() for tensor in source.tensors.values()]
    left = []

    def fill(world: Any, held: Any, frees: bool) -> None:
        left.append((held is state, all(storage.nbytes() for storage in storages)))
        plain(world, held, frees)
        left.append((frees, any(storage.nbytes() for storage in storages)))

    plain, trainer._fill = trainer._fill, fill
    trainer.step = step
    counted = {"optimizer_step": adams, "unscheduled_samples": 8}
    source.load_scalar_state(source.scalar_state(step).model_copy(update=counted))
    before = source.scalar_state(step)
    session = mock.Mock(source=source.rank_map, generation=1, shared_groups=True, members=(0,))
    session.limits = trainer._context.config.limits
    session.wait.return_value = Resume(generation=1, rebuild_generation=2)
    trainer.session = session
    session.prepared.drop.return_value = True
    with mock.patch.object(Device, "free_bytes", return_value=room):
        trainer._go_back(session, source, Abort(generation=1, reason="a test"))
    world = trainer._world
    return before, world.scalar_state(step), digests, world.state.digests(kinds), left


@pytest.mark.parametrize("room", [None, 0, 2**40])
def test_a_world_built_again_is_the_one_before(tmp_path: Path, room: int | None) -> None:
    """Adam and the schedule have counted less than the run where another job's checkpoint says
    so. What it is filled from is let go, before it is built where a device has no room for both."""
    ((before, after, held, now, left),) = run_workers(went_back, 1, tmp_path, 20, 7, room)
    assert (before.optimizer_step, before.unscheduled_samples) == (7, 8)
    assert after == before
    assert held == now
    assert left == [(room != 0, room != 0), (True, False)]
