"""`liver report` into files: a page, plots."""

from __future__ import annotations

from pathlib import Path

from liver_hpc.errors import ConfigError
from liver_hpc.host.files import write_whole
from liver_hpc.report.compare import of_benchmark, of_run
from liver_hpc.run.records import RunRecords


def write_report(
    records: RunRecords, html: Path | None, png: Path | None, baselines: Path | None
) -> list[Path]:
    """Writes the page `html` and the plots into the directory `png`, as far as they are wanted;
    returns what was written. baselines: a benchmark's result to compare with.

    Raises ConfigError for a result that is none, and for a place that cannot be written to.
    """
    comparisons = of_benchmark(baselines) if baselines is not None else of_run(records)
    written: list[Path] = []
    try:
        if html is not None:
            from liver_hpc.report.page.document import page

            write_whole(html, page(records, comparisons).encode(errors="replace"))
            written.append(html)
        if png is not None:
            # Imports matplotlib, which takes longer than all the rest of a report.
            from liver_hpc.report.plots import write_plots

            png.mkdir(parents=True, exist_ok=True)
            written += write_plots(records, comparisons, png)
    except OSError as error:
        where = png if html is None or html in written else html
        raise ConfigError(f"{where} cannot be written: {error.strerror}") from None
    return written
