"""`python -m benchmarks.memory`: what a handoff takes of a worker, beside what its worlds do."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkResult, parser, reported
from benchmarks.memory.held import Held
from benchmarks.models import MODEL_100M, layout_table, text_data
from benchmarks.transitions.pool import Pool, open_seat
from liver_hpc.cli.submission import with_prepared_data
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout

MODES = ("both", "bounded")
TRANSITIONS = (("tp2", "pp2"), ("dp2", "tp2"))
MODEL = {**MODEL_100M, "seq_length": 8}
MODEL_QUICK = {"layers": 4, "hidden": 256, "ffn_hidden": 512, "heads": 4, "seq_length": 8}
LIMIT_S = 300.0

METHOD = {
    "peak": "the kernel's count of resident bytes at their highest (VmHWM), above those of the "
    "same process before it had a world; the fuller of two workers. Where there are GPUs: bytes of "
    "the GPU that torch had in use, without what NCCL takes",
    "handoff": "PREPARE, one step of the source, the checkpoint of the boundary where memory is "
    "bounded, TRANSFER, the target's first step, RELEASE; staging of 64 MiB",
    "world": "one step of the source before, or of the target after: the larger",
    "model": "100M parameters in fp32 with Adam's moments, gradients in fp32, on two processes",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser("memory", __doc__ or "").parse_args(arguments)
    model, transitions = (MODEL_QUICK, TRANSITIONS[:1]) if options.quick else (MODEL, TRANSITIONS)
    return reported(lambda: run(model, transitions), options)


def run(model: Mapping[str, Any], transitions: Sequence[tuple[str, str]]) -> BenchmarkResult:
    """Measures every transition in either mode, in processes of its own."""
    rows = []
    for source, target in transitions:
        layouts = Layout.parse(source), Layout.parse(target)
        held = {mode: handed_over(model, layouts, mode) for mode in MODES}
        ends = [[(one.loss, one.digests) for one in held[mode]] for mode in MODES]
        if ends[0] != ends[1]:
            raise LiverError(f"{source} to {target}: {MODES} end in different states: {held}")
        rows += [_row(f"{source} to {target}", mode, held[mode]) for mode in MODES]

    def most(mode: str) -> float:
        return max(float(row["peak_over_world"]) for row in rows if row["mode"] == mode)

    figures = {
        "handoff_peak_over_max_world": most("bounded"),
        "handoff_peak_over_max_world_both": most("both"),
    }
    return BenchmarkResult("memory", figures, rows, method=METHOD)


def handed_over(model: Mapping[str, Any], layouts: tuple[Layout, Layout], mode: str) -> list[Held]:
    """What each worker held."""
    with tempfile.TemporaryDirectory() as name:
        config = with_prepared_data(_config(model, layouts, mode, Path(name)))
        opened = partial(open_seat, Path(name), kind="benchmarks.memory.seat:Seat")
        with Pool(max(one.workers for one in layouts), opened) as pool:
            what = f"hand {layouts[0]} over to {layouts[1]}"
            found: list[Held] = pool.call(what, LIMIT_S, "hand_over", config, layouts)
    return found


def _config(
    model: Mapping[str, Any], layouts: tuple[Layout, Layout], mode: str, directory: Path
) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": dict(model),
            "data": text_data(directory),
            "train": {"steps": 100, "global_batch": 4},
            "workers": {"initial": layouts[0].workers, "max": max(one.workers for one in layouts)},
            "layouts": layout_table(layouts),
            "handoff": {"memory": mode},
            "cluster": {"kind": "local"},
        }
    )


def _row(transition: str, mode: str, workers: Sequence[Held]) -> dict[str, Any]:
    world = max(max(one.source, one.target) for one in workers)
    peak = max(one.handoff for one in workers)
    share = max(one.handoff / max(one.source, one.target) for one in workers)
    return {
        "transition": transition,
        "mode": mode,
        "world_bytes": world,
        "peak_bytes": peak,
        "peak_over_world": share,
    }


if __name__ == "__main__":
    sys.exit(main())
