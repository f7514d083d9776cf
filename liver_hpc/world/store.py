"""torch's key-value store over the authenticated control channel; process groups meet through it.

A client is a connection of its own, so a `get` that blocks in a background thread holds up no
other thread's client.
"""

from __future__ import annotations

import base64
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from liver_hpc.errors import DeadlineError, LiverError, ProtocolError
from liver_hpc.protocol.messages import StoreReply, StoreRequest
from liver_hpc.rendezvous.channel import Channel, ChannelClosed

_REPLY_MARGIN_S = 15.0
"""How much longer than the request's own timeout the reply may take."""


class ControlStore(dist.Store):  # type: ignore[misc,name-defined]
    """A `torch.distributed.Store` served by the coordinator. Thread-safe, one request at a time.

    A request that blocks ends with an error when another thread closes the store.
    """

    def __init__(self, channel: Channel, timeout_s: float) -> None:
        super().__init__()
        self._channel = channel
        self._timeout_s = timeout_s
        self._lock = threading.Lock()

    def _ask(self, operation: str, keys: tuple[str, ...], **fields: Any) -> StoreReply:
        timeout_s = fields.pop("timeout_s", self._timeout_s)
        request = StoreRequest(operation=operation, keys=keys, timeout_s=timeout_s, **fields)  # type: ignore[arg-type]
        with self._lock:
            try:
                self._channel.send(request)
                reply = self._channel.receive(timeout_s + _REPLY_MARGIN_S)
            except (ChannelClosed, DeadlineError) as error:
                self._channel.close()  # a late reply must not answer the next request
                raise LiverError(f"store {operation} {list(keys)}: {error}") from error
        if not isinstance(reply, StoreReply):
            raise ProtocolError(f"store {operation}: wanted a store reply, got {reply.type}")
        if reply.error:
            raise DeadlineError(f"store {operation}: {reply.error}")
        return reply

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", (key,), value=_encoded(value))

    def get(self, key: str) -> bytes:
        return base64.b64decode(self._ask("get", (key,)).value)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", (key,), amount=amount).number

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = timeout.total_seconds() if timeout is not None else self._timeout_s
        self._ask("wait", tuple(keys), timeout_s=timeout_s)

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", tuple(keys)).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", (key,)).number)

    def close(self) -> None:
        self._channel.close()


def _encoded(value: str | bytes) -> str:
    data = value.encode() if isinstance(value, str) else bytes(value)
    return base64.b64encode(data).decode()
