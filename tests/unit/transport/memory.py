"""The in-memory twin: workers are threads of one process, and a message is a copy.

As strict as a wire can be: a message crosses only when both ends have started it, so a plan or a
schedule that counts on buffering hangs here first.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from liver_hpc.clock import Deadline
from liver_hpc.config.schema import HandoffSection
from liver_hpc.errors import TransferError
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.transport.stream import Transport
from liver_hpc.transport.wire import Parcel, Pending, Wire, late


class _Address(NamedTuple):
    sender: int
    receiver: int
    tag: int
    is_send: bool

    def owner(self) -> int:
        return self.sender if self.is_send else self.receiver

    def other_end(self) -> _Address:
        return self._replace(is_send=not self.is_send)


@dataclass
class _End:
    """One started end of a message."""

    parcel: Parcel
    crossed: bool = False
    failure: str = ""


class MemoryExchange:
    """Where the transports of one handoff meet; one object a handoff, shared by all threads.

    grouped: pack messages into few large steps, as for a backend that runs a step as one, and take
    the device for a late one.
    """

    def __init__(self, *, grouped: bool = False) -> None:
        self.grouped = grouped
        self._changed = threading.Condition()
        self._started: dict[_Address, _End] = {}
        self._gone: set[int] = set()

    def transport(self, worker: int, model: ModelSpec, handoff: HandoffSection) -> Transport:
        """The transport of one worker."""
        return Transport(self.wire(worker), model, handoff)

    def wire(self, worker: int) -> Wire:
        """The wire of one worker."""
        return _MemoryWire(self, worker)

    def start(self, worker: int, parcel: Parcel) -> _End:
        """Starts one end of a message; both ends cross when the second one starts."""
        pair = (worker, parcel.peer) if parcel.is_send else (parcel.peer, worker)
        address, end = _Address(*pair, parcel.tag, parcel.is_send), _End(parcel)
        with self._changed:
            other = self._started.pop(address.other_end(), None)
            if other is None:
                self._started[address] = end
                if parcel.peer in self._gone:
                    end.failure = f"worker {parcel.peer} has closed its transport"
            else:
                _cross(*((end, other) if parcel.is_send else (other, end)))
            self._changed.notify_all()
        return end

    def wait(self, end: _End, deadline: Deadline) -> None:
        """Until an end has crossed; raises TransferError or DeadlineError."""
        with self._changed:
            self._changed.wait_for(lambda: end.crossed or end.failure, deadline.remaining_s())
            if end.failure:
                raise TransferError(f"{end.parcel}: {end.failure}")
            if not end.crossed:
                raise late(deadline, str(end.parcel))

    def withdraw(self, worker: int) -> None:
        """Forgets what a worker has started: its memory is not touched any more."""
        with self._changed:
            for address in [a for a in self._started if a.owner() == worker]:
                del self._started[address]

    def leave(self, worker: int) -> None:
        """A worker's transport is closed: messages with it will never cross."""
        self.withdraw(worker)
        with self._changed:
            self._gone.add(worker)
            for address in [a for a in self._started if worker in (a.sender, a.receiver)]:
                end = self._started.pop(address)
                end.failure = f"worker {worker} has closed its transport"
            self._changed.notify_all()


def _cross(sent: _End, received: _End) -> None:
    wanted, got = received.parcel.memory, sent.parcel.memory
    if wanted.numel() != got.numel():
        failure = f"sent are {got.numel()} bytes, wanted {wanted.numel()}"
        sent.failure = received.failure = failure
        return
    wanted.copy_(got)
    sent.crossed = received.crossed = True


@dataclass
class _Message:
    exchange: MemoryExchange
    end: _End

    def wait(self, deadline: Deadline) -> None:
        self.exchange.wait(self.end, deadline)


class _MemoryWire(Wire):
    device = torch.device("cpu")

    def __init__(self, exchange: MemoryExchange, worker: int) -> None:
        self.grouped = self.late = exchange.grouped
        self._exchange = exchange
        self._worker = worker

    def launch(self, parcels: Sequence[Parcel]) -> Sequence[Pending]:
        return [
            _Message(self._exchange, self._exchange.start(self._worker, parcel))
            for parcel in parcels
        ]

    def abandon(self) -> None:
        self._exchange.withdraw(self._worker)

    def close(self) -> None:
        self._exchange.leave(self._worker)
