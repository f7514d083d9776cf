"""`python -m benchmarks.reconfigure --config configs/bench/local.yaml --json r.json`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks.harness import BenchmarkResult, machine_facts, parser, reported
from benchmarks.reconfigure.array import measure_on_slurm
from benchmarks.reconfigure.cells import Rows, measure
from benchmarks.reconfigure.figures import result
from benchmarks.reconfigure.sweep import Cell, Sweep, cells, load_sweep
from liver_hpc.errors import LiverError
from liver_hpc.host.files import look_anew

_SPEED_OF_S = 86_400.0
"""The time left is told by the cells of the last day."""


def run(sweep: Sweep, cluster: str, console: Console) -> list[Cell]:
    """Measures every cell that is not yet; returns all cells. Raises LiverError, also where they
    are of several kinds of machines."""
    rows, wanted = Rows(sweep), list(cells(sweep))
    missing = [cell for cell in wanted if rows.of(cell) is None]
    if len(missing) < len(wanted):
        console.print(f"{len(wanted) - len(missing)} of {len(wanted)} were measured before")
    rows.check_machine(wanted, *([machine_facts()] if missing and cluster == "local" else []))
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        speed_estimate_period=_SPEED_OF_S,
    ) as progress:
        task = progress.add_task("", total=len(wanted), completed=len(wanted) - len(missing))
        if cluster == "slurm":
            if missing:
                measure_on_slurm(sweep, missing, lambda _cell: progress.advance(task))
                _check_kept(rows, missing)
            return wanted
        for cell in missing:
            progress.update(task, description=cell.name)
            measure(sweep, cell)
            _check_kept(rows, [cell])
            progress.advance(task)
    return wanted


def _check_kept(rows: Rows, measured: Sequence[Cell]) -> None:
    """Rows lie elsewhere once the code is another one: raises LiverError."""
    look_anew(rows.directory)
    if lost := [cell.name for cell in measured if rows.of(cell) is None]:
        raise LiverError(
            f"{rows.directory} has no rows of {', '.join(lost)}, which were measured just now: "
            "was the code changed meanwhile?"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("reconfigure", "live reconfiguration against stop, checkpoint, restart")
    options.add_argument("--config", type=Path, default=Path("configs/bench/local.yaml"))
    options.add_argument("--cluster", choices=["local", "slurm"], default="local")
    options.add_argument("--cores", choices=["shared", "apart"], help="as the key `cores`")
    given = options.parse_args(arguments)
    console = Console(stderr=True)

    def measured() -> BenchmarkResult:
        sweep = load_sweep(given.config, given.quick, given.cores)
        wanted = run(sweep, given.cluster, console)
        rows = Rows(sweep)
        machine = rows.check_machine(wanted)
        return result(sweep, rows.all_of(wanted), machine, rows.failures(wanted))

    return reported(measured, given)


if __name__ == "__main__":
    sys.exit(main())
