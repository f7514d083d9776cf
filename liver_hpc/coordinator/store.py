"""The key-value store from which process groups are built: torch's Store, over control channels.

Values are base64 text and never looked into, but for the counters of `add`.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, Protocol

from liver_hpc.clock import Clock
from liver_hpc.protocol.messages import StoreReply, StoreRequest, encode
from liver_hpc.rendezvous.channel import Part


class Posts(Protocol):
    """Where replies go: a `Channel`."""

    def post(self, parts: list[Part]) -> None: ...


class _Asker(NamedTuple):
    """A worker, at the other end of an agent's connection, and which of its requests it is."""

    channel: Posts
    worker: int
    number: int


@dataclass(eq=False)
class _Wait:
    """A request that waits for its keys. missing: those that do not exist."""

    asker: _Asker
    request: StoreRequest
    missing: set[str]
    ended: bool = False


_Replies = defaultdict[Posts, list[Part]]


class StoreService:
    """No request holds up another one, or a thread: one that waits for keys is answered when the
    last of them comes. From any thread.

    gather_s: so long replies wait for others to the same channel: one key often is what workers of
    all agents wait for.
    """

    def __init__(self, clock: Clock, gather_s: float = 0.001) -> None:
        self._clock = clock
        self._gather_s = gather_s
        self._values: dict[str, str] = {}
        self._waits: defaultdict[str, set[_Wait]] = defaultdict(set)  # by key
        self._by_deadline: list[tuple[float, int, _Wait]] = []
        self._order = count()
        self._replies: _Replies = defaultdict(list)
        self._lock = threading.Lock()
        self._some = threading.Condition(self._lock)
        self._closed = ""
        self._closing = threading.Event()
        self._poster: threading.Thread | None = None  # from the first request on

    def ask(self, channel: Posts, requests: Iterable[tuple[int, StoreRequest]]) -> None:
        """What workers at the other end of a channel ask, in order; the replies are posted there.
        `get` and `wait` may take up to `timeout_s`."""
        with self._lock:
            if self._poster is None and not self._closed:
                self._poster = threading.Thread(target=self._post_all, name="store", daemon=True)
                self._poster.start()
            for worker, request in requests:
                asker = _Asker(channel, worker, request.number)
                reply = self._perform(asker, request)
                if reply is not None:
                    self._answer(asker, reply)

    def expire(self) -> None:
        """Ends the waits whose time is over; to be called again and again."""
        with self._lock:
            now_s = self._clock.now_s()
            while self._by_deadline and self._by_deadline[0][0] <= now_s:
                _, _, wait = heapq.heappop(self._by_deadline)
                if not wait.ended:
                    self._end(wait, f"waited {wait.request.timeout_s:g} s")

    def forget(self, prefix: str) -> None:
        """Drops every key that starts so, and ends the waits for such keys."""
        with self._lock:
            for key in [key for key in self._values if key.startswith(prefix)]:
                self._delete(key)
            for key in [key for key in self._waits if key.startswith(prefix)]:
                self._end_all(key, f"the keys under {prefix} are gone")

    def close(self) -> None:
        """Ends every wait with an error, and returns once all is posted; idempotent."""
        with self._lock:
            self._closed = "the coordinator is shutting down"
            for key in [*self._waits]:
                self._end_all(key, self._closed)
            self._some.notify()
        self._closing.set()
        if self._poster is not None:
            self._poster.join()
        self.flush()

    def flush(self) -> None:
        """Posts the replies that there are."""
        with self._lock:
            replies, self._replies = self._replies, defaultdict(list)
        for channel, parts in replies.items():
            channel.post(parts)

    def _post_all(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._some.wait_for(lambda: self._replies or self._closed)
            self._closing.wait(self._gather_s)
            self.flush()

    # ---- with the lock held

    def _perform(self, asker: _Asker, request: StoreRequest) -> StoreReply | None:
        """The reply; None for one that waits."""
        operation, keys = request.operation, request.keys
        if operation not in ("wait", "check") and len(keys) != 1:
            return StoreReply(error=f"{operation} takes one key, got {list(keys)}")
        match operation:
            case "set":
                self._put(keys[0], request.value)
                return StoreReply()
            case "get" | "wait":
                return self._find(asker, request)
            case "add":
                return self._add(keys[0], request.amount)
            case "check":
                return StoreReply(count=all(key in self._values for key in keys))
            case "delete":
                return StoreReply(count=self._delete(keys[0]))

    def _find(self, asker: _Asker, request: StoreRequest) -> StoreReply | None:
        missing = {key for key in request.keys if key not in self._values}
        if not missing:
            return self._found(request)
        if self._closed:
            return StoreReply(error=_missing(self._closed, request, missing))
        wait = _Wait(asker, request, missing)
        for key in request.keys:
            self._waits[key].add(wait)
        late_s = self._clock.now_s() + request.timeout_s
        heapq.heappush(self._by_deadline, (late_s, next(self._order), wait))
        return None

    def _found(self, request: StoreRequest) -> StoreReply:
        is_get = request.operation == "get"
        return StoreReply(value=self._values[request.keys[0]] if is_get else "")

    def _add(self, key: str, amount: int) -> StoreReply:
        try:
            total = int(base64.b64decode(self._values.get(key, "MA=="))) + amount
        except (ValueError, binascii.Error):
            return StoreReply(error=f"add to {key}: its value is not a number")
        self._put(key, base64.b64encode(str(total).encode()).decode())
        return StoreReply(count=total)

    def _put(self, key: str, value: str) -> None:
        self._values[key] = value
        for wait in [*self._waits.get(key, ())]:
            wait.missing.discard(key)
            if not wait.missing:
                self._end(wait, "")

    def _delete(self, key: str) -> bool:
        for wait in self._waits.get(key, ()):
            wait.missing.add(key)
        return self._values.pop(key, None) is not None

    def _end_all(self, key: str, why: str) -> None:
        for wait in [*self._waits.get(key, ())]:
            self._end(wait, why)

    def _end(self, wait: _Wait, why: str) -> None:
        wait.ended = True
        for key in wait.request.keys:
            self._waits[key].discard(wait)
            if not self._waits[key]:
                del self._waits[key]
        if why:
            reply = StoreReply(error=_missing(why, wait.request, wait.missing))
        else:
            reply = self._found(wait.request)
        self._answer(wait.asker, reply)

    def _answer(self, asker: _Asker, reply: StoreReply) -> None:
        numbered = reply.model_copy(update={"number": asker.number})
        self._replies[asker.channel].append(Part(encode(numbered), who=asker.worker))
        self._some.notify()


def _missing(why: str, request: StoreRequest, missing: set[str]) -> str:
    return f"{why}; missing keys {[key for key in request.keys if key in missing]}"
