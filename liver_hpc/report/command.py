"""`liver report`: a run's figures on the terminal, as JSON, or in files."""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from liver_hpc.errors import ConfigError

if TYPE_CHECKING:
    from liver_hpc.run.records import RunRecords


def add_options(parser: argparse.ArgumentParser) -> None:
    """What the command takes besides its run. Imports nothing, so that `--help` is quick."""
    parser.add_argument("--json", action="store_true", help="all figures, for programs")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page in one file")
    parser.add_argument("--png", type=Path, metavar="DIR", help="write its plots there")
    parser.add_argument("--hdf5", type=Path, metavar="FILE", help="write what was recorded there")
    parser.add_argument(
        "--baselines", type=Path, metavar="FILE", help="also draw a benchmark's result (JSON)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="what a trace of events (CSV) would have cost, by the run's own costs",
    )


def report(run_directory: Path, options: argparse.Namespace) -> None:
    """What the options ask for, of a run. Raises ConfigError when they contradict each other, or
    the records or the baselines cannot be read."""
    if options.baselines is not None and options.html is None and options.png is None:
        raise ConfigError("--baselines is drawn: it needs --html or --png")
    if not (options.html or options.png or options.hdf5):
        show(run_directory, as_json=options.json, trace=options.trace)
        return
    if options.trace is not None:
        raise ConfigError("--trace prints; it does not go with --html, --png or --hdf5")
    if options.json:
        raise ConfigError("--json prints; it does not go with --html, --png or --hdf5")
    records = _records(run_directory)
    if options.html or options.png:
        draw(records, options.html, options.png, options.baselines)
    if options.hdf5 is not None:
        from liver_hpc.report.hdf5 import write_hdf5

        with _writing(options.hdf5):
            write_hdf5(options.hdf5, records)


def show(run_directory: Path, as_json: bool = False, trace: Path | None = None) -> None:
    """The tables, or everything as JSON; of a trace what that would have cost. Raises ConfigError
    when the records are unreadable, or the trace is."""
    from rich.console import Console

    from liver_hpc.report.report import print_report, print_trace, report_json
    from liver_hpc.report.traces import compared

    records = _records(run_directory)
    replayed = None if trace is None else compared(trace, records)
    if as_json:
        more = {} if replayed is None else {"trace": replayed}
        print(json.dumps(report_json(records) | more, indent=1))
    elif replayed is not None:
        print_trace(replayed, Console())
    else:
        print_report(records, Console())


def draw(
    records: RunRecords, html: Path | None, png: Path | None, baselines: Path | None = None
) -> None:
    """Writes the page `html` and the drawings into the directory `png`, as far as they are wanted.
    baselines: a benchmark's result to draw beside the run.

    Raises ConfigError for a result that is none, and for a place that cannot be written to.
    """
    # matplotlib takes longer to import than all the rest of a report.
    from liver_hpc.host.files import write_whole
    from liver_hpc.report.compare import of_benchmark
    from liver_hpc.report.derive import run_figures
    from liver_hpc.report.drawings.canvas import styled
    from liver_hpc.report.drawings.run import drawings
    from liver_hpc.report.page.document import page

    figures = run_figures(records)
    drawn = drawings(records, figures, of_benchmark(baselines) if baselines else None)
    if html is not None:
        with _writing(html):
            write_whole(html, page(records, figures, drawn).encode(errors="replace"))
    if png is not None:
        for name, figure in drawn.items():
            with _writing(png / f"{name}.png") as path, styled():
                png.mkdir(parents=True, exist_ok=True)
                figure.suptitle(str(figure.get_label()).partition(". ")[0])
                figure.savefig(path)


@contextmanager
def _writing(path: Path) -> Iterator[Path]:
    """Says what was written, or what could not be."""
    from liver_hpc.report.hdf5 import failure_text

    try:
        yield path
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {failure_text(error)}") from None
    print(path)


def _records(run_directory: Path) -> RunRecords:
    from liver_hpc.report.store import read_run

    gc.disable()  # a million records come that all stay: it would look for what can go
    try:
        return read_run(run_directory)
    finally:
        gc.freeze()
        gc.enable()
