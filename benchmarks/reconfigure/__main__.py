"""`python -m benchmarks.reconfigure --config configs/bench/local.yaml --json r.json`."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.harness import BenchmarkResult, machine_facts, parser, reported
from benchmarks.reconfigure.array import measure_on_slurm
from benchmarks.reconfigure.cells import Rows, measure, time_left_s
from benchmarks.reconfigure.figures import result
from benchmarks.reconfigure.sweep import Cell, Sweep, cells, load_sweep
from liver_hpc.errors import LiverError
from liver_hpc.host.files import look_anew
from liver_hpc.report.wording import duration_text


class Bar:
    """The progress bar: cells done, and an estimate of the time that the others take."""

    def __init__(self, rows: Rows, wanted: Sequence[Cell], parallel: int, console: Console) -> None:
        self._rows = rows
        self._wanted = wanted
        self._parallel = parallel
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=console,
        )
        self._task = self._progress.add_task("", total=len(wanted), left="")

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._progress.stop()

    def show(self, description: str) -> None:
        """Counts anew what is measured, and says what comes now."""
        took_s: dict[str, list[float]] = defaultdict(list)
        left = []
        for cell in self._wanted:
            kind = f"{cell.size}/{cell.method}/{cell.variant}"
            cell_s = self._rows.took_s(cell)
            if cell_s is None:
                left.append(kind)
            else:
                took_s[kind].append(cell_s)
        left_s = time_left_s(took_s, left) / self._parallel
        self._progress.update(
            self._task,
            description=description,
            completed=len(self._wanted) - len(left),
            left=f"about {duration_text(left_s)} left" if left else "",
        )


def run(sweep: Sweep, cluster: str, console: Console) -> list[Cell]:
    """Measures every cell that is not yet; returns all cells. Raises LiverError, also where they
    are of several kinds of machines."""
    rows, wanted = Rows(sweep), list(cells(sweep))
    missing = [cell for cell in wanted if rows.of(cell) is None]
    if len(missing) < len(wanted):
        console.print(f"{len(wanted) - len(missing)} of {len(wanted)} were measured before")
    rows.check_machine(wanted, *([machine_facts()] if missing and cluster == "local" else []))
    parallel = sweep.slurm.parallel if cluster == "slurm" else 1
    with Bar(rows, wanted, parallel, console) as bar:
        bar.show("")
        if cluster == "slurm":
            if missing:
                measure_on_slurm(sweep, missing, lambda cell: bar.show(cell.name))
                _check_kept(rows, missing)
            return wanted
        for cell in missing:
            bar.show(cell.name)
            measure(sweep, cell)
            _check_kept(rows, [cell])
        bar.show("")
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
