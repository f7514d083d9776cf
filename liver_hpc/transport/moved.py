"""What a stream has moved: digests of what crossed, by pair, and where the time went. A receiver
tells its senders: then they may let go of their own copy, as another one is known to exist."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from liver_hpc.clock import Deadline
from liver_hpc.errors import TransferError
from liver_hpc.layout.coordinates import ids_text
from liver_hpc.layout.tensors import ModelSpec
from liver_hpc.transport.buckets import Piece
from liver_hpc.transport.checksum import piece_checksum, same_bits
from liver_hpc.transport.digest import MODULUS, add_digest
from liver_hpc.transport.wire import Parcel, Wire

Ends = Literal["sent", "received"]
Work = Literal["wire", "pack", "unpack", "copy", "digest"]

_WORD_TAG = (1 << 31) - 2
"""Of the words of receivers; no stream counts so far."""
_WORD_BYTES = 8

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by their size in bytes: of floating-point numbers equal ones may differ, NaN does."""


@dataclass(frozen=True)
class Moved:
    """What one worker's stream has moved.

    sent, received: digests in [0, MODULUS) by (peer worker, kind): sums of `piece_checksum`, on a
    late device of `box_digest`. `sent` was read from the source world, `received` from the target
    world, so that worker a's `sent[b, kind]` equals worker b's `received[a, kind]` where nothing
    went wrong between the two: from when the source was read (before it was packed; where it goes
    as it lies, when it was sent) until the target was written.
    Empty where no digests were wanted. Copies within the worker were compared instead.
    timings_s: seconds by work. "wire": waiting for messages. "pack", "unpack": copying into and out
    of staging. "copy": copying within the worker. "digest": digests of what crossed, and comparing
    what was copied. On CUDA the last four are the time in which the device was told what to do, and
    the wait for it is in "wire".
    """

    sent: Mapping[tuple[int, str], int]
    received: Mapping[tuple[int, str], int]
    timings_s: Mapping[Work, float]


class Tally:
    """Adds up what becomes a `Moved`. Never waits for the device.

    late: whether what a call has launched may still have to be done when it has returned.
    """

    def __init__(self, model: ModelSpec, *, digest: bool, late: bool) -> None:
        self._model = model
        self._digest = digest
        self._late = late
        self._checksums: Counter[tuple[Ends, int, str]] = Counter()
        self._wrong: set[str] = set()
        self._sums: dict[tuple[Ends, int, str], torch.Tensor] = {}
        self._settled = torch.zeros(0, dtype=torch.int64)
        self._differences: dict[str, torch.Tensor] = {}
        self._timings_s: dict[Work, float] = dict.fromkeys(get_args(Work), 0.0)

    @contextmanager
    def timed(self, work: Work) -> Iterator[None]:
        """Counts the time inside as time spent on `work`."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._timings_s[work] += time.perf_counter() - began_s

    def see(
        self, end: Ends, peer: int, pieces: Sequence[Piece], views: Sequence[torch.Tensor]
    ) -> None:
        """Adds pieces to the digests of what was sent to a peer, or received from it."""
        if not self._digest:
            return
        with self.timed("digest"):
            for piece, view in zip(pieces, views, strict=True):
                if not self._late:
                    self._checksums[end, peer, piece.kind] += piece_checksum(piece, view)
                    continue
                total = self._sums.get((end, peer, piece.kind))
                if total is None:
                    total = torch.zeros((), dtype=torch.int64, device=view.device)
                    self._sums[end, peer, piece.kind] = total
                add_digest(total, view, self._model.tensors[piece.tensor_index], piece.box)

    def compare(self, kind: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Notes whether a copy within the worker has other bits than what it was made of.

        source, target: of the same shape and dtype, any strides.
        """
        if not self._digest:
            return
        with self.timed("digest"):
            if not self._late:
                if not same_bits(source, target):
                    self._wrong.add(kind)
                return
            bits = _BITS[source.element_size()]
            lowest, highest = torch.aminmax(source.detach().view(bits) ^ target.view(bits))
            difference = (lowest | highest).to(torch.int64)
            if kind in self._differences:
                difference |= self._differences[kind]
            self._differences[kind] = difference

    def settle(self) -> None:
        """The last of it has been seen: the device is told to hand the digests over. Waits for
        nothing; for `moved` the device must have done it."""
        seen = [*self._sums.values(), *self._differences.values()]
        if seen:
            self._settled = torch.stack(seen).to("cpu", non_blocking=True)

    def moved(self) -> Moved:
        """All of it, once it has settled. Raises TransferError where a copy within the worker is
        not what it was made of."""
        settled = iter(self._settled.tolist())
        sums = {crossed: next(settled) % MODULUS for crossed in self._sums}
        sums |= {crossed: total % MODULUS for crossed, total in self._checksums.items()}
        wrong = self._wrong | {kind for kind in self._differences if next(settled)}
        if wrong:
            raise TransferError(
                f"copies of {sorted(wrong)} within the worker differ from their sources"
            )
        sent, received = (
            {(peer, kind): value for (of, peer, kind), value in sums.items() if of == end}
            for end in ("sent", "received")
        )
        return Moved(sent, received, self._timings_s)


def acknowledge(wire: Wire, worker: int, moved: Moved, deadline: Deadline) -> None:
    """Tells each sender the digest of what has come from it, and hears it of each receiver.

    Collective over the workers between which the stream that `moved` tells of moved state. Raises
    TransferError where a receiver holds something else than was sent, DeadlineError.
    """
    sent, received = _by_peer(moved.sent), _by_peer(moved.received)
    heard = {peer: _word(0).to(wire.device) for peer in sorted(sent)}
    words = [
        Parcel(peer, _WORD_TAG, _word(received[peer]).to(wire.device), is_send=True)
        for peer in sorted(received)
    ]
    words += [Parcel(peer, _WORD_TAG, word, is_send=False) for peer, word in heard.items()]
    wire.exchange(words, deadline)
    held = {peer: int.from_bytes(bytes(word.tolist()), "little") for peer, word in heard.items()}
    differ = [peer for peer, digest in sorted(sent.items()) if held[peer] != digest]
    if differ:
        raise TransferError(
            f"worker {worker}: workers {ids_text(differ)} hold something else than was sent to "
            "them, by digest"
        )


def _by_peer(digests: Mapping[tuple[int, str], int]) -> dict[int, int]:
    """Of all kinds of state together: digests add up."""
    found: Counter[int] = Counter()
    for (peer, _), digest in digests.items():
        found[peer] += digest
    return {peer: digest % MODULUS for peer, digest in found.items()}


def _word(digest: int) -> torch.Tensor:
    return torch.tensor([*digest.to_bytes(_WORD_BYTES, "little")], dtype=torch.uint8)
