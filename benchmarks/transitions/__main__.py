"""`python -m benchmarks.transitions`: state between layouts on every axis, and what comes after."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkResult, figure_text, parser, reported
from benchmarks.models import text_data
from benchmarks.transitions.cases import (
    AXES,
    COMPARED,
    FAMILIES,
    TRAINED,
    WORKERS,
    Family,
    changed_axes,
    is_uneven,
    quick,
)
from benchmarks.transitions.pool import Pool, open_seat
from benchmarks.transitions.proof import Proof, Prover
from liver_hpc.cli.submission import with_prepared_data

Row = dict[str, Any]

METHOD = {
    "model": "GPT recipe of 4 layers, hidden 32, on text; fp32 unless its name says bf16",
    "workers": f"{WORKERS} processes on this machine, gloo over loopback; target workers by "
    "placement; each world is built for its transition, rehearsed, and connected over a store",
    "there": f"after {TRAINED} steps all state is moved (plan and transport of a handoff) to the "
    "target, in whose memory every bit was set; digests of source and target agree by the rule "
    "of the votes",
    "back": "from there to the same layout on other workers (same_layout: every bit alike), and "
    "from those to the source, where every bit is as before. Step counters go along, as the "
    "coordinator tells them in a handoff",
    "apart": f"{COMPARED} steps in the target against the same steps of the source that stayed: "
    "the largest relative difference of a loss or gradient norm, of all workers",
    "loss": "of the first step and the last one of the source's run",
    "uneven": "some data-parallel ranks compute a micro-batch more than others in one of the two",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser("transitions", __doc__ or "").parse_args(arguments)
    families = quick(FAMILIES) if options.quick else FAMILIES
    return reported(lambda: run(families), options)


def run(families: Sequence[Family]) -> BenchmarkResult:
    """Proves all transitions of the families, one after the other."""
    with tempfile.TemporaryDirectory() as name:
        with Pool(WORKERS, partial(open_seat, Path(name))) as pool:
            prover = Prover(pool)
            rows = [row for family in families for row in _rows(prover, family, Path(name))]
        samples = [{"call": call, "s": took_s} for call, took_s in pool.seconds.items()]
    return BenchmarkResult("transitions", figures(rows), rows, method=METHOD, samples=samples)


def _rows(prover: Prover, family: Family, directory: Path) -> Iterator[Row]:
    config = with_prepared_data(family.config(text_data(directory)))
    began_s = time.monotonic()
    for proof in prover.proofs(family, config):
        ended_s = time.monotonic()
        uneven = any(is_uneven(config, layout) for layout in (proof.source, proof.target))
        yield _row(family, proof, uneven, ended_s - began_s)
        began_s = ended_s


def _row(family: Family, proof: Proof, uneven: bool, took_s: float) -> Row:
    return {
        "model": family.name,
        "from": str(proof.source),
        "to": str(proof.target),
        "axes": " ".join(changed_axes(proof.source, proof.target)),
        "uneven": uneven,
        "there": not proof.disagreements,
        "back": proof.back,
        "same_layout": proof.same_layout,
        "apart": proof.apart,
        "loss": " to ".join(map(figure_text, proof.losses)),
        "s": round(took_s, 1),
    }


def figures(rows: Sequence[Row]) -> dict[str, float]:
    """What the rows show in all."""

    def apart(bf16: bool) -> float:
        values = [row["apart"] for row in rows if ("bf16" in row["model"]) == bf16]
        return max(values, default=float("nan"))

    changed = [row["axes"].split() for row in rows]
    return {
        "transitions": len(rows),
        "bit_equal": sum(row["there"] and row["back"] and row["same_layout"] for row in rows),
        "max_relative_difference": apart(bf16=False),
        "max_relative_difference_bf16": apart(bf16=True),
        **{f"changing_{axis}": sum(axis in axes for axes in changed) for axis in (*AXES, "sp")},
        "changing_several": sum(len(axes) > 1 for axes in changed),
        "uneven": sum(row["uneven"] for row in rows),
    }


if __name__ == "__main__":
    sys.exit(main())
