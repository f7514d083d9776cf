"""What was sent is there: each receiver says so to its senders, by digest.

Then a sender may let go of its own copy, as another one is known to exist.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from liver_hpc.clock import Deadline
from liver_hpc.errors import TransferError
from liver_hpc.transport.digest import MODULUS
from liver_hpc.transport.moved import Moved
from liver_hpc.transport.wire import Parcel, Wire

_TAG = (1 << 31) - 2
"""Of the words of receivers; no stream counts so far."""
_WORD_BYTES = 8


def acknowledge(wire: Wire, worker: int, moved: Moved, deadline: Deadline) -> None:
    """Tells each sender the digest of what has come from it, and hears it of each receiver.

    Collective over the workers between which the stream that `moved` tells of moved state. Raises
    TransferError where a receiver holds something else than was sent, DeadlineError.
    """
    sent, received = _by_peer(moved.sent), _by_peer(moved.received)
    heard = {
        peer: torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=wire.device)
        for peer in sorted(sent)
    }
    words = [
        Parcel(peer, _TAG, _word(received[peer]).to(wire.device), is_send=True)
        for peer in sorted(received)
    ]
    words += [Parcel(peer, _TAG, word, is_send=False) for peer, word in heard.items()]
    wire.exchange(words, deadline)
    held = {peer: int.from_bytes(bytes(word.tolist()), "little") for peer, word in heard.items()}
    differ = [peer for peer, digest in sorted(sent.items()) if held[peer] != digest]
    if differ:
        raise TransferError(
            f"worker {worker}: workers {differ} hold something else than was sent to them, "
            "by digest"
        )


def _by_peer(digests: Mapping[tuple[int, str], int]) -> dict[int, int]:
    """Of all kinds of state together: digests add up."""
    found: dict[int, int] = {}
    for (peer, _), digest in digests.items():
        found[peer] = (found.get(peer, 0) + digest) % MODULUS
    return found


def _word(digest: int) -> torch.Tensor:
    return torch.tensor([*digest.to_bytes(_WORD_BYTES, "little")], dtype=torch.uint8)
