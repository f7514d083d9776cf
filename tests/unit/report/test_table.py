"""Records as rows of fixed size, and back."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.report.table import ELLIPSIS, STEPS, TABLES, TEXT_BYTES, Table, fit_text
from tests.unit.report.rows import step

INT64 = st.integers(-(2**63), 2**63 - 1)
CELLS: dict[type, st.SearchStrategy[Any]] = {
    float: st.floats(),
    int: INT64,
    bool: st.booleans(),
    str: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=4),
}


@st.composite
def record_of_a_table(draw: st.DrawFn) -> tuple[Table[Any], Any]:
    table = draw(st.sampled_from(TABLES))
    hints = get_type_hints(table.record)
    return table, table.record(*(draw(CELLS[hints[f.name]]) for f in fields(table.record)))


@given(record_of_a_table())
def test_a_record_comes_back_as_it_was(case: tuple[Table[Any], Any]) -> None:
    table, record = case
    (back,) = table.records(table.rows([record]))
    assert repr(back) == repr(record)  # NaN is not equal to itself


@given(st.text(), st.integers(3, 40))
def test_text_fits_and_is_whole_where_it_can_be(text: str, size_bytes: int) -> None:
    data = fit_text(text, size_bytes)
    assert len(data) <= size_bytes
    readable = text.replace("\0", "\N{REPLACEMENT CHARACTER}")
    if len(readable.encode("utf-8", "replace")) <= size_bytes:
        assert data == readable.encode("utf-8", "replace")
    else:
        kept = data.decode()
        assert kept.endswith(ELLIPSIS)
        assert readable.startswith(kept.removesuffix(ELLIPSIS))


def test_text_is_cut_between_characters() -> None:
    assert fit_text("aüüüü", 8) == "aüü…".encode()


def test_text_that_is_no_unicode_is_no_error() -> None:
    assert fit_text("path \udcff", 20) == b"path ?"


def test_a_wrong_type_is_told_at_once() -> None:
    with pytest.raises((TypeError, ValueError)):
        STEPS.rows([step(0, loss="much")])


def test_sizes_are_of_fields_that_exist() -> None:
    names = {f.name for table in TABLES for f in fields(table.record)}
    assert TEXT_BYTES.keys() <= names


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_an_appended_row_rewrites_little(table: Table[Any]) -> None:
    assert 1 <= table.chunk_rows <= 1024
    assert table.chunk_rows * table.dtype.itemsize <= 2**16
