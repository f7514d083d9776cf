"""All drawings of a run."""

from __future__ import annotations

from matplotlib.figure import Figure

from liver_hpc.report.compare import Comparisons, of_run
from liver_hpc.report.derive import RunFigures
from liver_hpc.report.drawings import baselines, handoff, nodes, training
from liver_hpc.report.drawings.canvas import legend, styled
from liver_hpc.run.records import RunRecords


def drawings(
    records: RunRecords, figures: RunFigures, comparisons: Comparisons | None = None
) -> dict[str, Figure]:
    """By name: training, nodes and baselines where there is something to show, and handoff-N for
    each generation N that workers' phases are known of. comparisons: of a benchmark, else those of
    the run."""
    times = training.timeline(records, figures.reconfigurations)
    comparisons = comparisons or of_run(figures, records)
    with styled():
        found = {"training": training.draw(figures, times)}
        if figures.notices:
            found["nodes"] = nodes.draw(figures.notices, times)
        if comparisons:
            found["baselines"] = baselines.draw(comparisons)
        for record in figures.reconfigurations:
            if drawn := handoff.draw(record, records):
                found[f"handoff-{record.generation}"] = drawn
        for figure in found.values():
            legend(figure)
    return found
