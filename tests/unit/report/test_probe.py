"""Reading a damaged file ends, and names it."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import h5py
import pytest

from liver_hpc.config.schema import MetricsSection
from liver_hpc.errors import ConfigError
from liver_hpc.report.probe import probe
from liver_hpc.report.store import MetricsWriter, read_run
from tests.unit.report.rows import baseline, step


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.h5"
    with closing(MetricsWriter(path, MetricsSection(reserve_bytes=0), {})) as writer:
        writer.add_step(step(1))
        writer.add_baseline(baseline())
    return path


def test_a_whole_file_passes(path: Path) -> None:
    probe(path)


def test_a_file_with_damage_in_its_middle_is_told_in_time(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[300:600] = random.Random(1).randbytes(300)
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"metrics\.h5 is damaged"):
        probe(path, limit_s=3.0)


def test_a_missing_and_another_file_are_told_as_such(path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        probe(path.with_name("gone.h5"))
    path.write_text("text")
    with pytest.raises(ConfigError, match="is no metrics file"):
        probe(path)


def test_a_file_of_an_older_version_reads(path: Path) -> None:
    """It lacks whole tables, and columns that have a default."""
    with h5py.File(path, "r+") as file:
        for name in ("worker_phases", "traffic", "networks", "notices"):
            del file[name]
        rows = file["baselines"][:]
        del file["baselines"]
        old = [name for name in rows.dtype.names if name != "lost_s"]
        file.create_dataset("baselines", data=rows[old])
    records = read_run(path)
    assert (records.worker_phases, records.traffic, records.notices) == ([], [], [])
    assert repr(records.baselines) == repr([baseline(lost_s=float("nan"))])
