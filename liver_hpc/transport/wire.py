"""The wire that messages cross, and the wires over one c10d process group: gloo between CPUs, NCCL
between CUDA devices."""

from __future__ import annotations

import contextlib
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.errors import DeadlineError, LiverError, PlanError, TransferError
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.transport import gloo_sockets, gloo_waits
from liver_hpc.transport.gloo_waits import Ended
from liver_hpc.transport.lane import Lane, new_lane

_ENDS_S = 10.0
"""How long the device may take to end what has been aborted."""
_MEETING_TAG = (1 << 31) - 1
"""Of the bytes of `Wire.meet`; no stream counts so far."""


class Parcel(NamedTuple):
    """One message: to or from `peer` (a worker id), in `memory`, [bytes] of uint8."""

    peer: int
    tag: int
    memory: torch.Tensor
    is_send: bool

    def __str__(self) -> str:
        way = "to" if self.is_send else "from"
        return f"message {self.tag} of {self.memory.numel()} bytes {way} worker {self.peer}"


class Pending(Protocol):
    """Messages that have been started."""

    def wait(self, deadline: Deadline) -> None:
        """Returns when they have crossed; on CUDA, when the current stream waits for them.

        Raises TransferError or DeadlineError, which name the peer.
        """
        ...


class Wire(ABC):
    """Takes messages from one worker to another. Messages of a pair and direction keep order.

    device: where the messages' memory lies. grouped: True where the messages of a step run and
    complete as one, so that few large steps beat many small ones. late: whether what a call has
    launched may still have to be done when it has returned.
    """

    device: torch.device
    grouped: bool = False
    late: bool = False

    @abstractmethod
    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        """Starts all messages of a step; waits for none. Raises TransferError."""

    def streaming(self, deadline: Deadline) -> AbstractContextManager[None]:
        """Encloses one stream; on leaving it, all copies have really been made."""
        return nullcontext()

    def meet(self, peers: Iterable[int], deadline: Deadline) -> None:
        """Exchanges a byte with each peer, which meets this worker: backends that connect a pair
        at its first message do so here, and not inside the pause. Collective over each pair.

        Raises TransferError or DeadlineError, which name the peers.
        """
        parcels = [
            Parcel(peer, _MEETING_TAG, torch.zeros(1, dtype=torch.uint8, device=self.device), sends)
            for peer in sorted(peers)
            for sends in (True, False)
        ]
        self.exchange(parcels, deadline)

    def exchange(self, parcels: Sequence[Parcel], deadline: Deadline) -> None:
        """Starts messages, and waits until all have crossed. Collective over each pair.

        Raises TransferError or DeadlineError, which name the peers.
        """
        if parcels:
            with self.streaming(deadline):
                for messages in self.launch(parcels):
                    messages.wait(deadline)

    def abandon(self) -> None:  # noqa: B027 - nothing to do where handles clean up behind them
        """After a failure: what is under way must touch neither staging nor a world any more."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the backend; idempotent, from any thread. What is under way fails."""


def late(deadline: Deadline, messages: str) -> DeadlineError:
    """The deadline's error, with what did not cross in time."""
    return DeadlineError(f"{deadline.error()}: not crossed: {messages}")


def group_wire(
    backend: Any, ranks: Mapping[int, int], device: torch.device, lane: Lane | None = None
) -> Wire:
    """The wire over a c10d backend, whose ranks are given by worker id. Not collective.

    lane: where copies and messages go; None: a new one.
    """
    lane = new_lane(device) if lane is None else lane
    return NcclWire(backend, ranks, device, lane) if lane.late else GlooWire(backend, ranks, device)


class GlooWire(Wire):
    """Every message is an operation of its own and completes alone.

    Holds the only reference to the group that the transport has.
    """

    def __init__(self, group: Any, ranks: Mapping[int, int], device: torch.device) -> None:
        self.device = device
        self._group: Any = group
        self._ranks = dict(ranks)
        self._ended = {
            peer: partial(gloo_sockets.are_closed, gloo_sockets.connections_of(group, rank))
            for peer, rank in ranks.items()
        }

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            gloo_sockets.shut_down(group)

    def cpu_s(self) -> float:
        """CPU seconds so far of the backend's own threads; 0 once it is closed."""
        group = self._group
        return 0.0 if group is None else gloo_sockets.cpu_s(group)

    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        group = self._group
        try:
            if group is None:
                raise TransferError(f"{_together(parcels)}: the transport is closed")
            for parcel in parcels:
                if parcel.peer not in self._ranks:
                    raise PlanError(f"{parcel}: the group has workers {ids_text(self._ranks)} only")
            return self._start_all(group, parcels)
        finally:
            # Otherwise the frame in an error's traceback would keep it, and all connections with
            # it: whoever waits for this worker would wait until the deadline.
            del group

    def _start_all(self, group: Any, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        """Starts the messages of a step; keeps no group in its frame. Raises TransferError."""
        started: list[Pending] = []
        try:
            for parcel in parcels:
                ended = self._ended[parcel.peer]
                started.append(_Started(self._start(group, parcel), [parcel], ended))
            return started
        finally:
            del group, started

    def _start(self, group: Any, parcel: Parcel) -> Any:
        """Starts one message; returns c10d's handle."""
        rank = self._ranks[parcel.peer]
        try:
            if parcel.is_send:
                return group.send([parcel.memory], rank, parcel.tag)
            return group.recv([parcel.memory], rank, parcel.tag)
        except RuntimeError as error:
            raise _translated(error, [parcel]) from error
        finally:
            del group


def _together(parcels: Sequence[Parcel]) -> str:
    if len(parcels) == 1:
        return str(parcels[0])
    peers = ids_text({parcel.peer for parcel in parcels})
    return f"{len(parcels)} messages with workers {peers}"


def _translated(
    error: Exception, parcels: Sequence[Parcel], deadline: Deadline | None = None
) -> LiverError:
    """The one place where a backend's error becomes ours."""
    if deadline is not None and deadline.expired():
        return late(deadline, _together(parcels))
    return TransferError(f"{_together(parcels)}: {str(error).partition(chr(10))[0][:300]}")


def end_batch(end: Callable[[], Any]) -> None:
    """After an error, ends the groups of NCCL's that this thread has open; what it launches in one
    never runs. torch leaves its own open, of which `end` ends one, and inside it another, which it
    begins around each message, where it is NCCL that refused that. `end` raises, and changes
    nothing, where none is open."""
    with contextlib.suppress(RuntimeError):
        for _ in range(2):
            end()


class _Started:
    """Started messages that complete together. ended: whether gloo has closed their connections;
    None: the device waits for them, not the host.

    Lets go of c10d's handle, which holds staging and the connection, as soon as it has been
    waited for, whatever came of it.
    """

    def __init__(self, work: Any, parcels: Sequence[Parcel], ended: Ended | None) -> None:
        self._work = work
        self._parcels = parcels
        self._ended = ended

    def wait(self, deadline: Deadline) -> None:
        work, self._work = self._work, None
        try:
            if deadline.expired():
                raise late(deadline, _together(self._parcels))
            if self._ended is None:
                work.wait()
                return
            # c10d cuts down to whole milliseconds and takes 0 to mean for ever; one more, so that
            # the deadline has passed when c10d gives up.
            limit = timedelta(milliseconds=1 + math.ceil(deadline.remaining_s() * 1000))
            gloo_waits.wait_for(work, self._ended, limit)
        except (RuntimeError, TransferError) as error:
            # Without the frames of its way here, which keep the handle as this one would.
            raise _translated(error, self._parcels, deadline) from error.with_traceback(None)
        finally:
            del work


class NcclWire(GlooWire):
    """The messages of a step are one group on the whole communicator, in a lane of their own.

    One by one, messages between two workers would run in the order in which each end starts
    them, and two workers that both begin with a send would wait for each other for ever.
    """

    grouped = late = True

    def __init__(
        self, backend: Any, ranks: Mapping[int, int], device: torch.device, lane: Lane
    ) -> None:
        super().__init__(backend, ranks, device)
        self._lane = lane
        self._closing = threading.Lock()

    def _start_all(self, group: Any, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        try:
            group._start_coalescing()
            try:
                for parcel in parcels:
                    self._start(group, parcel)
            except BaseException:
                end_batch(group._end_coalescing)
                raise
            work = group._end_coalescing()
        except RuntimeError as error:
            raise _translated(error, parcels) from error
        finally:
            del group
        # Not blocking: the lane waits for the messages, the host for the lane's end.
        return [_Started(work, parcels, ended=None)]

    @contextlib.contextmanager
    def streaming(self, deadline: Deadline) -> Iterator[None]:
        """Queues in this wire's lane, behind what the caller's own holds; on leaving, waits until
        the device has done it all."""
        self._lane.follow()
        with self._lane.entered():
            yield
        peers = ids_text(self._ranks)
        try:
            self._lane.finish(deadline)
        except DeadlineError as error:
            raise DeadlineError(f"{error}: messages between workers {peers} are stuck") from error
        except RuntimeError as error:
            raise TransferError(f"messages between workers {peers}: {error}") from error

    def close(self) -> None:
        """Ends what NCCL still runs, and frees the communicator's memory. Whoever comes while
        another thread does so waits for that: memory is freed next."""
        with self._closing:
            group, self._group = self._group, None
            if group is not None:
                with contextlib.suppress(RuntimeError):
                    group.abort()

    def abandon(self) -> None:
        """What NCCL still runs reads and writes memory that is about to be freed."""
        self.close()
        ended = Deadline.after(SystemClock(), _ENDS_S, "the device to end aborted messages")
        with contextlib.suppress(DeadlineError, RuntimeError):
            self._lane.finish(ended)
