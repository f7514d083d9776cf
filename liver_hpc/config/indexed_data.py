"""Megatron's indexed token data: the index of a `.bin/.idx` pair, written, and held against both.

The `.idx` of megatron/core/datasets/indexed_dataset.py, little-endian: magic, version, type code,
number of sequences and of document ends; then the lengths, the byte offsets and the document ends.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from liver_hpc.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PARTS = ("train", "valid", "test")
"""What data is shared among, under Megatron's names."""

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_TYPES = ("uint8", "int8", "int16", "int32", "int64", "float64", "float32", "uint16")
"""Of tokens, in the order of their codes, from 1."""
_UINT16 = 8
_MANY = 1 << 20
"""Sequences, which mostly are enough for a sample: an index may have a thousand times as many."""


@dataclass(frozen=True)
class IndexedData:
    prefix: Path
    token_type: str
    sequences: int
    documents: int
    tokens: int


def read_indexed_data(prefix: Path) -> IndexedData:
    """Checks `<prefix>.idx` and `<prefix>.bin`; raises ConfigError when one is missing, is of
    another kind, or is shorter than the index says."""
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        index_bytes, held_bytes = _file_bytes(index), _file_bytes(tokens)
        with index.open("rb") as stream:
            sequences, documents, name = _unpack_header(index, stream.read(_HEADER.size))
        wanted_index = _HEADER.size + sequences * 12 + documents * 8
        if index_bytes < wanted_index:
            raise ConfigError(
                f"{index} is truncated: {sequences} sequences and {documents} document ends "
                f"want {wanted_index} bytes, the file has {index_bytes}"
            )
        lengths_end = _HEADER.size + sequences * 4
        last_length = int(np.fromfile(index, "<i4", 1, offset=lengths_end - 4)[0])
        last_offset = int(np.fromfile(index, "<i8", 1, offset=lengths_end + sequences * 8 - 8)[0])
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}") from None
    token_bytes = np.dtype(name).itemsize
    # Sequences lie one behind the other, so the end of the last one is the end of the data.
    wanted_bytes = last_offset + last_length * token_bytes
    if last_offset < 0 or last_length < 0 or wanted_bytes % token_bytes:
        raise ConfigError(f"{index} is damaged: its last sequence ends at byte {wanted_bytes}")
    if held_bytes < wanted_bytes:
        raise ConfigError(
            f"{tokens} is truncated: {index.name} wants {wanted_bytes} bytes "
            f"({wanted_bytes // token_bytes} tokens of {name}), the file has {held_bytes}"
        )
    ends = max(documents - 1, 0)
    return IndexedData(prefix, name, sequences, ends, wanted_bytes // token_bytes)


def sequence_lengths(prefix: Path) -> NDArray[np.int32]:
    """Of the sequences of `<prefix>`, in tokens; on disk until they are looked at.

    Raises ConfigError as `read_indexed_data`.
    """
    sequences = read_indexed_data(prefix).sequences
    return np.memmap(f"{prefix}.idx", "<i4", "r", _HEADER.size, (sequences,))


def share_of(sequences: int, shares: Sequence[float], part: str) -> tuple[int, int]:
    """First and end of the sequences that one of `PARTS` has, by the arithmetic of Megatron's
    builder. shares: of each of the parts."""
    bounds = [0.0, *accumulate((np.array(shares) / np.sum(shares)).tolist())]
    at = PARTS.index(part)
    first, end = (round(bound * float(sequences)) for bound in bounds[at : at + 2])
    return first, end


def checked_share(
    name: object, lengths: NDArray[Any], split: str, part: str, seq_length: int
) -> tuple[int, int]:
    """First and end of the sequences in a part's share.

    lengths: of all sequences, in tokens; split: shares of `PARTS`, of which `part` is one. Raises
    ConfigError, with `name` for the data, where the share has no sample of seq_length tokens.
    """
    shares = [*map(float, split.split(",")), 0.0, 0.0][: len(PARTS)]
    first, end = share_of(len(lengths), shares, part)
    share = lengths[first:end]
    tokens = int(share[:_MANY].sum())
    if tokens <= seq_length:
        tokens = int(share.sum())
    if tokens <= seq_length:
        of = f" for {part}, by the split {split}" if len(share) < len(lengths) else ""
        raise ConfigError(
            f"{name} has {tokens} tokens{of}; "
            f"a sample of {seq_length} wants one more than that many"
        )
    return first, end


def write_index(path: Path, lengths: Sequence[int]) -> None:
    """Writes the `.idx` of documents of `lengths` uint16 tokens, one behind the other, each of them
    one sequence."""
    count = len(lengths)
    offsets_bytes = accumulate((2 * length for length in lengths[:-1]), initial=0)
    path.write_bytes(
        _HEADER.pack(_MAGIC, _VERSION, _UINT16, count, count + 1)
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *offsets_bytes)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )


def _file_bytes(path: Path) -> int:
    if not path.is_file():
        raise ConfigError(f"{path} is missing; wanted {path.stem}.bin and .idx")
    return path.stat().st_size


def _unpack_header(path: Path, header: bytes) -> tuple[int, int, str]:
    """Numbers of sequences and of document ends, and the tokens' type; raises ConfigError."""
    if header[: len(_MAGIC)] != _MAGIC:
        raise ConfigError(f"{path} is not an index of Megatron's IndexedDataset (wrong magic)")
    if len(header) < _HEADER.size:
        raise ConfigError(
            f"{path} is truncated: the header wants {_HEADER.size} bytes, it has {len(header)}"
        )
    _, version, code, sequences, documents = _HEADER.unpack(header)
    if version != _VERSION:
        raise ConfigError(f"{path} has version {version}, wanted {_VERSION}")
    if not 1 <= code <= len(_TYPES):
        raise ConfigError(f"{path} has the unknown token type {code}, wanted 1 to {len(_TYPES)}")
    if sequences == 0:
        raise ConfigError(f"{path} holds no sequences")
    return sequences, documents, _TYPES[code - 1]
