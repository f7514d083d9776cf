"""How two sides prove to each other that they hold the run's secret, without saying it.

Each side names a nonce of its own. A proof is HMAC-SHA256 under the secret over what it is for,
who speaks, both nonces and what is said with it: neither an overheard proof nor one's own, sent
back, proves anything.
"""

from __future__ import annotations

import hmac
import secrets

NONCE_BYTES = 32
PROOF_BYTES = 32


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prove(secret: bytes, purpose: bytes, speaker: bytes, nonces: bytes, said: bytes = b"") -> bytes:
    """The proof, of PROOF_BYTES. For no two inputs the same bytes are signed: `purpose` ends with
    its only zero byte, `speaker` is one byte, `nonces` are the listener's and the caller's."""
    return hmac.digest(secret, purpose + speaker + nonces + said, "sha256")
