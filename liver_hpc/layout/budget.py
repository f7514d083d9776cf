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
from liver_hpc.layout.memory import stage_bytes, stage_parts
from liver_hpc.layout.tensors import ModelSpec

RehearsalBytes = Callable[[Layout], int | None]
"""`Recipe.rehearsal_bytes`; None stands for what is not known, and counts nothing."""


class HandoffMemory(NamedTuple):
    """Bytes that one worker holds during a handoff.

    source, target: parameters, gradients and optimizer state of its seat in either world, 0
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
        return _changing(self.source, self.target)


def _changing(source: Layout, target: Layout) -> str:
    if source == target:
        return f"replacing a worker of {source}"
    return f"{source} to {target}"


def loads(parts: NDArray[np.float64], kinds: int) -> NDArray[np.float64]:
    """What a worker holds at most, on whatever stage: of all; of parameters and 0, 1, ... `kinds`
    kinds of optimizer state; of optimizer state. [kinds + 3, numbers].

    parts: as `stage_parts` has them. A stage on which little is trained has parameters above all,
    and is not the fullest one.
    """
    parameters, gradients, state = parts
    begun = [parameters + state * number / kinds for number in range(kinds + 1)]
    held = np.array([parameters + gradients + state, *begun, state])
    most: NDArray[np.float64] = held.max(axis=1)
    return most


@dataclass(frozen=True)
class Budget:
    """Holds layouts, and changes between them, against `policy.memory_bytes`.

    Exact to within the padding between the optimizer's parameters. Neither training's activations
    are counted, nor the fp32 that an update makes of gradients in bf16, nor buffers of collectives.
    """

    config: RunConfig
    model: ModelSpec
    rehearsal_bytes: RehearsalBytes = lambda _layout: None

    # ---- what does not fit

    def layout_fault(self, layout: Layout) -> str:
        """Why a layout is too large to be trained; empty when it is not."""
        most = self.config.policy.memory_bytes
        held = self.held(layout) if most is not None else 0
        if most is None or held + self.staging <= most:
            return ""
        return (
            f"its fullest worker holds {held} bytes and {self.staging} for staging, "
            f"more than policy.memory_bytes {most}"
        )

    def change_fault(self, layouts: Sequence[Layout]) -> str:
        """Which change among layouts a worker has no memory for, in bounded memory either; empty
        when there is none."""
        most = self.config.policy.memory_bytes
        if most is None or not layouts:
            return ""
        peak, source, target = self.fullest_bounded_change(layouts)
        if peak <= most:
            return ""
        return (
            f"{_changing(source, target)}: a worker that stays holds up to {peak} bytes, "
            f"{self.staging} of them for staging, also where memory is bounded, more than "
            f"policy.memory_bytes {most}"
        )

    def bounded_because(self, source: Layout, target: Layout) -> str:
        """Why a change is made in bounded memory; empty when both worlds are held at once."""
        if self.config.handoff.memory == "bounded":
            return "handoff.memory is bounded"
        most = self.config.policy.memory_bytes
        held = self._memory(source, target).together if most is not None else 0
        if most is None or held <= most:
            return ""
        return f"both worlds would take {held} bytes of a worker, policy.memory_bytes is {most}"

    def together(self, held: NDArray[np.float64]) -> list[bool]:
        """Which of some layouts stay, so that all changes among those fit: each that fits with all
        that stay before it.

        held: as `loads` has it, [.., layouts].
        """
        most = self._most - self.staging
        phases = self._phases(held)  # [2, phases, layouts]
        fullest, stays = np.zeros(phases.shape[:2]), []
        for layout in range(held.shape[1]):
            with_it = np.maximum(fullest, phases[:, :, layout])
            stays.append(bool(with_it.sum(axis=0).max() <= most))
            fullest = with_it if stays[-1] else fullest
        return stays

    # ---- what is held

    def fullest_change(self, layouts: Sequence[Layout]) -> Change:
        """Of all changes among layouts, replacements included, the one that takes most memory where
        both worlds are held."""
        held = self._loads_of(layouts)[0]
        rehearsal = np.array([self.rehearsal(layout) for layout in layouts], dtype=np.float64)
        source = layouts[int(held.argmax())]
        target = layouts[int((held + rehearsal).argmax())]
        return Change(source, target, self._memory(source, target))

    def fullest_bounded_change(self, layouts: Sequence[Layout]) -> tuple[int, Layout, Layout]:
        """The most bytes that a worker holds in a change among layouts in bounded memory, and its
        source and target.

        One kind of state after the other changes over, when gradients have gone: of a worker's
        target there are the kinds so far, of its source those from this one on.
        """
        begun, left = self._phases(self._loads_of(layouts))
        phase = int((begun.max(axis=1) + left.max(axis=1)).argmax())
        target, source = int(begun[phase].argmax()), int(left[phase].argmax())
        peak = int(begun[phase, target] + left[phase, source]) + self.staging
        return peak, layouts[source], layouts[target]

    def bounded_bytes(self, source: Layout, target: Layout) -> int:
        """The most bytes that a worker holds in one change in bounded memory, if it has the fullest
        seat of both."""
        begun, left = self._phases(self._loads_of([target, source]))
        return int((begun[:, 0] + left[:, 1]).max()) + self.staging

    def _phases(self, held: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of layouts as a target and as a source, what there is of them in each phase of a change
        in bounded memory: [2, phases, layouts]. Before, between and after, the whole of one."""
        whole, *begun, state = held
        none, kinds = np.zeros_like(state), self._kinds
        left = [state * (kinds - number) / kinds for number in range(kinds)]
        return np.array([[none, *begun, whole], [whole, begun[-1], *left, none]])

    def _memory(self, source: Layout, target: Layout) -> HandoffMemory:
        return HandoffMemory(
            self.held(source), self.held(target), self.staging, self.rehearsal(target)
        )

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
                    self.staging,
                    0 if to is None else rehearsal,
                )
            )
        return max(found, key=lambda one: one.together)

    def fitting(self, layout: Layout, replicas: NDArray[np.int64]) -> NDArray[np.float64]:
        """What a worker holds with each of some numbers of replicas, as `loads`; infinite where
        the layout has a fault with it."""
        held = loads(stage_parts(self.model, layout, replicas), self._kinds)
        return np.where(held[0] + self.staging <= self._most, held, np.inf)

    def held(self, layout: Layout) -> int:
        """Bytes of state of a layout's fullest worker."""
        return int(self.loads(layout)[0])

    def rehearsal(self, layout: Layout) -> int:
        """Bytes of activations of a layout's rehearsal, where there is one."""
        return (self.config.handoff.warm_up and self.rehearsal_bytes(layout)) or 0

    def loads(self, layout: Layout) -> NDArray[np.float64]:
        """Of a layout, as the function of that name, without the last dimension."""
        parts = stage_parts(self.model, layout, np.array([layout.replicas]))
        return loads(parts, self._kinds)[:, 0]

    def _loads_of(self, layouts: Sequence[Layout]) -> NDArray[np.float64]:
        return np.stack([self.loads(layout) for layout in layouts], axis=1)

    @property
    def _kinds(self) -> int:
        return len(self.model.optimizer_kinds)

    @property
    def staging(self) -> int:
        return self.config.handoff.staging_bytes

    @property
    def _most(self) -> float:
        most = self.config.policy.memory_bytes
        return np.inf if most is None else most
