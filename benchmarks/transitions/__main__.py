"""`python -m benchmarks.transitions`: state between layouts on every axis, and what comes after."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import BenchmarkResult, parser, reported
from benchmarks.models import text_data
from benchmarks.transitions.cases import FAMILIES, WORKERS, Family, changed_axes, is_uneven
from benchmarks.transitions.pool import Pool
from benchmarks.transitions.proof import Proof, Prover
from liver_hpc.recipes.text_data import prepare


def main(arguments: list[str] | None = None) -> int:
    options = parser("transitions", __doc__ or "").parse_args(arguments)
    return reported(lambda: run(FAMILIES), options.json)


def run(families: Sequence[Family]) -> BenchmarkResult:
    """Proves all transitions of the families, one after the other."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with Pool(WORKERS, directory) as pool:
            prover = Prover(pool)
            for family in families:
                config = family.config(text_data(directory))
                assert config.data is not None
                prepare(config.data)
                began_s = time.monotonic()
                for proof in prover.proofs(family, config):
                    ended_s = time.monotonic()
                    rows.append(_row(proof, config, ended_s - began_s))
                    print(rows[-1])
                    began_s = ended_s
    return BenchmarkResult("transitions", {"transitions": len(rows)}, rows)


def _row(proof: Proof, config, took_s: float) -> dict[str, Any]:
    return {
        "model": proof.family.name,
        "from": str(proof.source),
        "to": str(proof.target),
        "axes": " ".join(changed_axes(proof.source, proof.target)),
        "digests": not proof.digests,
        "back": proof.back,
        "moved": proof.moved,
        "apart": proof.apart,
        "s": took_s,
    }


if __name__ == "__main__":
    sys.exit(main())
