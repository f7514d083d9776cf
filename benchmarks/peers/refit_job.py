"""Megatron's refit and our TRANSFER of the same parameters, in the same two processes."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.trial import BYTES_PER_PARAMETER, Effort, Row, Trial, prepared, state_bytes
from benchmarks.transitions.pool import Pool
from liver_hpc.config.load import dump_run
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.recipes.specs import load_run_recipe

REFIT = "refit"
DP, TP = Layout.parse("dp2"), Layout.parse("tp2")
BYTES_OF_VALUE = 4


def _open(directory: Path, worker: int) -> Any:
    """Makes the calling process one of the two, which hold both worlds; nothing is trained."""
    from benchmarks.peers.refit_worker import Refit  # which imports torch

    return Refit(directory, worker, DP.workers)


def try_refit(effort: Effort, directory: Path) -> Trial:
    """Two rows a change of layout: refit, and ours; the median of the calls, the first left
    out. Raises LiverError, DeadlineError."""
    config = prepared(effort, directory)
    with tempfile.TemporaryDirectory(dir=directory) as name:
        own, repeats = Path(name), max(effort.repeats, 5)
        (own / "run.yaml").write_text(dump_run(config), encoding="utf-8")
        recipe = load_run_recipe(config, own)
        parameters = state_bytes(recipe) // BYTES_PER_PARAMETER * BYTES_OF_VALUE
        with Pool(DP.workers, partial(_open, own), "spawn") as pool:
            changes = ((DP, TP), (TP, DP))
            found, _ = pool.call("refit", effort.event_s, "measure", changes, repeats)
    rows = []
    for one in found:
        for way in ("refit", "ours"):
            wrong = one[f"{way}_wrong"]
            if way == "ours" and wrong:
                raise LiverError("the transfer did not bring all parameters")
            median_s, first_s = one[f"{way}_s"], one[f"{way}_first_s"]
            rows.append(
                Row(
                    system=REFIT,
                    event=way,
                    workers=one["layouts"],
                    state_bytes=parameters,
                    swap_s=median_s,
                    detail=f"parameters only, {parameters / median_s / 1e6:.4g} MB/s, "
                    f"first call {first_s:.3g} s" + (f"; arrives wrong: {wrong}" if wrong else ""),
                )
            )
    return Trial(rows)
