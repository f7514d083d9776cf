"""What a restart job leaves, also when a restart fails."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from benchmarks.baseline.job import RestartJob
from benchmarks.baseline.lines import Line, Ready, Save, Stepped, Written
from benchmarks.baseline.methods import Method
from benchmarks.baseline.workers import Start
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.store import read_run
from liver_hpc.run.directory import create_run_directory
from tests.integration.runs import ENDLESS, run_config

LAYOUT = Layout.parse("dp2")


class Scripted:
    """Workers of which those of the second generation fail once they have written."""

    def __init__(self, start: Start, _heard: object) -> None:
        self.start = start

    def meet(self, _limit_s: float) -> None: ...

    def join(self, _limit_s: float) -> None: ...

    def kill(self) -> None: ...

    def ready(self, _limit_s: float) -> list[Ready]:
        return [Ready(built_s=3.0, loaded_s=4.0, step=1, digests=())]

    def steps(self, count: int, _limit_s: float) -> list[Stepped]:
        values = {"loss": 1.0, "grad_norm": 1.0, "learning_rate": 1.0, "tokens": 1}
        return [Stepped(step=0, started_s=4.0, ended_s=5.0, **values)] * count

    def tell(self, line: Line) -> None:
        assert isinstance(line, Save)
        Path(line.directory, "data.distcp").write_bytes(b"state")

    def written(self, _limit_s: float) -> list[Written]:
        if self.start.generation == 1:
            raise LiverError("no memory")
        return [Written(step=1, boundary_s=1.0, saved_s=2.0, digests=())]

    def entered_s(self, _limit_s: float) -> float:
        return 2.0

    imported_s = entered_s


def test_a_job_that_fails_leaves_no_checkpoint_and_what_it_had_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.baseline.job.Workers", Scripted)
    monkeypatch.setattr("benchmarks.baseline.job.load_run_recipe", lambda *_: None)
    run = create_run_directory(run_config(tmp_path, ENDLESS))

    def restarts() -> None:
        with RestartJob(run.path) as job:
            job.begin(LAYOUT)
            job.restart(LAYOUT, Method.MEGATRON)
            assert len(read_run(run.path).baselines) == 2, "also if it is killed from here on"
            job.restart(LAYOUT, Method.MEGATRON)

    with pytest.raises(LiverError, match="no memory"):
        restarts()
    assert not (run.path / "restarts").exists()
    records = read_run(run.path)
    assert [each.method for each in records.baselines] == [
        "dist_checkpointing",
        "dist_checkpointing, exists",
    ]
    assert records.attributes["host"] == socket.gethostname()
    assert {"torch", "python", "config", "boot"} <= records.attributes.keys()
