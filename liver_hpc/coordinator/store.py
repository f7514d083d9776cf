"""The key-value store from which process groups are built: torch's Store, over control channels.

Values are base64 text and never looked into, but for the counters of `add`.
"""

from __future__ import annotations

import base64
import binascii
import heapq
import threading
from collections import defaultdict
from dataclasses import dataclass
from itertools import count

from liver_hpc.clock import Clock
from liver_hpc.host.process import quiet_thread
from liver_hpc.protocol.messages import (
    VALUES_APART,
    StoreAnswer,
    StoreAnswers,
    StoreAsk,
    StoreAsks,
    encode,
)
from liver_hpc.rendezvous.channel import Channel, Part


@dataclass(eq=False)
class _Wait:
    """What waits for its keys. channel: to those who ask. missing: keys that do not exist."""

    channel: Channel
    asked: StoreAsk
    missing: set[str]
    ended: bool = False


_Answers = defaultdict[Channel, list[StoreAnswer]]


class StoreService:
    """No request holds up another one, or a thread: one that waits for keys is answered when the
    last of them comes. From any thread.

    gather_s: so long answers wait for others to the same channel: one key often is what workers of
    all agents wait for. Raises LiverError where there is no thread to post them.
    """

    def __init__(self, clock: Clock, gather_s: float = 0.001) -> None:
        self._clock = clock
        self._gather_s = gather_s
        self._values: dict[str, str] = {}
        self._waits: defaultdict[str, set[_Wait]] = defaultdict(set)  # by key
        self._by_deadline: list[tuple[float, int, _Wait]] = []
        self._order = count()
        self._answers: _Answers = defaultdict(list)
        self._lock = threading.Lock()
        self._some = threading.Condition(self._lock)
        self._closed = ""
        self._closing = threading.Event()
        self._poster = quiet_thread(self._post_all, "store")

    def ask(self, channel: Channel, asked: StoreAsks) -> None:
        """What workers at the other end of a channel ask, in order; the answers are posted there.
        `get` and `wait` may take up to `timeout_s`."""
        with self._lock:
            for each in asked.asks:
                answer = self._perform(channel, each)
                if answer is not None:
                    self._answer(channel, answer)

    def expire(self) -> None:
        """Ends the waits whose time is over; to be called again and again."""
        with self._lock:
            now_s = self._clock.now_s()
            while self._by_deadline and self._by_deadline[0][0] <= now_s:
                _, _, wait = heapq.heappop(self._by_deadline)
                if not wait.ended:
                    self._end(wait, f"waited {wait.asked.timeout_s:g} s")

    def put(self, key: str, value: str) -> None:
        """As if somebody had set it."""
        with self._lock:
            self._put(key, base64.b64encode(value.encode()).decode())

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
        self._poster.join()
        self.flush()

    def flush(self) -> None:
        """Posts the answers that there are."""
        with self._lock:
            answers, self._answers = self._answers, defaultdict(list)
        for channel, those in answers.items():
            channel.post([Part(encode(StoreAnswers(answers=tuple(those))))])

    def _post_all(self) -> None:
        while not self._closing.is_set():
            with self._lock:
                self._some.wait_for(lambda: self._answers or self._closed)
            self._closing.wait(self._gather_s)
            self.flush()

    # ---- with the lock held

    def _perform(self, channel: Channel, asked: StoreAsk) -> StoreAnswer | None:
        """The answer; None for what waits."""
        operation, keys, askers = asked.operation, asked.keys, asked.askers
        if operation in ("set", "add") and len(keys) != 1:
            return StoreAnswer(askers=askers, error=f"{operation} takes one key, got {list(keys)}")
        match operation:
            case "set":
                self._put(keys[0], asked.value)
                return StoreAnswer(askers=askers)
            case "get" | "wait":
                return self._find(channel, asked)
            case "add":
                return self._add(asked)
            case "check":
                return StoreAnswer(askers=askers, count=all(key in self._values for key in keys))
            case "delete":
                return StoreAnswer(askers=askers, count=sum(map(self._delete, keys)))

    def _find(self, channel: Channel, asked: StoreAsk) -> StoreAnswer | None:
        missing = {key for key in asked.keys if key not in self._values}
        if not missing:
            return self._found(asked)
        if self._closed:
            return StoreAnswer(askers=asked.askers, error=_missing(self._closed, asked, missing))
        wait = _Wait(channel, asked, missing)
        for key in asked.keys:
            self._waits[key].add(wait)
        late_s = self._clock.now_s() + asked.timeout_s
        heapq.heappush(self._by_deadline, (late_s, next(self._order), wait))
        return None

    def _found(self, asked: StoreAsk) -> StoreAnswer:
        wanted = asked.keys if asked.operation == "get" else ()
        value = VALUES_APART.join(self._values[key] for key in wanted)
        return StoreAnswer(askers=asked.askers, value=value)

    def _add(self, asked: StoreAsk) -> StoreAnswer:
        (key,), askers = asked.keys, asked.askers
        try:
            total = int(base64.b64decode(self._values.get(key, "MA=="))) + asked.amount
        except (ValueError, binascii.Error):
            error = f"add to {key}: its value is not a number"
            return StoreAnswer(askers=askers, error=error)
        self._put(key, base64.b64encode(str(total).encode()).decode())
        return StoreAnswer(askers=askers, count=total)

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
        for key in wait.asked.keys:
            self._waits[key].discard(wait)
            if not self._waits[key]:
                del self._waits[key]
        if why:
            error = _missing(why, wait.asked, wait.missing)
            self._answer(wait.channel, StoreAnswer(askers=wait.asked.askers, error=error))
        else:
            self._answer(wait.channel, self._found(wait.asked))

    def _answer(self, channel: Channel, answer: StoreAnswer) -> None:
        self._answers[channel].append(answer)
        self._some.notify()


def _missing(why: str, asked: StoreAsk, missing: set[str]) -> str:
    return f"{why}; missing keys {[key for key in asked.keys if key in missing]}"
