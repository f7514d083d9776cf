"""`python -m benchmarks.handoffs --json h.json`: twenty handoffs in a row, fifty replacements."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import BenchmarkResult, parser, reported
from benchmarks.live_runs import LiveRun
from benchmarks.models import text_data
from benchmarks.processes import Footprint, footprint, living, outliving
from liver_hpc.config.schema import RunConfig
from liver_hpc.layout.coordinates import Layout

THERE, HOME = Layout.parse("pp2"), Layout.parse("dp2")
EVENT_S = 300.0
SETTLED_STEPS = 2
COMPARED = 3
"""So many samples at either end, of which medians are compared; the first few handoffs may load
what none has used before, so as many are left out."""

METHOD = {
    "samples": "all processes of the run (coordinator, agents, what they keep warm, workers), seen "
    "from outside two steps after a handoff that leads to dp2, when that is over",
    "handoffs": "dp2 to pp2 and back, again and again, then one of the two workers replaced, again "
    "and again",
    "growth": f"median of the last {COMPARED} samples of each part against that of {COMPARED}, the "
    f"first {COMPARED} left out; the larger of both parts",
    "memory": "proportional set size, in which what processes share counts once",
}


@dataclass(frozen=True)
class Scale:
    """How many of each."""

    handoffs: int = 20
    replacements: int = 50


QUICK = Scale(4, 3)


@dataclass(frozen=True)
class Sample:
    """part: "handoffs" or "replacements". number: of how many."""

    part: str
    number: int
    held: Footprint


def main(arguments: Sequence[str] | None = None) -> int:
    given = parser("handoffs", "what stays of many handoffs").parse_args(arguments)
    return reported(lambda: run(QUICK if given.quick else Scale()), given)


def run(scale: Scale) -> BenchmarkResult:
    """Raises LiverError where a handoff is aborted."""
    samples: list[Sample] = []
    with LiveRun(_config(), EVENT_S) as live:
        path = str(live.run.path)

        def sample(part: str, number: int) -> None:
            live.await_handoffs()
            live.settle(SETTLED_STEPS)
            held = footprint(living(path))
            samples.append(Sample(part, number, held))

        live.settle(SETTLED_STEPS)
        for number in range(2, scale.handoffs + 1, 2):
            live.resize(THERE)
            live.await_handoffs()
            live.resize(HOME)
            sample("handoffs", number)
        for number in range(1, scale.replacements + 1):
            live.replace()
            sample("replacements", number)
    return result(samples, outliving(path))


def _config() -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "handoffs",
            "runs_directory": "runs/bench",
            "model": {"layers": 4, "hidden": 256, "ffn_hidden": 512, "heads": 4, "seq_length": 32},
            "data": text_data(),
            "train": {"steps": 1_000_000, "global_batch": 4, "micro_batch": 1},
            "workers": {"initial": 2, "max": 2},
            "layouts": {2: [{"dp": 2}, {"pp": 2}]},
        }
    )


def result(samples: Sequence[Sample], left: int) -> BenchmarkResult:
    """left: processes that were there after the run's end."""
    growths = [
        growth([each.held for each in samples if each.part == part])
        for part in dict.fromkeys(each.part for each in samples)
    ]
    names = list(growths[0])
    return BenchmarkResult(
        "handoffs",
        {
            **{name: max(each[name] for each in growths) for name in names},
            "processes_left": left,
        },
        [_row(each) for each in samples],
        method=METHOD,
        repeats=COMPARED,
    )


def growth(held: Sequence[Footprint]) -> Mapping[str, float]:
    """From the first to the last of one part; of few samples the first ones are not left out."""
    known = held[COMPARED:] if len(held) > 2 * COMPARED else held

    def ends(name: str) -> tuple[float, float]:
        values = [getattr(each, name) for each in known]
        count = max(1, min(COMPARED, len(values) // 2))
        return statistics.median(values[:count]), statistics.median(values[-count:])

    first_bytes, last_bytes = ends("memory_bytes")
    grown = {"memory_growth_percent": 100 * (last_bytes / first_bytes - 1)}
    for name in ("descriptors", "threads", "processes"):
        first, last = ends(name)
        grown[f"{name}_growth"] = last - first
    return grown


def _row(sample: Sample) -> dict[str, Any]:
    held = sample.held
    return {
        "part": sample.part,
        "number": sample.number,
        "processes": held.processes,
        "threads": held.threads,
        "descriptors": held.descriptors,
        "memory_mib": held.memory_bytes / 2**20,
    }


if __name__ == "__main__":
    sys.exit(main())
