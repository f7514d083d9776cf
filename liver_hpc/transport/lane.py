"""Lanes: queues of work on a device, apart from the one that training fills.

On CUDA a lane is a stream: what is launched on it runs in order, some time after the call has
returned. Two rules keep workers from waiting for each other for ever, whatever order their devices
come to things in. Training's lane never waits for another one: the host looks whether that one is
done, again and again, with a deadline. And whatever waits for peers on the device has a lane of its
own, so that two workers that launch it and training's collectives in different orders both go on.

The second rule holds as long as the device has hardware queues enough: with
CUDA_DEVICE_MAX_CONNECTIONS=1 all lanes share one, and the deadline is what ends such a wait.
Workers ask for 32 (`world/device.py`): by default it has 8, fewer than a handoff has streams.

On the CPU everything has been done when the call returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from liver_hpc.clock import Deadline, poll_until
from liver_hpc.errors import DeadlineError
from liver_hpc.transport.streams import lane_streams

_POLL_S = 0.0002


class Lane(ABC):
    """One queue. late: whether work may still have to be done when the call that launched it has
    returned."""

    late: bool = True

    @abstractmethod
    def entered(self) -> AbstractContextManager[None]:
        """What the calling thread launches inside goes to this lane."""

    @abstractmethod
    def follow(self) -> None:
        """Lets this lane wait for all that the calling thread's own lane holds by now."""

    @abstractmethod
    def mark(self) -> Callable[[], bool]:
        """Asks whether all that this lane holds by now has been done. The answer raises
        RuntimeError where it failed."""

    def finish(self, deadline: Deadline, check: Callable[[], None] = lambda: None) -> None:
        """Waits, on the host, until all that this lane holds by now has been done.

        check: called while waiting; it may raise. Raises DeadlineError; RuntimeError where the
        work failed.
        """
        done = self.mark()

        def checked() -> bool:
            check()
            return done()

        try:
            poll_until(checked, deadline, _POLL_S)
        except DeadlineError as error:
            raise DeadlineError(f"{error}: the device has not come to its end") from None


class InlineLane(Lane):
    """The CPU's: a call returns when its work is done."""

    late = False

    def entered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def follow(self) -> None:
        """All has been done."""

    def mark(self) -> Callable[[], bool]:
        return lambda: True


class CudaLane(Lane):
    """A CUDA stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        """stream: None for one of its own, of the lowest priority, which is that of torch's default
        stream."""
        self._device = device
        self._stream = lane_streams(device).take(self) if stream is None else stream

    def entered(self) -> AbstractContextManager[None]:
        return torch.cuda.stream(self._stream)

    def follow(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> Callable[[], bool]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event.query


def new_lane(device: torch.device) -> Lane:
    """A lane of its own on a device."""
    return CudaLane(device) if device.type == "cuda" else InlineLane()


def own_lane(device: torch.device) -> Lane:
    """The lane that the calling thread's work goes to: in a training thread, training's."""
    if device.type != "cuda":
        return InlineLane()
    return CudaLane(device, torch.cuda.current_stream(device))
