"""What the calling thread does: which world's groups megatron means, which micro-batch it computes,
and whether it rehearses a world beside a training thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass(frozen=True)
class MicroBatch:
    """What a thread computes at the moment.

    first_sample: its number in the run. weight: of its loss, as Megatron's mean over micro-batches
    is not the wanted one where some ranks have more of them than others. padding: it is computed
    for others' sake, and counts nowhere. aux_scale: of the auxiliary losses' gradients. told: what
    these losses were here, by name, and which part of a loss that is.
    """

    samples: Any
    first_sample: int
    weight: float
    padding: bool
    aux_scale: float
    told: list[tuple[str, torch.Tensor, float]] = field(default_factory=list, compare=False)


class Thread(threading.local):
    """What this thread does: it may rehearse a world, whose model or loss may have seeded the
    streams, and whose forward has entered these layers, by number; megatron may mean the groups of
    one; it may read samples; and it may act alone, with torch.distributed not initialized."""

    rehearsing = False
    seeded = False
    reading = False
    alone = False
    groups: Any = None
    micro_batch: MicroBatch | None = None
    entered: dict[Any, int] | None = None


here = Thread()


class Pool(ThreadPoolExecutor):
    """Its threads do what the thread does that makes it."""

    def __init__(self, max_workers: int | None = None) -> None:
        does = dict(vars(here))
        super().__init__(max_workers, initializer=lambda: vars(here).update(does))


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Marks this thread as one that works beside a training thread: of the random streams of this
    process, which training draws from, it touches none."""
    before, here.rehearsing, here.seeded = here.rehearsing, True, False
    try:
        with torch.autograd.set_multithreading_enabled(False):  # backward on this thread too
            yield
    finally:
        here.rehearsing = before


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Marks this thread as one that reads samples; a seed that it sets is for what it reads."""
    before, here.seeded, here.reading = here.seeded, False, True
    try:
        yield
    finally:
        here.seeded, here.reading = before, False


def recall_in_backward(output: torch.Tensor) -> None:
    """Makes the thread that computes the gradients of a forward's output know what the forward
    was of, for activations that are computed again: in a pipeline other micro-batches have gone
    forward since, and a GPU's gradients are computed on a thread of their own."""
    groups, micro_batch = here.groups, here.micro_batch

    def recall(_gradient: torch.Tensor) -> None:
        here.groups, here.micro_batch = groups, micro_batch

    if output.requires_grad:
        output.register_hook(recall)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def groups_in_use(groups: ProcessGroupCollection) -> Iterator[None]:
    """Names the collection that code without a group argument means, on this thread."""
    before, here.groups = here.groups, groups
    try:
        yield
    finally:
        here.groups = before
