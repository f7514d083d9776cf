"""Small `.bin/.idx` pairs of random documents, for jobs that are to read data."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from liver_hpc.config.indexed_data import write_index

_LENGTHS = (20, 60)


def write_pair(prefix: Path, documents: int, vocabulary: int, seed: int) -> Path:
    """Documents of 20 to 59 tokens below `vocabulary`; returns `prefix`, as arguments want it."""
    random = np.random.default_rng(seed)
    lengths = random.integers(*_LENGTHS, documents).tolist()
    tokens = random.integers(0, vocabulary, sum(lengths)).astype("<u2")
    prefix.with_name(prefix.name + ".bin").write_bytes(tokens.tobytes())
    write_index(prefix.with_name(prefix.name + ".idx"), lengths)
    return prefix
