"""What a worker of a run may hold: one world while it trains, two while it is handed over.

A worker that stays has the source world and the target world at once, from PREPARE to RELEASE, and
staging beside them; in PREPARE it rehearses a step of the target too. Memory that the target takes
over (`handoff.take_over`) counts twice: it does so once the rehearsal is over. Which seat a worker
has in either layout is up to placement, to who is there, and to what the run has been through. So a
pair of layouts is judged by a worker that has the fullest seat of both. Where a worker is replaced,
the others hold the same layout twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.layout.memory import fullest_bytes, stage_bytes
from liver_hpc.layout.tensors import ModelSpec

RehearsalBytes = Callable[[Layout], int | None]
"""`Recipe.rehearsal_bytes`; None stands for what is not known, and counts nothing."""


class HandoffMemory(NamedTuple):
    """Bytes that one worker holds during a handoff.

    source, target: parameters, fp32 gradients and optimizer state of its seat in either world, 0
    without one. staging: the transfer's buffers. rehearsal: activations of the target's rehearsal,
    beside those of training, which are not counted.
    """

    source: int
    target: int
    staging: int
    rehearsal: int

    @property
    def together(self) -> int:
        return sum(self)


@dataclass(frozen=True)
class Change:
    """From one layout to another, or to the same one where a worker is replaced; and what its
    fullest worker holds meanwhile."""

    source: Layout
    target: Layout
    held: HandoffMemory

    def __str__(self) -> str:
        if self.source == self.target:
            return f"replacing a worker of {self.source}"
        return f"{self.source} to {self.target}"


@dataclass(frozen=True)
class Budget:
    """Holds layouts, and changes between them, against `policy.memory_bytes`.

    Exact to within the padding between the optimizer's parameters. Neither training's activations
    nor the buffers of collectives are counted.
    """

    config: RunConfig
    model: ModelSpec
    rehearsal_bytes: RehearsalBytes = lambda _layout: None

    def layout_fault(self, layout: Layout) -> str:
        """Why a layout is too large to be trained; empty when it is not."""
        most, staging = self.config.policy.memory_bytes, self.config.handoff.staging_bytes
        held = self.held(layout) if most is not None else 0
        if most is None or held + staging <= most:
            return ""
        return (
            f"its fullest worker holds {held} bytes and {staging} for staging, "
            f"more than policy.memory_bytes {most}"
        )

    def change_fault(self, layouts: Sequence[Layout]) -> str:
        """Why there are changes among layouts for which a worker has no memory, and what the
        largest of them wants; empty when there are none."""
        most = self.config.policy.memory_bytes
        if most is None or not layouts:
            return ""
        change = self.fullest_change(layouts)
        if change.held.together <= most:
            return ""
        held = change.held
        return (
            f"{change}: a worker that stays holds {held.source} bytes of the source world and "
            f"{held.target} of the target world, {held.staging} for staging and {held.rehearsal} "
            f"in the rehearsal: {held.together} during the handoff, more than "
            f"policy.memory_bytes {most}; so it is with {self._too_large(layouts)} of the "
            f"{len(layouts) ** 2} changes and replacements among the run's layouts"
        )

    def fullest_change(self, layouts: Sequence[Layout]) -> Change:
        """Of all changes among layouts, replacements included, the one that takes most memory."""
        held, rehearsal = self._held_by(layouts), self._rehearsal_by(layouts)
        source = layouts[int(held.argmax())]
        target = layouts[int((held + rehearsal).argmax())]
        memory = HandoffMemory(
            self.held(source),
            self.held(target),
            self.config.handoff.staging_bytes,
            self.rehearsal(target),
        )
        return Change(source, target, memory)

    def fullest_worker_of(self, source: RankMap, target: RankMap) -> HandoffMemory:
        """What the fullest worker holds during a handoff of which it is known who sits where."""
        in_source, in_target = (stage_bytes(self.model, one.layout) for one in (source, target))
        rehearsal = self.rehearsal(target.layout)
        found = set()
        for worker in {*source.workers, *target.workers}:
            at, to = source.coordinate_of(worker), target.coordinate_of(worker)
            found.add(
                HandoffMemory(
                    0 if at is None else in_source[at.pp],
                    0 if to is None else in_target[to.pp],
                    self.config.handoff.staging_bytes,
                    0 if to is None else rehearsal,
                )
            )
        return max(found, key=lambda one: one.together)

    def fitting(self, layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.float64]:
        """Bytes of state of the fullest worker with each of some numbers of replicas; infinite
        where the layout has a fault with it."""
        held = fullest_bytes(self.model, layout, replicas)
        return np.where(held + self.config.handoff.staging_bytes <= self._most, held, np.inf)

    def together(
        self, held: NDArray[np.float64], rehearsal: NDArray[np.float64]
    ) -> NDArray[np.bool_]:
        """Which of some layouts stay, so that all changes among those fit: the smallest ones.

        held, rehearsal: of each layout, in bytes.
        """
        order = np.argsort(held, kind="stable")
        # A layout and the smaller ones: it is the fullest source, one of them the fullest target.
        largest = held[order] + np.maximum.accumulate((held + rehearsal)[order])
        fits = np.zeros(len(held), dtype=np.bool_)
        fits[order] = largest + self.config.handoff.staging_bytes <= self._most
        return fits

    def held(self, layout: Layout) -> int:
        """Bytes of state of a layout's fullest worker."""
        return int(fullest_bytes(self.model, layout, np.array([layout.replicas]))[0])

    def rehearsal(self, layout: Layout) -> int:
        """Bytes of activations of a layout's rehearsal, where there is one."""
        return (self.config.handoff.warm_up and self.rehearsal_bytes(layout)) or 0

    @property
    def _most(self) -> float:
        most = self.config.policy.memory_bytes
        return np.inf if most is None else most

    def _too_large(self, layouts: Sequence[Layout]) -> int:
        """How many pairs of layouts do not fit."""
        held, rehearsal = self._held_by(layouts), self._rehearsal_by(layouts)
        left = self._most - self.config.handoff.staging_bytes - held - rehearsal
        return len(layouts) ** 2 - int(np.searchsorted(np.sort(held), left, side="right").sum())

    def _held_by(self, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        return np.array([self.held(layout) for layout in layouts], dtype=np.float64)

    def _rehearsal_by(self, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        return np.array([self.rehearsal(layout) for layout in layouts], dtype=np.float64)
