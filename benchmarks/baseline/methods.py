"""The ways to save and load, by name. Imports neither torch nor megatron."""

from __future__ import annotations

from enum import StrEnum


class Method(StrEnum):
    """How a restart keeps the state.

    MEGATRON: megatron-core's dist_checkpointing, saved in parallel by all replicas.
    MEGATRON_WARM: the same; the processes of the next layout have been there before the stop, with
    everything imported and the device open, as those of a warm pool.
    MEGATRON_ASYNC: the same, written by forked processes while the source trains on; those steps
    are lost. DCP: torch.distributed.checkpoint. LIVER: the runtime's own checkpoint.
    """

    MEGATRON = "dist_checkpointing"
    MEGATRON_WARM = "dist_checkpointing warm"
    MEGATRON_ASYNC = "dist_checkpointing async"
    DCP = "torch dcp"
    LIVER = "liver checkpoint"
