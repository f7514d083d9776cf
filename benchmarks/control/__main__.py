"""`python -m benchmarks.control`: a whole handoff's control path, of thousands of workers."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.control.runs import Handoff, ManyWorkers, crossing_of, layouts_of
from benchmarks.harness import BenchmarkResult, Spread, parser, reported
from benchmarks.planner.cases import NODE_WORKERS
from liver_hpc.host.process import collect_seldom, raise_descriptor_limit

WORKERS = 4096
QUICK_WORKERS = 512
SMALLER = 4
"""By so much smaller is the run that growth is held against."""

METHOD = {
    "run": "the coordinator as it is: its event loop, journal on disk, connections and store. "
    "Agents are simulated in one process beside it, each over a connection of its own, with eight "
    "workers that answer at once: what is measured is what the control path takes when nothing "
    "else does",
    "handoff": "all workers take part: tp8 pp16 to tp8 pp8 and back, of a 405B model; from the "
    "operator's request, with the target's seats, PREPARE, the groups' keys in the store as NCCL "
    "sets and gets them, asked for by an agent for all its workers that have come as far, the "
    "boundary, votes with digests, verdict, first steps, RELEASE, until the run is idle",
    "votes": "each worker tells digests of as many peers and kinds of state as the plans of seven "
    "workers of that handoff have in the mean",
    "left out": "the meeting of joiners over MPI, of which this handoff has none",
    "handoff_control_s": "median; wall time, of which the simulated agents take a part on the same "
    "machine. cpu_s: the coordinator's own",
    "coordinator_sockets": "connections to its port, over the number of agents",
    "growth": "of handoff_control_s, from a quarter of the workers to all; both in one run, "
    "alternately",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser("control", __doc__ or "")
    options.add_argument("--workers", type=_workers, help=f"default {WORKERS}")
    given = options.parse_args(arguments)
    workers = given.workers or (QUICK_WORKERS if given.quick else WORKERS)
    return reported(lambda: run(workers, 1 if given.quick else 5), given)


def _workers(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 512 or number % 512:
        wanted = f"wanted a multiple of 512 workers, got {text}"
        raise argparse.ArgumentTypeError(wanted)
    return number


def run(workers: int, repeats: int) -> BenchmarkResult:
    raise_descriptor_limit()
    collect_seldom()
    sizes = (workers // SMALLER, workers)
    handoffs: dict[int, list[Handoff]] = {size: [] for size in sizes}
    with tempfile.TemporaryDirectory() as directory:
        runs = {size: ManyWorkers(Path(directory) / str(size), size) for size in sizes}
        for each in runs.values():
            each.handoff()  # plans and pages are fresh
        for _ in range(repeats):
            for size, each in runs.items():
                handoffs[size].append(each.handoff())
        sockets = {size: each.sockets() / each.agents for size, each in runs.items()}
        rows = [_row(size, runs[size], handoffs[size]) for size in sizes]
        for each in runs.values():
            each.close()
    took = {size: Spread.of([each.took_s for each in handoffs[size]]) for size in sizes}
    figures = {
        "handoff_control_s": took[workers].median,
        "handoff_control_cpu_s": median(each.cpu_s for each in handoffs[workers]),
        "coordinator_sockets": max(sockets.values()),
        f"growth_{sizes[0]}_to_{sizes[1]}": took[workers].median / took[sizes[0]].median,
    }
    spread = {"handoff_control_s": took[workers], f"handoff_control_s_{sizes[0]}": took[sizes[0]]}
    return BenchmarkResult("control", figures, rows, METHOD, spread, repeats)


def _row(workers: int, run: ManyWorkers, handoffs: list[Handoff]) -> dict[str, Any]:
    took, cpu = (
        Spread.of([getattr(each, name) for each in handoffs]) for name in ("took_s", "cpu_s")
    )
    first, second = layouts_of(workers)
    return {
        "workers": workers,
        "agents": workers // NODE_WORKERS,
        "layouts": f"{first} / {second}",
        "peers": crossing_of(workers).peers,
        "boot_s": round(run.boot_s, 2),
        "handoff_s": took.text(),
        "cpu_s": cpu.text(),
    }


if __name__ == "__main__":
    sys.exit(main())
