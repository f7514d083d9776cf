"""A sweep as a job array on a real Slurm, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from tests.cluster.harness import REPOSITORY, SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.long
def test_every_cell_is_a_task_whose_rows_make_one_result(slurm_cluster: SlurmCluster) -> None:
    sweep = yaml.safe_load((REPOSITORY / "configs/bench/local.yaml").read_text())
    directory = slurm_cluster.fresh("array")
    data = {"text": "python-stdlib", "max_text_bytes": 1 << 20, "directory": str(directory)}
    sweep["directory"] = str(directory)
    sweep["run"]["data"] = data
    sweep["transitions"] = sweep["transitions"][:1]
    sweep["slurm"] = {"partition": "stable", "cpus_per_task": 1, "timeout_min": 10}
    config, result = directory / "sweep.yaml", directory / "r.json"
    config.write_text(yaml.safe_dump(sweep))
    command = [sys.executable, "-m", "benchmarks.reconfigure", "--quick", "--cluster", "slurm"]
    slurm_cluster.run(*command, "--config", str(config), "--json", str(result), limit_s=560.0)
    found = json.loads(Path(result).read_text())
    assert found["figures"]["speedup_min"] > 1
    assert {row["method"] for row in found["rows"]} == {
        "live",
        "dist_checkpointing",
        "dist_checkpointing, exists",
    }
    assert found["repeats"] == 1
