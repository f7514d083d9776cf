"""A run's records as an HDF5 file."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import ConfigError
from liver_hpc.report.hdf5 import read_hdf5, write_hdf5
from liver_hpc.run.records import TABLES, RunRecords
from tests.unit.report.rows import reconfiguration, step
from tests.unit.report.run_of_everything import everything

CELLS: dict[type, st.SearchStrategy[Any]] = {
    float: st.floats(),
    int: st.integers(-(2**63), 2**63 - 1),
    bool: st.booleans(),
    str: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
}


@st.composite
def rows(draw: st.DrawFn) -> dict[str, list[Any]]:
    name = draw(st.sampled_from(sorted(TABLES)))
    kind, hints = TABLES[name], get_type_hints(TABLES[name])
    row = st.tuples(*(CELLS[hints[f.name]] for f in fields(kind))).map(lambda cells: kind(*cells))
    return {name: draw(st.lists(row, max_size=3))}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.h5"


@given(rows())
def test_records_come_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, found: dict[str, list[Any]]
) -> None:
    path = tmp_path_factory.mktemp("file") / "metrics.h5"
    empty: dict[str, list[Any]] = {name: [] for name in TABLES}
    records = RunRecords(**{**empty, **found}, attributes={"host": "here"})
    write_hdf5(path, records)
    assert repr(read_hdf5(path)) == repr(records)  # NaN is not equal to itself


def test_a_whole_run_comes_back_in_the_place_of_an_older_file(path: Path) -> None:
    path.write_bytes(b"older")
    write_hdf5(path, everything())
    assert repr(read_hdf5(path)) == repr(everything())
    assert list(path.parent.iterdir()) == [path]


def test_attributes_of_any_length_come_back(path: Path) -> None:
    attributes = {"config": "x: 12  # \u00fc\n" * 4000, "more": "x" * 300_000, "empty": ""}
    write_hdf5(path, RunRecords([], [], [], {**attributes, "zero": "a\0b", "odd": "\udcff"}))
    wanted = attributes | {"zero": "a\N{REPLACEMENT CHARACTER}b", "odd": "?"}
    assert read_hdf5(path).attributes == wanted


def test_any_tool_opens_the_file(path: Path) -> None:
    write_hdf5(path, RunRecords([step(3, phase="first")], [reconfiguration()], [], {}))
    with h5py.File(path, "r+") as file:
        assert file["steps"]["step"].tolist() == [3]
        assert file["steps"]["phase"].tolist() == [b"first"]
        assert file["reconfigurations"]["digest_equal"].tolist() == [True]
        assert h5py.check_string_dtype(file["steps"].dtype["phase"]).encoding == "utf-8"
        assert set(file) == set(TABLES)


def test_a_place_that_cannot_be_written_to_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_hdf5(tmp_path / "gone" / "metrics.h5", everything())
    assert list(tmp_path.iterdir()) == []


# ---- files that cannot be read


def test_a_missing_file_is_told(path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.h5: there is no such file; nothing was rec"):
        read_hdf5(path)


@pytest.mark.parametrize("content", [b"", b"steps: 12\n" * 500])
def test_a_file_of_another_kind_is_told(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"metrics\.h5 is no .*it is not HDF5"):
        read_hdf5(path)


def test_a_directory_is_told(path: Path) -> None:
    path.mkdir()
    with pytest.raises(ConfigError, match="Is a directory"):
        read_hdf5(path)


def test_an_hdf5_file_of_something_else_is_told(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["weights"] = np.zeros(3)
    with pytest.raises(ConfigError, match="no table /steps"):
        read_hdf5(path)


def test_a_file_of_another_version_is_told(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file.create_dataset("steps", shape=(0,), dtype=[("step", "i8"), ("loss", "f8")])
    with pytest.raises(ConfigError, match=r"/steps lacks \['ended_s', .*another version"):
        read_hdf5(path)


def test_a_truncated_file_is_told_wherever_it_was_cut(path: Path) -> None:
    write_hdf5(path, RunRecords([step(n) for n in range(1000)], [reconfiguration()], [], {}))
    whole = path.read_bytes()
    for size in {*range(1, 60), *range(60, len(whole), 997), len(whole) - 1}:
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"metrics\.h5 is (truncated|no metrics file)"):
            read_hdf5(path)
