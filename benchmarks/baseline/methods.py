"""The ways to restart, by name. Imports neither torch nor megatron."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How a restart comes to its next processes; the state is kept in both cases by megatron-core's
    dist_checkpointing, saved in parallel by all replicas.

    MEGATRON: they are started after the stop. MEGATRON_WARM: they have been there before it, with
    everything imported and the device open, as those of a warm pool.
    """

    MEGATRON = "dist_checkpointing"
    MEGATRON_WARM = "dist_checkpointing warm"
