"""What moves bytes between workers: the interface that the handoff sees."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from liver_hpc.clock import Deadline
from liver_hpc.layout.tensors import Box, TransferPlan

if TYPE_CHECKING:
    import torch


class StateView(Protocol):
    """One world's state on one worker, seen through global boxes."""

    def view(self, kind: str, tensor_index: int, box: Box) -> torch.Tensor:
        """The memory of one global box, strided, [box rows, box cols]; writes go to the world.

        Raises PlanError when this worker does not hold the whole box.
        """
        ...


@dataclass(frozen=True)
class TransferStats:
    """What one stream did on this worker.

    Bytes are bytes of state, without padding. The four parts of the time do not overlap: they are
    what the streaming thread spent on copying into staging, on the wire (starting messages and
    waiting for them), on copying out of staging and on copies within the worker. On CUDA they are
    the time to queue all this; what the device then takes is in `total_s` alone.
    """

    bytes_sent: int
    bytes_received: int
    bytes_local: int
    pack_s: float
    wire_s: float
    unpack_s: float
    local_s: float
    total_s: float


class Transport(ABC):
    """Moves boxes between the workers of one handoff, within a bounded staging memory.

    All staging memory is allocated and touched by the constructor. After an error the transport
    is broken: it holds no unfinished work, refuses to stream, and wants to be closed.
    """

    @abstractmethod
    def prepare(self, plan: TransferPlan) -> None:
        """Cuts a plan into messages ahead of time, so that streaming an equal plan starts at
        once. Not collective. Raises PlanError for a plan that is not this worker's."""

    @abstractmethod
    def stream(
        self,
        plan: TransferPlan,
        source: StateView | None,
        target: StateView | None,
        progress: Callable[[int], None],
        deadline: Deadline,
    ) -> TransferStats:
        """Sends, receives and copies all moves of `plan`, in the order of its lists.

        Collective over the workers that the plan's moves name: each streams its own plan. Calls
        `progress(num_bytes)` from this thread as state arrives or is copied, never for what is
        sent: summed over all workers, every byte counts once. `source` may be None where nothing
        is sent or copied, `target` where nothing arrives.

        Raises TransferError when a peer or the backend fails, DeadlineError at the deadline (both
        name the peer), PlanError when the plan does not fit the state.
        """

    @abstractmethod
    def close(self) -> None:
        """Frees staging and lets go of the backend; idempotent, from any thread.

        Peers that still stream with this worker then fail promptly. A stream that runs in
        another thread of this process ends with an error at its next message.
        """
