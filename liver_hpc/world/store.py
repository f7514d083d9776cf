"""torch's key-value store over the worker's line; process groups meet through it.

Each request has a number, so that one that blocks in a background thread holds up no other.
"""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from liver_hpc.errors import DeadlineError, LiverError, StoreAway
from liver_hpc.protocol.messages import NO_STORE, VALUES_APART, StoreReply, StoreRequest

_REPLY_MARGIN_S = 15.0
"""How much longer than the request's own timeout the reply may take."""

Ask = Callable[[StoreRequest], "Future[StoreReply]"]


class ControlStore(dist.Store):  # type: ignore[misc,name-defined]
    """A `torch.distributed.Store` served by the coordinator, which is asked by `ask`. Thread-safe.

    A request that blocks ends with an error when another thread closes the store.
    """

    def __init__(self, ask: Ask, timeout_s: float) -> None:
        super().__init__()
        self._ask_coordinator = ask
        self._timeout_s = timeout_s
        self._closed = False
        self._asked: set[Future[StoreReply]] = set()

    def _ask(self, operation: str, keys: tuple[str, ...], **fields: Any) -> StoreReply:
        timeout_s = fields.pop("timeout_s", self._timeout_s)
        request = StoreRequest(operation=operation, keys=keys, timeout_s=timeout_s, **fields)  # type: ignore[arg-type]
        answer = self._ask_coordinator(request)
        self._asked.add(answer)
        try:
            if self._closed:
                raise LiverError("the store is closed")
            reply = answer.result(timeout_s + _REPLY_MARGIN_S)
        except TimeoutError:
            answer.cancel()
            waited = f"waited {timeout_s + _REPLY_MARGIN_S:g} s for the coordinator"
            raise LiverError(f"store {operation} {list(keys)}: {waited}") from None
        except LiverError as error:
            kind = StoreAway if isinstance(error, StoreAway) else LiverError
            raise kind(f"store {operation} {list(keys)}: {error}") from error
        finally:
            self._asked.discard(answer)
        if reply.error:
            kind = StoreAway if reply.error == NO_STORE else DeadlineError
            raise kind(f"store {operation}: {reply.error}")
        return reply

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", (key,), value=_encoded(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values = self._ask("get", tuple(keys)).value
        return [base64.b64decode(value) for value in values.split(VALUES_APART)]

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", (key,), amount=amount).count

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        self._ask("wait", tuple(keys), timeout_s=timeout_s)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", tuple(keys)).count)

    def delete_key(self, key: str) -> bool:
        return bool(self.delete_keys([key]))

    def delete_keys(self, keys: list[str]) -> int:
        """torch has no such request. Returns how many there were."""
        return self._ask("delete", tuple(keys)).count

    def close(self) -> None:
        self._closed = True
        for answer in [*self._asked]:
            fail(answer, LiverError("the store is closed"))


def fail(answer: Future[StoreReply], error: LiverError) -> None:
    """Unless it is answered already."""
    with contextlib.suppress(InvalidStateError):
        answer.set_exception(error)


def _encoded(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
