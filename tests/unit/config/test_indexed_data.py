from __future__ import annotations

import struct
from pathlib import Path

import pytest

from liver_hpc.config.indexed_data import read_indexed_data, sequence_lengths
from liver_hpc.errors import ConfigError

UINT16 = 8
HEADER_BYTES = 9 + 8 + 1 + 8 + 8


def write_pair(prefix: Path, lengths: list[int], code: int = UINT16, token_bytes: int = 2) -> None:
    """What Megatron's IndexedDatasetBuilder writes for one sequence a document."""
    offsets = [token_bytes * sum(lengths[:i]) for i in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *offsets)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(bytes(token_bytes * sum(lengths)))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    prefix = tmp_path / "corpus.v1"
    write_pair(prefix, [5, 0, 7])
    return prefix


def said_of(prefix: Path) -> str:
    with pytest.raises(ConfigError) as raised:
        read_indexed_data(prefix)
    return str(raised.value)


def patch(path: Path, offset: int, data: bytes) -> None:
    held = bytearray(path.read_bytes())
    held[offset : offset + len(data)] = data
    path.write_bytes(held)


def test_whole_pair(prefix: Path) -> None:
    found = read_indexed_data(prefix)
    assert found.token_type == "uint16"
    assert (found.sequences, found.documents, found.tokens) == (3, 3, 12)
    assert sequence_lengths(prefix).tolist() == [5, 0, 7]


def test_longer_data_than_the_index_names_is_fine(prefix: Path) -> None:
    with Path(f"{prefix}.bin").open("ab") as stream:
        stream.write(b"more")
    assert read_indexed_data(prefix).tokens == 12


@pytest.mark.parametrize("ending", [".bin", ".idx"])
def test_missing_half_is_named(prefix: Path, ending: str) -> None:
    Path(f"{prefix}{ending}").unlink()
    assert said_of(prefix) == f"{prefix}{ending} is missing; wanted corpus.v1.bin and .idx"


def test_names_that_no_file_has(tmp_path: Path) -> None:
    assert said_of(tmp_path / ("n" * 300)).endswith(".idx cannot be read: File name too long")
    assert said_of(Path(".")).startswith("..idx is missing")


def test_truncated_tokens(prefix: Path) -> None:
    Path(f"{prefix}.bin").write_bytes(bytes(23))
    assert said_of(prefix) == (
        f"{prefix}.bin is truncated: corpus.v1.idx wants 24 bytes (12 tokens of uint16), "
        "the file has 23"
    )


@pytest.mark.parametrize("kept_bytes", [HEADER_BYTES, HEADER_BYTES + 40, -1])
def test_truncated_index(prefix: Path, kept_bytes: int) -> None:
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:kept_bytes])
    assert "corpus.v1.idx is truncated: 3 sequences and 4 document ends want 102" in said_of(prefix)


def test_truncated_header(prefix: Path) -> None:
    path = Path(f"{prefix}.idx")
    path.write_bytes(path.read_bytes()[:20])
    assert "truncated: the header wants 34 bytes, it has 20" in said_of(prefix)


@pytest.mark.parametrize(
    ("offset", "data", "said"),
    [
        (0, b"PK", "is not an index of Megatron's IndexedDataset"),
        (9, b"\x02", "has version 2, wanted 1"),
        (17, b"\x09", "has the unknown token type 9"),
        (18, bytes(8), "holds no sequences"),
        (18, b"\xff" * 8, "is truncated"),
        (HEADER_BYTES + 8, b"\xff\xff\xff\xff", "is damaged"),
        (HEADER_BYTES + 12 + 16, b"\xff" * 8, "is damaged"),
    ],
)
def test_damaged_index(prefix: Path, offset: int, data: bytes, said: str) -> None:
    patch(Path(f"{prefix}.idx"), offset, data)
    assert said in said_of(prefix)


def test_empty_index(prefix: Path) -> None:
    Path(f"{prefix}.idx").write_bytes(b"")
    assert "is not an index" in said_of(prefix)
