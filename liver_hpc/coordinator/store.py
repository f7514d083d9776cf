"""The key-value store from which process groups are built: torch's Store, over control channels.

Values are base64 text and never looked into, but for the counters of `add`.
"""

from __future__ import annotations

import base64
import binascii
import threading
from dataclasses import dataclass

from liver_hpc.protocol.messages import StoreReply, StoreRequest


@dataclass(eq=False)
class _Wait:
    """A request that waits for its keys; `ended` says why it must not wait any longer."""

    keys: tuple[str, ...]
    ended: str = ""


class StoreService:
    """Each store connection has a thread of its own; one that waits holds nobody up."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waits: set[_Wait] = set()
        self._changed = threading.Condition()
        self._closed = ""

    def perform(self, request: StoreRequest) -> StoreReply:
        """One operation. `get` and `wait` block for up to `timeout_s`."""
        operation, keys = request.operation, request.keys
        if operation not in ("wait", "check") and len(keys) != 1:
            return StoreReply(error=f"{operation} takes one key, got {list(keys)}")
        with self._changed:
            match operation:
                case "set":
                    self._put(keys[0], request.value)
                    return StoreReply()
                case "get":
                    error = self._await_keys(request)
                    return StoreReply(error=error, value=self._values.get(keys[0], ""))
                case "wait":
                    return StoreReply(error=self._await_keys(request))
                case "add":
                    return self._add(keys[0], request.amount)
                case "check":
                    return StoreReply(number=not self._missing(keys))
                case "delete":
                    return StoreReply(number=self._values.pop(keys[0], None) is not None)

    def forget(self, prefix: str) -> None:
        """Drops every key that starts so, and ends the waits for such keys."""
        with self._changed:
            for key in [key for key in self._values if key.startswith(prefix)]:
                del self._values[key]
            for wait in self._waits:
                if any(key.startswith(prefix) for key in wait.keys):
                    wait.ended = f"the keys under {prefix} are gone"
            self._changed.notify_all()

    def close(self) -> None:
        """Ends every wait with an error; idempotent."""
        with self._changed:
            self._closed = "the coordinator is shutting down"
            self._changed.notify_all()

    # ---- with the lock held

    def _add(self, key: str, amount: int) -> StoreReply:
        try:
            number = int(base64.b64decode(self._values.get(key, "MA=="))) + amount
        except (ValueError, binascii.Error):
            return StoreReply(error=f"add to {key}: its value is not a number")
        self._put(key, base64.b64encode(str(number).encode()).decode())
        return StoreReply(number=number)

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        self._changed.notify_all()

    def _await_keys(self, request: StoreRequest) -> str:
        """Empty once all keys exist, else why they do not."""
        wait = _Wait(request.keys)
        self._waits.add(wait)
        try:
            self._changed.wait_for(
                lambda: self._closed or wait.ended or not self._missing(wait.keys),
                request.timeout_s,
            )
        finally:
            self._waits.discard(wait)
        missing = self._missing(wait.keys)
        if not missing:
            return ""
        why = self._closed or wait.ended or f"waited {request.timeout_s:g} s"
        return f"{why}; missing keys {missing}"

    def _missing(self, keys: tuple[str, ...]) -> list[str]:
        return [key for key in keys if key not in self._values]
