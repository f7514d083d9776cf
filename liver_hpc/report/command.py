"""`liver report`: a run's figures on the terminal, as JSON, as a page or as plots."""

from __future__ import annotations

import argparse
import json
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
    parser.add_argument(
        "--baselines", type=Path, metavar="FILE", help="compare with a benchmark's result (JSON)"
    )


def report(metrics: Path, options: argparse.Namespace) -> None:
    """What the options ask for, of the run whose metrics file this is. Raises ConfigError when
    they contradict each other, or the file or the baselines cannot be read."""
    if options.html is None and options.png is None:
        if options.baselines is not None:
            raise ConfigError("--baselines is drawn: it needs --html or --png")
        show(metrics, as_json=options.json)
        return
    if options.json:
        raise ConfigError("--json prints; it does not go with --html or --png")
    from liver_hpc.report.report_files import write_report

    for path in write_report(_records(metrics), options.html, options.png, options.baselines):
        print(path)


def show(metrics: Path, as_json: bool = False) -> None:
    """The tables, or everything as JSON. Raises ConfigError when the file is unreadable."""
    from rich.console import Console

    from liver_hpc.report.report import print_report, report_json

    records = _records(metrics)
    if as_json:
        print(json.dumps(report_json(records), indent=1))
    else:
        print_report(records, Console())


def _records(metrics: Path) -> RunRecords:
    """What was recorded of a run, also where reading a damaged file would never end."""
    from liver_hpc.report.probe import probe
    from liver_hpc.report.store import read_run

    probe(metrics)
    return read_run(metrics)
