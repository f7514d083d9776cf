"""All drawings of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.figure import Figure

from liver_hpc.report.compare import Comparisons, of_run
from liver_hpc.report.derive import ReconfigurationFigures, RunFigures
from liver_hpc.report.drawings import baselines, handoff, nodes, training
from liver_hpc.report.drawings.canvas import legend, styled
from liver_hpc.run.records import RunRecords

MOST_HANDOFFS = 24
"""Of more handoffs than this the costliest are drawn: each takes a third of a second."""


def drawings(
    records: RunRecords, figures: RunFigures, comparisons: Comparisons | None = None
) -> dict[str, Figure]:
    """By name: training, nodes and baselines where there is something to show, and handoff-N for
    each generation N that workers' phases are known of, MOST_HANDOFFS at the most. comparisons: of
    a benchmark, else the restarts of the run, where that is a benchmark's."""
    times = training.timeline(records, figures.reconfigurations)
    comparisons = comparisons or of_run(records)
    with styled():
        found = {"training": training.draw(figures, times)}
        if figures.notices:
            found["nodes"] = nodes.draw(figures.notices, times)
        if comparisons:
            found["baselines"] = baselines.draw(comparisons)
        for record in _costliest(figures.reconfigurations):
            if drawn := handoff.draw(record, records):
                found[f"handoff-{record.generation}"] = drawn
        for figure in found.values():
            legend(figure)
    return found


def _costliest(attempts: Sequence[ReconfigurationFigures]) -> list[ReconfigurationFigures]:
    """In the order in which they were; an attempt that cost nothing that is known comes last."""

    def cost(record: ReconfigurationFigures) -> float:
        return record.cost_s if math.isfinite(record.cost_s) else -math.inf

    chosen = sorted(attempts, key=cost, reverse=True)[:MOST_HANDOFFS]
    return sorted(chosen, key=lambda record: record.generation)
