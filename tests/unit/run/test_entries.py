"""A journal's lines: as they are written, as they are read, and what is said of damage."""

from __future__ import annotations

import errno
import json
import logging
import math
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from liver_hpc.errors import ConfigError
from liver_hpc.run import entries
from liver_hpc.run.entries import (
    COORDINATOR_STARTED,
    Entry,
    JournalReader,
    JournalUnread,
    decode,
    encode,
    last_end,
    last_start,
    last_step,
    read_entries,
)

NAMES = st.text(st.characters(codec="utf-8"), max_size=5)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
DOCUMENTS = st.dictionaries(NAMES, VALUES, max_size=3).map(lambda found: {**found, "type": "any"})


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"".join(lines))
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.jsonl"


def test_an_entry_is_a_line_of_plain_json_with_the_checksum_of_what_stands_before_it() -> None:
    line = encode(17, 1763.125, {"type": "begun"}, [{"type": "told"}])
    body = b'{"n":17,"t":1763.125,"event":{"type":"begun"},"actions":[{"type":"told"}]'
    assert line == body + f',"crc":"{zlib.crc32(body):08x}"}}\n'.encode()
    assert "actions" not in json.loads(encode(0, 1.0, {"type": "begun"}))


@given(st.integers(0, 2**40), st.floats(0, 2e9), DOCUMENTS, st.lists(DOCUMENTS, max_size=3))
def test_an_entry_comes_back_as_it_was(
    number: int, at_s: float, event: dict[str, Any], actions: list[dict[str, Any]]
) -> None:
    line = encode(number, at_s, event, actions)
    assert line.count(b"\n") == 1
    assert [*decode([line], "here")] == [Entry(number, at_s, event, actions)]


def test_a_number_that_is_not_finite_is_a_word() -> None:
    event = {"type": "step_done", "loss": math.nan, "more": [math.inf, {"less": -math.inf}]}
    (entry,) = decode([encode(0, 0.0, event)], "here")
    assert entry.event["loss"] == "NaN"
    assert entry.event["more"] == ["Infinity", {"less": "-Infinity"}]
    assert math.isnan(float(entry.event["loss"]))


def test_a_journal_cut_anywhere_opens(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = [encode(n, 1000.0 + n, {"type": "any", "name": "\u00fc"}) for n in range(6)]
    whole = b"".join(lines)
    ends = [sum(map(len, lines[:count])) for count in range(len(lines) + 1)]
    for size in range(len(whole) + 1):
        caplog.clear()
        write(path, whole[:size])
        numbers = [entry.number for entry in read_entries(path)]
        assert numbers == [*range(sum(end <= size for end in ends[1:]))]
        assert ("not written to its end" in caplog.text) == (size not in ends)
        assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize("place", ["first", "middle", "last", "checksum"])
def test_a_changed_byte_is_told_with_its_line_and_both_checksums(path: Path, place: str) -> None:
    lines = [bytearray(encode(n, 1.0, {"type": "any"})) for n in range(5)]
    number = {"first": 0, "middle": 2, "last": 4, "checksum": 2}[place]
    wanted = lines[number][-19:].decode().strip()
    if place == "checksum":
        lines[number][-5:-3] = b"zz"
    else:
        lines[number][7] ^= 1
    write(path, *map(bytes, lines))
    told = rf"journal\.jsonl, line {number + 1} is damaged: wanted it to end in ,.crc.*, got ,.crc"
    with pytest.raises(ConfigError, match=told) as raised:
        list(read_entries(path))
    assert wanted in str(raised.value)


def test_a_damaged_line_far_behind_is_told_with_its_number(path: Path) -> None:
    lines = [encode(n, 1.0, {"type": "any"}) for n in range(30_000)]
    lines[29_000] = lines[29_000].replace(b"any", b"ant")
    write(path, *lines)
    with pytest.raises(ConfigError, match="line 29001 is damaged"):
        list(read_entries(path))


@pytest.mark.parametrize("read_bytes", [60, 61, 97, 2**20])
def test_the_last_start_is_read_alone_and_only_while_it_goes_on(
    path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    """However many bytes are read at a time."""
    monkeypatch.setattr(entries, "_LOOK_BYTES", read_bytes)
    begun: dict[str, Any] = {"type": COORDINATOR_STARTED}
    said = {"type": "note", "text": '"event":{"type":"coordinator_started" {"type":"end"'}
    end = [{"type": "end", "state": "restart"}]
    lines = [
        encode(n, 1.0, event, actions)
        for n, (event, actions) in enumerate(
            [(begun, []), (said, []), (said, end), (begun, []), (said, [said]), (said, [])]
        )
    ]
    write(path)
    assert [*last_start(path)] == []
    for count, wanted in [(1, [0]), (2, [0, 1]), (3, []), (4, [3]), (6, [3, 4, 5])]:
        write(path, *lines[:count])
        assert [entry.number for entry in last_start(path)] == wanted
        assert last_end(path) == (end[0] if count == 3 else None)
    write(path, *lines[:2], lines[2][:-1])  # whose end was not written to its own
    assert [entry.number for entry in last_start(path)] == [0, 1]
    assert last_end(path) is None
    write(path, *lines[:4], lines[5])
    with pytest.raises(ConfigError, match="wanted entry 4 next, got 5"):
        list(last_start(path))


def test_lines_that_are_missing_or_there_twice_are_told(path: Path) -> None:
    lines = [encode(n, 1.0, {"type": "any"}) for n in range(4)]
    write(path, lines[0], lines[2], lines[3])
    with pytest.raises(ConfigError, match="wanted entry 1 next, got 2"):
        list(read_entries(path))
    write(path, lines[0], lines[1], lines[1])
    with pytest.raises(ConfigError, match="wanted entry 2 next, got 1"):
        list(read_entries(path))


def test_a_file_of_zeros_or_of_another_kind_is_told(path: Path) -> None:
    for content in (b"\0" * 100 + b"\n", b"text\n", b"\n", b"{}\n", b"\xff" * 30 + b"\n"):
        with pytest.raises(ConfigError, match="line 1 is damaged"):
            list(read_entries(write(path, content)))


def test_a_missing_file_is_told(path: Path) -> None:
    """It is not damaged."""
    with pytest.raises(JournalUnread, match=r"journal\.jsonl cannot be read: No such file"):
        list(read_entries(path))
    with pytest.raises(JournalUnread, match=r"journal\.jsonl cannot be read: No such file"):
        last_end(path)


def test_a_journal_whose_bytes_are_not_given_is_told(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file system: with mmap that would kill the process."""
    write(path, encode(0, 1.0, {"type": COORDINATOR_STARTED}))

    class Away(FileIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "open", lambda *_: Away(str(path)))
    with pytest.raises(JournalUnread, match=r"journal\.jsonl cannot be read: Input/output error"):
        last_end(path)


# ---- a journal that grows


def test_a_journal_is_followed_for_as_long_as_somebody_waits(path: Path) -> None:
    """Over a line that is not whole when it is read first."""
    lines = [encode(n, 1.0, {"type": "any"}) for n in range(4)]
    write(path, lines[0], lines[1][:10])
    more = iter([b"", lines[1][10:] + lines[2][:5], lines[2][5:] + lines[3]])

    def wait() -> bool:
        with path.open("ab") as file:
            data = next(more, None)
            file.write(data or b"")
        return data is not None

    assert [entry.number for entry in read_entries(path, wait)] == [0, 1, 2, 3]


def test_a_journal_that_is_begun_anew_is_read_from_its_beginning(path: Path) -> None:
    old, new = ([encode(n, at_s + n, {"type": "any"}) for n in range(3)] for at_s in (1.0, 50.0))
    reader = JournalReader(write(path, *old))
    assert len(reader.more()) == 3
    write(path, new[0])
    assert [entry.at_s for entry in reader.more()] == [50.0]
    write(path.with_suffix(".new"), *old, encode(3, 4.0, {"type": "any"})).rename(path)
    assert [entry.number for entry in reader.more()] == [0, 1, 2, 3]


def test_a_copy_in_the_place_of_a_journal_is_read_on(path: Path) -> None:
    lines = [encode(n, 1.0 + n, {"type": "any"}) for n in range(4)]
    reader = JournalReader(write(path, *lines[:2], lines[2][:9]))
    assert [entry.number for entry in reader.more()] == [0, 1]
    write(path.with_suffix(".new"), *lines).rename(path)
    assert [entry.number for entry in reader.more()] == [2, 3]


def test_a_torn_line_is_left_out_once_nobody_waits(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, encode(0, 1.0, {"type": "any"}), b"half")
    assert [entry.number for entry in read_entries(path, lambda: False)] == [0]
    assert caplog.text.count("was not written to its end; its 4 bytes are left out") == 1


@pytest.mark.parametrize("behind", [b"", b'{"n":9', encode(2, 1.0, {"type": "any"})])
def test_the_newest_step_is_found_behind_others(path: Path, behind: bytes) -> None:
    steps = [encode(n, float(n), {"type": "step_done", "step": n + 5}) for n in range(2)]
    found = last_step(write(path, *steps, behind))
    assert found is not None
    assert (found.number, found.event["step"]) == (1, 6)


def test_the_newest_step_is_found_however_far_it_is(path: Path) -> None:
    far = encode(0, 1.0, {"type": "step_done", "step": 5})
    found = last_step(write(path, far, b"x" * 2**18 + b"\n"))
    assert found is not None
    assert found.event["step"] == 5


def test_where_there_is_no_step_or_it_is_damaged_there_is_none(path: Path) -> None:
    assert last_step(path) is None
    assert last_step(write(path)) is None
    assert last_step(write(path, encode(0, 1.0, {"type": "any"}))) is None
    damaged = encode(0, 1.0, {"type": "step_done", "step": 5}).replace(b"5", b"6", 1)
    assert last_step(write(path, damaged)) is None
