"""The key-value store from which process groups are built: torch's Store, over control channels.

Values are base64 text and never looked into, but for the counters of `add`.
"""

from __future__ import annotations

import base64
import binascii
import threading
from collections import defaultdict
from dataclasses import dataclass

from liver_hpc.protocol.messages import StoreReply, StoreRequest


@dataclass(eq=False)
class _Wait:
    """A request that waits for its keys. missing: those that do not exist. changed: told of when
    none is missing any more, or `ended` says why it must not wait any longer."""

    missing: set[str]
    changed: threading.Condition
    ended: str = ""


class StoreService:
    """Each store connection has a thread of its own; one that waits holds nobody up, and is woken
    once: when its last key comes."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waits: defaultdict[str, set[_Wait]] = defaultdict(set)  # by key
        self._lock = threading.Lock()
        self._closed = ""

    def perform(self, request: StoreRequest) -> StoreReply:
        """One operation. `get` and `wait` block for up to `timeout_s`."""
        operation, keys = request.operation, request.keys
        if operation not in ("wait", "check") and len(keys) != 1:
            return StoreReply(error=f"{operation} takes one key, got {list(keys)}")
        with self._lock:
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
                    return StoreReply(number=all(key in self._values for key in keys))
                case "delete":
                    return StoreReply(number=self._delete(keys[0]))

    def forget(self, prefix: str) -> None:
        """Drops every key that starts so, and ends the waits for such keys."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                self._delete(key)
            for key in [key for key in self._waits if key.startswith(prefix)]:
                self._end(key, f"the keys under {prefix} are gone")

    def close(self) -> None:
        """Ends every wait with an error; idempotent."""
        with self._lock:
            self._closed = "the coordinator is shutting down"
            for key in [*self._waits]:
                self._end(key, self._closed)

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
        for wait in self._waits.get(key, ()):
            wait.missing.discard(key)
            if not wait.missing:
                wait.changed.notify()

    def _delete(self, key: str) -> bool:
        for wait in self._waits.get(key, ()):
            wait.missing.add(key)
        return self._values.pop(key, None) is not None

    def _end(self, key: str, why: str) -> None:
        for wait in self._waits[key]:
            wait.ended = why
            wait.changed.notify()

    def _await_keys(self, request: StoreRequest) -> str:
        """Empty once all keys exist, else why they do not."""
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return ""
        wait = _Wait(missing, threading.Condition(self._lock), self._closed)
        for key in request.keys:
            self._waits[key].add(wait)
        try:
            wait.changed.wait_for(lambda: wait.ended or not wait.missing, request.timeout_s)
        finally:
            for key in request.keys:
                self._forget_wait(key, wait)
        if not wait.missing:
            return ""
        why = wait.ended or f"waited {request.timeout_s:g} s"
        return f"{why}; missing keys {[key for key in request.keys if key in wait.missing]}"

    def _forget_wait(self, key: str, wait: _Wait) -> None:
        self._waits[key].discard(wait)
        if not self._waits[key]:
            del self._waits[key]
