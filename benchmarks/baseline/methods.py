"""The ways to restart, by name; how large a checkpoint is. Imports neither torch nor megatron."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path


class Method(StrEnum):
    """How a restart comes to its next processes; the state is kept in both cases by megatron-core's
    dist_checkpointing, saved in parallel by all replicas.

    MEGATRON: they are started after the stop. MEGATRON_WARM: they have been there before it, with
    everything imported and the device open, as those of a warm pool.
    """

    MEGATRON = "dist_checkpointing"
    MEGATRON_WARM = "dist_checkpointing warm"


def num_bytes(directory: Path) -> int:
    """The length of all files under a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
