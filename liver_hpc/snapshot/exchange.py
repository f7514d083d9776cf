"""The connections over which the snapshots of one world go to partners, from host memory to host
memory and apart from all of training's."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from zlib import crc32

import torch
from pydantic import ValidationError
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from liver_hpc.clock import Deadline
from liver_hpc.errors import TransferError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.snapshots import partners
from liver_hpc.protocol.messages import HeldSnapshot
from liver_hpc.snapshot.memory import Snapshot
from liver_hpc.transport.wire import GlooWire, Parcel
from liver_hpc.world.network import Network
from liver_hpc.world.store import ControlStore

_HOST = torch.device("cpu")
_HEADER_BYTES = 2048
_HEADER, _WORD, _FIRST = 0, 1, 2
"""Tags: of what says whose snapshot comes, of the receiver's answer, of the first message."""


class Exchange:
    """One worker's connections to its partner and to those whose partner it is (its wards): a group
    of two for each.

    step: at whose boundary it is opened, for the first time or again; the same on all workers.
    wards: their ranks. partner: None where there is nobody else.
    """

    def __init__(self, rank_map: RankMap, worker: int, generation: int, step: int) -> None:
        of_rank = partners(rank_map)
        self._worker = worker
        self._keys = f"g{generation}/snapshots/{step}"
        self.rank = rank_map.workers.index(worker)
        self.partner = of_rank[self.rank]
        self.wards = tuple(rank for rank, partner in enumerate(of_rank) if partner == worker)
        self._by_rank = rank_map.workers
        self._wires: dict[int, GlooWire] = {}
        self._closed = False

    @property
    def _peers(self) -> list[int]:
        peers = {self._by_rank[rank] for rank in self.wards}
        return sorted(peers if self.partner is None else peers | {self.partner})

    @property
    def connected(self) -> bool:
        return bool(self._wires)

    def connect(self, network: Network, store: ControlStore, limit_s: float) -> None:
        """Meets each peer, which meets this worker."""
        for pair in in_order(tuple(sorted((self._worker, peer))) for peer in self._peers):
            (peer,) = set(pair) - {self._worker}
            prefix = PrefixStore(f"{self._keys}/{pair[0]}-{pair[1]}", store)
            rank, who = pair.index(self._worker), f"worker {peer} to exchange snapshots with"
            backend = network.on_host().open_backend(
                prefix, rank, 2, limit_s, who, self._check_open
            )
            ranks = {member: number for number, member in enumerate(pair)}
            self._wires[peer] = GlooWire(backend, ranks, _HOST)
            if self._closed:
                self.close()
            self._check_open()

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the exchange of snapshots is closed")

    def swap(self, own: Snapshot, wards: Sequence[Snapshot], deadline: Deadline) -> None:
        """Sends this worker's snapshot to its partner, and takes in those of its wards, which are
        in the order of `self.wards`; returns once all have answered that they hold what was sent.

        Collective over each pair. Raises TransferError where a connection fails or a digest is not
        that of what was sent, DeadlineError; both name the peer.
        """
        headers = [torch.zeros(_HEADER_BYTES, dtype=torch.uint8) for _ in wards]
        answer = torch.zeros(1, dtype=torch.uint8)
        bytes_ = [
            Parcel(self._by_rank[rank], tag, memory, is_send=False)
            for rank, ward, header in zip(self.wards, wards, headers, strict=True)
            for tag, memory in _messages(header, ward)
        ]
        if self.partner is not None:
            sent = _messages(_header(own.told()), own)
            bytes_ += [Parcel(self.partner, tag, memory, is_send=True) for tag, memory in sent]
        self._cross(bytes_, deadline)
        words = [] if self.partner is None else [Parcel(self.partner, _WORD, answer, is_send=False)]
        problems = []
        for rank, ward, header in zip(self.wards, wards, headers, strict=True):
            problem = _taken_in(ward, header, own)
            problems += [f"worker {self._by_rank[rank]}: {problem}"] if problem else []
            word = torch.tensor([not problem], dtype=torch.uint8)
            words.append(Parcel(self._by_rank[rank], _WORD, word, is_send=True))
        self._cross(words, deadline)
        if self.partner is not None and not answer.item():
            problems.append(f"worker {self.partner} has not got what was sent to it")
        if problems:
            raise TransferError(f"worker {self._worker}: snapshots: {'; '.join(problems)}")

    def cpu_s(self) -> float:
        """CPU seconds so far of the threads that read and write its connections."""
        return sum(wire.cpu_s() for wire in self._wires.values())

    def _cross(self, parcels: Sequence[Parcel], deadline: Deadline) -> None:
        pending = [each for parcel in parcels for each in self._wires[parcel.peer].launch([parcel])]
        for each in pending:
            each.wait(deadline)

    def close(self) -> None:
        """Ends what is under way, at both ends; from any thread."""
        self._closed = True
        for wire in [*self._wires.values()]:
            wire.close()


def in_order(pairs: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The order in which workers meet: the same for all, so that no two wait for each other, and as
    good as random, so that few wait for one that waits for one that waits."""
    return sorted(pairs, key=lambda pair: (crc32(repr(pair).encode()), pair))


def _messages(header: torch.Tensor, snapshot: Snapshot) -> Iterator[tuple[int, torch.Tensor]]:
    """(tag, memory) of all that crosses of one snapshot."""
    yield _HEADER, header
    for number, chunk in enumerate(snapshot.chunks):
        yield _FIRST + number, chunk


def _header(told: HeldSnapshot) -> torch.Tensor:
    text = told.model_dump_json().encode()
    assert len(text) <= _HEADER_BYTES, "a few numbers"
    return torch.frombuffer(bytearray(text.ljust(_HEADER_BYTES)), dtype=torch.uint8)


def _taken_in(ward: Snapshot, header: torch.Tensor, own: Snapshot) -> str:
    """What is wrong with a snapshot that has come, or empty: then it is one of this moment."""
    try:
        told = HeldSnapshot.model_validate_json(bytes(header.tolist()).rstrip())
    except (ValidationError, json.JSONDecodeError) as error:
        return f"what it says of its snapshot is damaged: {error}"
    wanted = (ward.generation, ward.rank, str(ward.layout), own.scalars)
    got = (told.generation, told.rank, told.layout, told.scalars)
    if got != wanted:
        return f"its snapshot is {got}, wanted {wanted}"
    ward.scalars, ward.digests = told.scalars, ward.digest()
    if ward.told() != told:
        return "its snapshot has not arrived as it was sent, by digest"
    return ""
