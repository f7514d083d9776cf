"""Which layout to run with the workers there are: by the run file's order, or the fastest."""

from __future__ import annotations

import math
from collections import deque
from statistics import median

import numpy as np
from scipy.optimize import nnls

from liver_hpc.config.schema import AUTO, RunConfig
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.candidates import PRIOR, StepTerms, step_terms
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.ramp import batch_of
from liver_hpc.layout.tensors import ModelSpec

REMEMBERED_STEPS = 16
"""How many last steps of a layout count; older ones were trained under other conditions."""
MARGIN = 0.05
"""Share of the step time by which a layout that was never measured must be better."""
TRUST_IN_PRIOR = 0.1
"""Weight of the prior's proportions against one measured layout, in the fit of predictions."""
LEAST_SHARE = 0.01
"""Share of the scaled prior below which no weight falls: no layout's steps take no time."""


class LayoutPolicy:
    """Chooses among the layouts that a run allows and that fit `policy.memory_bytes`.

    With `policy.layout` "table" it takes the first layout of the largest number of workers. With
    "auto" it takes the one whose steps are shortest. The step time of a layout that was trained is
    the median of its last steps. That of another is predicted from the terms of `step_terms`,
    each with a positive weight:

        step_s = w_compute compute + w_tensor tensor + w_data data + w_fixed fixed + ...

    The weights give the predictions of the measured layouts the least squared relative errors,
    while their ratios are held near `PRIOR` (`TRUST_IN_PRIOR`). With nothing measured they are
    `PRIOR`, with one layout measured `PRIOR` scaled to it.

    During a ramp-up of the batch a time is that of its batch: another batch's is the last one that
    was measured, in the proportion of their predictions.

    A layout that was never trained must be predicted better by more than `MARGIN` to come before
    a trained one, and by as much again if it leaves workers idle. Among equally good layouts the
    one with more workers comes first, then the one that comes first in the run file.
    A change that nothing forces has to repay what it costs (`not_worth`).
    Deterministic. Used by one thread.
    """

    def __init__(self, config: RunConfig, spec: ModelSpec) -> None:
        self._auto = config.policy.layout == AUTO
        self._train = config.train
        self._batch = batch_of(config.train, 0)
        self._measured: dict[Layout, dict[int, deque[float]]] = {}  # by batch, the last one last
        self._weights: StepTerms | None = None  # to be fitted when they are wanted
        self._choices: dict[int, list[Layout]] = {}  # since the last measurement
        budget = Budget(config, spec)
        self._layouts = tuple(
            layout
            for count in reversed(config.worker_counts)
            if count <= config.workers.max
            for layout in config.allowed_layouts(count)
            if not budget.layout_fault(layout)
        )

    def at_step(self, step: int) -> None:
        """From here on it is asked about global batch `step`, and those like it that follow."""
        batch = batch_of(self._train, step)
        if batch != self._batch:
            self._batch = batch
            self._choices.clear()

    def observe(self, layout: Layout, step_s: float, batch: int | None = None) -> None:
        """Learns from one undisturbed step of a warm world. batch: its samples; None: as many as
        the steps have that it is asked about.

        Drops a time that cannot be, as when the clock was set back.
        """
        if step_s > 0 and math.isfinite(step_s):
            batch, by_batch = batch or self._batch, self._measured.setdefault(layout, {})
            times = by_batch.pop(batch, deque[float](maxlen=REMEMBERED_STEPS))
            times.append(step_s)
            by_batch[batch] = times
            self._weights = None
            self._choices.clear()

    def forget(self, layout: Layout) -> None:
        """What was measured of it is not what it takes any more: it counts as never trained."""
        self._measured.pop(layout, None)
        self._weights = None
        self._choices.clear()

    def best(self, workers: int) -> Layout | None:
        """The layout to run with at most `workers` workers; None when there is none."""
        return next(iter(self.choices(workers)), None)

    def choices(self, workers: int) -> list[Layout]:
        """All layouts of at most `workers` workers, the best one first."""
        fitting = [layout for layout in self._layouts if layout.workers <= workers]
        if not self._auto or not fitting:
            return fitting  # they are in the table's order
        if workers not in self._choices:
            most = fitting[0].workers
            order = sorted(fitting, key=lambda layout: self._handicapped_s(layout, most))
            self._choices[workers] = order
        return list(self._choices[workers])

    def expected_step_s(self, layout: Layout) -> float:
        """The median of the measured steps, or else the prediction; of the batch of `at_step`.

        It is in seconds once any layout was measured; before that it is relative to the computing
        of a step on one worker.
        """
        if by_batch := self._measured.get(layout):
            batch = self._batch if self._batch in by_batch else next(reversed(by_batch))
            measured_s = median(by_batch[batch])
            if batch == self._batch:
                return measured_s
            return (
                measured_s * self._predicted(layout, self._batch) / self._predicted(layout, batch)
            )
        return self._predicted(layout, self._batch)

    def slowdown(self, source: Layout, target: Layout) -> float:
        """How many times as long a step of the target takes, as predicted for equal workers:
        measured times may be those of unequal ones."""
        return self._predicted(target, self._batch) / self._predicted(source, self._batch)

    def _predicted(self, layout: Layout, batch: int) -> float:
        if self._weights is None:
            self._weights = self._fitted()
        return step_terms(layout, self._train, batch).cost(self._weights)

    def not_worth(self, source: Layout, target: Layout, cost_s: float, lasting_s: float) -> str:
        """Why a change that nothing forces does not repay what it costs; empty when it does.

        cost_s: training time that it takes. lasting_s: how long the source would go on otherwise.
        It repays where the target needs less time, by more than cost_s, for what the source does in
        that time. By the table every change is wanted that leads to more workers.
        """
        if not self._auto:
            return ""
        saved_s = lasting_s * (1 - self.expected_step_s(target) / self.expected_step_s(source))
        if saved_s > cost_s:
            return ""
        saves = f"saves {saved_s:.1f} s" if saved_s > 0 else "saves nothing"
        return f"it {saves} in the next {lasting_s:.0f} s, and costs {cost_s:.1f} s"

    def _handicapped_s(self, layout: Layout, most: int) -> float:
        """The expected time with the margins that keep a guess from beating a measurement."""
        expected_s = self.expected_step_s(layout)
        if layout in self._measured:
            return expected_s
        guess_s = expected_s / (1 - MARGIN)
        return guess_s if layout.workers == most else guess_s / (1 - MARGIN)

    def _fitted(self) -> StepTerms:
        if not self._measured:
            return PRIOR
        prior = np.array(PRIOR)
        measured = [
            (step_terms(layout, self._train, batch), median(times))
            for layout, by_batch in self._measured.items()
            for batch, times in by_batch.items()
        ]
        terms, measured_s = (np.array(column) for column in zip(*measured, strict=True))
        scale = float(np.median(measured_s / (terms @ prior)))
        scaled = prior * scale
        # The unknowns are factors on the scaled prior: 1 where nothing speaks against it.
        pull = math.sqrt(TRUST_IN_PRIOR)
        rows = np.vstack([terms * scaled / measured_s[:, None], pull * np.eye(len(prior))])
        wanted = np.concatenate([np.ones(len(measured_s)), pull * np.ones(len(prior))])
        above, _ = nnls(rows, wanted - LEAST_SHARE * rows.sum(axis=1))
        return StepTerms(*(float(weight) for weight in (LEAST_SHARE + above) * scaled))
