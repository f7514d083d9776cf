"""Sections of what several benchmarks train: models of 25M and 100M parameters, text that all see
alike, layouts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

from liver_hpc.layout.coordinates import Layout

MODEL_25M: Mapping[str, Any] = MappingProxyType(
    {
        "layers": 8,
        "hidden": 512,
        "ffn_hidden": 1536,
        "heads": 8,
        "query_groups": 4,
        "seq_length": 32,
    }
)

MODEL_100M: Mapping[str, Any] = MappingProxyType(
    {**MODEL_25M, "hidden": 1024, "ffn_hidden": 3200, "heads": 16}
)


def text_data(directory: Path | None = None) -> dict[str, Any]:
    """A run's `data` section: a megabyte of text, tokenized under `directory` where it is given."""
    section: dict[str, Any] = {"text": "python-stdlib", "max_text_bytes": 1 << 20}
    return section if directory is None else section | {"directory": str(directory)}


def layout_table(layouts: Iterable[Layout]) -> dict[int, list[dict[str, Any]]]:
    """A run's `layouts` section that allows these, in their order."""
    table = defaultdict[int, list[dict[str, Any]]](list)
    for layout in dict.fromkeys(layouts):
        table[layout.workers].append(asdict(layout))
    return dict(table)
