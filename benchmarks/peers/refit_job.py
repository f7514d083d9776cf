"""Megatron's refit and our TRANSFER of the same parameters, in the same two processes."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.jobs import PeerJob, free_port
from benchmarks.peers.trial import BYTES_PER_PARAMETER, Effort, Row, Trial, prepared, state_bytes
from liver_hpc.config.load import dump_run
from liver_hpc.errors import LiverError
from liver_hpc.recipes.specs import load_run_recipe

REFIT = "refit"
FOUND = "refit.json"
WORKERS = 2
BYTES_OF_VALUE = 4


class RefitJob(PeerJob):
    """Two processes that hold both worlds; nothing is trained."""

    events = ()
    first_workers = WORKERS

    def __init__(self, directory: Path, limit_s: float, repeats: int) -> None:
        super().__init__(directory, limit_s)
        self._repeats = repeats

    def begin(self) -> None:
        self._port = free_port()
        for _ in range(WORKERS):
            self.add()

    def add(self) -> None:
        words = [str(len(self._members)), str(self._port), str(self._repeats), str(self.directory)]
        self._spawn([sys.executable, "-m", "benchmarks.peers.refit_worker", *words])

    def found(self) -> list[dict[str, float | str]]:
        """What the first process writes at the end. Raises DeadlineError, LiverError."""
        path = self.directory / FOUND
        self._until(path.exists, "the refit's figures")
        found: list[dict[str, float | str]] = json.loads(path.read_text(encoding="utf-8"))
        return found


def try_refit(effort: Effort, directory: Path) -> Trial:
    """Two rows a change of layout: refit, and ours; the median of the calls, the first left
    out."""
    config = prepared(effort, directory)
    with tempfile.TemporaryDirectory(dir=directory) as own:
        (Path(own) / "run.yaml").write_text(dump_run(config), encoding="utf-8")
        recipe = load_run_recipe(config, Path(own))
        parameters = state_bytes(recipe) // BYTES_PER_PARAMETER * BYTES_OF_VALUE
        job = RefitJob(Path(own), effort.event_s, max(effort.repeats, 5))
        with job:
            job.begin()
            found = job.found()
    rows = []
    for one in found:
        for way in ("refit", "ours"):
            wrong = one[f"{way}_wrong"]
            if way == "ours" and wrong:
                raise LiverError("the transfer did not bring all parameters")
            median_s, first_s = float(one[f"{way}_s"]), float(one[f"{way}_first_s"])
            rows.append(
                Row(
                    system=REFIT,
                    event=way,
                    workers=str(one["layouts"]),
                    state_bytes=parameters,
                    swap_s=median_s,
                    detail=f"parameters only, {parameters / median_s / 1e6:.4g} MB/s, "
                    f"first call {first_s:.3g} s" + (f"; arrives wrong: {wrong}" if wrong else ""),
                )
            )
    return Trial(rows)
