"""Live against restart: which measurements are put together."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from liver_hpc.errors import ConfigError
from liver_hpc.report.compare import of_benchmark, of_run, speedup
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import baseline


def test_restarts_of_a_job_are_put_together_by_method() -> None:
    baselines = [baseline(), baseline(lost_s=10.0), baseline(method="old", lost_s=math.nan)]
    ((change, methods),) = of_run(RunRecords([], [], baselines, {})).items()
    assert change == "dp2 \u2192 tp2 dp2"
    assert list(methods.items()) == [
        ("dist_checkpointing", [9.0, 10.0]),
        ("old", [10.0]),  # of a file that knows the total only
    ]


def test_a_benchmark_s_samples_are_grouped_by_what_was_changed(tmp_path: Path) -> None:
    rows = [
        {"size": "25m", "transition": "grow", "method": method, "lost_s": lost_s, "slowdown_s": 0.1}
        for method, lost_s in (("megatron", 7.9), ("live", 0.1), ("live", 0.3), ("gone", None))
    ]
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"rows": [{"method": "live", "lost_s": 99}], "samples": rows}))
    ((change, methods),) = of_benchmark(path).items()
    assert change == "25m, grow"
    assert list(methods.items()) == [("live", [0.2, 0.4]), ("megatron", [8.0])]
    assert speedup(methods) == pytest.approx(8.0 / 0.3)


def test_variants_of_a_sweep_are_not_put_together(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows = [
        {"size": "25m", "variant": variant, "method": "live", "lost_s": lost_s}
        for variant, lost_s in (("100 Mbit/s", 2.0), ("", 0.1))
    ]
    path.write_text(json.dumps({"rows": rows}))
    assert of_benchmark(path) == {"25m, 100 Mbit/s": {"live": [2.0]}, "25m": {"live": [0.1]}}


def test_a_live_handoff_whose_slower_steps_are_not_known_has_no_cost(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows = [{"method": "live", "lost_s": 0.1, "slowdown_s": slower_s} for slower_s in (None, 0.5)]
    path.write_text(json.dumps({"rows": rows}))
    assert of_benchmark(path) == {"": {"live": [0.6]}}


@pytest.mark.parametrize("text", ["", "[]", '{"rows": 1}', '{"rows": [1]}', '{"rows": []}', "{}"])
def test_any_other_file_is_told_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"r\.json"):
        of_benchmark(path)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        of_benchmark(tmp_path / "r.json")


def test_a_lost_time_that_is_not_finite_is_no_measurement(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rows = [{"method": "live", "lost_s": lost_s} for lost_s in (math.nan, 0.2, math.inf)]
    path.write_text(json.dumps({"rows": rows}))
    assert of_benchmark(path) == {"": {"live": [0.2]}}
