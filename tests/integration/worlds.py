"""Real worlds over gloo, in any layout, of the tiny GPT or of a recipe that a test gives."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from liver_hpc.layout.coordinates import Layout, RankMap
from tests.integration.processes import WorkerProcess
from tests.integration.random_tokens import RandomTokenGPT, tiny_config

SEED = 3
"""Of first weights."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A layout, and what is trained in it: options of the model, of the sections `train` and
    `optimizer`, and what makes the recipe of its options and the run's configuration."""

    layout: str
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    train: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    recipe: Callable[[Any, Any], Any] = RandomTokenGPT
    steps: int = 3
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def recipe_of(case: Case, worker: int, *further: str) -> Any:
    """A case's recipe with the spec derived for its layout and further ones; this process is
    `worker`."""
    from pathlib import Path

    from liver_hpc.world.groups import install_sentinel
    from tests.integration.toys import derived

    config = tiny_config(**case.model)
    config = config.model_copy(
        update={
            "train": type(config.train)(**{**config.train.model_dump(), **case.train}),
            "optimizer": type(config.optimizer)(**case.optimizer),
        }
    )
    recipe = case.recipe(case.recipe.Options.model_validate(config.model), config)
    recipe.spec = derived(recipe, case.layout, *further)
    recipe.check_layout(Layout.parse(case.layout))
    recipe.open(Path())
    install_sentinel(worker)
    return recipe


@contextmanager
def connected(
    process: WorkerProcess, recipe: Any, layout: str, generation: int
) -> Iterator[Any | None]:
    """The world of the first workers in a layout; None on others."""
    from liver_hpc.world.world import World

    sizes = Layout.parse(layout)
    rank_map = RankMap(sizes, tuple(range(sizes.workers)))
    if process.worker not in rank_map.workers:
        yield None
        return
    world = World(recipe, rank_map, process.worker, generation, process.device)
    try:
        world.warm_up()
        world.book.connect(process.network, process.store, 30.0)
        world.state.initialize(recipe.initial, SEED)
        begin_at(world, 0)
        yield world
    finally:
        world.close()


def begin_at(world: Any, step: int) -> None:
    """Tells a world how many steps its state has been trained; a rehearsal counts one too."""
    scalars = world.scalar_state(step)
    world.load_scalar_state(scalars.model_copy(update={"optimizer_step": step}))


def move(
    process: WorkerProcess,
    recipe: Any,
    worlds: tuple[Any | None, Any | None],
    rank_maps: tuple[RankMap, RankMap],
    name: str,
) -> None:
    """All tensors of the first world to the second; either may be None here. Collective over the
    workers of both. name: of the group, used once a run."""
    from liver_hpc.clock import Deadline, SystemClock
    from liver_hpc.layout.plan import transfer_plan
    from liver_hpc.transport.stream import Transport
    from liver_hpc.transport.wire import group_wire

    members = tuple(sorted({worker for known in rank_maps for worker in known.workers}))
    if process.worker not in members:
        return
    group = process.transfer_group(name, members)
    ranks = {member: rank for rank, member in enumerate(members)}
    wire = group_wire(group.backend, ranks, process.device.torch_device)
    transport = Transport(wire, recipe.spec, recipe.config.handoff)
    old, new = (None if world is None else world.state for world in worlds)
    transport.stream(
        transport.prepare(transfer_plan(recipe.spec, *rank_maps, process.worker)),
        old,
        new,
        lambda _bytes: None,
        Deadline.after(SystemClock(), 60.0, "the state"),
    )
    # A peer may not have seen yet that its messages crossed, nor has NCCL maybe sent the last ones.
    process.store.add(f"{name}/moved", 1)
    while process.store.add(f"{name}/moved", 0) < len(members):
        time.sleep(0.005)
    transport.close()


def train(world: Any, steps: Iterable[int]) -> list[tuple[float, ...]]:
    """Loss, gradient norm, and metrics by their names, of steps."""
    from liver_hpc.world.steps import Flags

    results = [
        world.agree(world.forward_backward(step), world.update(step), Flags()) for step in steps
    ]
    return [
        (result.loss, result.grad_norm, *(result.metrics[name] for name in sorted(result.metrics)))
        for result in results
    ]


def train_cases(process: WorkerProcess, cases: Sequence[Case]) -> list[Any]:
    """Loss and gradient norm of each case's steps, one case after the other; empty where this
    worker has no seat."""
    found = []
    for generation, case in enumerate(cases):
        recipe = recipe_of(case, process.worker)
        with connected(process, recipe, case.layout, generation) as world:
            found.append([] if world is None else train(world, range(case.steps)))
    return found


def apart(one: Sequence[tuple[float, ...]], other: Sequence[tuple[float, ...]]) -> float:
    """The largest relative difference of two courses of loss, gradient norm and metrics, which have
    as many steps and values. All of them must be finite: `max` would step over NaN."""
    assert len(one) == len(other) > 0
    assert all(math.isfinite(value) for step in (*one, *other) for value in step), (one, other)
    both = [pair for a, b in zip(one, other, strict=True) for pair in zip(a, b, strict=True)]
    return max(abs(mine - theirs) / abs(theirs) for mine, theirs in both)
