"""Another thread waits for messages: it answers for the right one, and ends with who asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import OpType

from liver_hpc.errors import TransferError
from liver_hpc.transport import gloo_waits

SOON_S = 5.0


class _Message:
    def __init__(self, crosses: Callable[[], bool]) -> None:
        self.crosses = crosses

    def _get_op_type(self) -> int:
        return int(OpType.SEND)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(message: _Message, _timeout: timedelta) -> bool:
        return message.crosses()

    monkeypatch.setattr(gloo_waits, "_plain_wait", wait)
    monkeypatch.setattr(gloo_waits, "_LOOK_S", 0.02)


def _waiting() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == gloo_waits.MESSAGES}


def _until_new(count: int, before: set[threading.Thread]) -> None:
    """Those of other tests may end meanwhile."""
    until_s = time.monotonic() + SOON_S
    while len(_waiting() - before) != count and time.monotonic() < until_s:
        time.sleep(0.01)
    assert len(_waiting() - before) == count


def test_the_waiting_thread_ends_with_the_one_that_asks() -> None:
    before, seen = _waiting(), []

    def ask() -> None:
        for _ in range(3):
            assert gloo_waits.wait_for(_Message(lambda: True), lambda: False)
        seen.append(len(_waiting() - before))

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join(SOON_S)
    assert seen == [1]
    _until_new(0, before)


def test_a_message_that_was_given_up_answers_for_no_other() -> None:
    before, late = _waiting(), threading.Event()
    with pytest.raises(TransferError, match="closed"):
        gloo_waits.wait_for(_Message(late.wait), lambda: True)

    def fails() -> bool:
        late.set()
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="by peer"):
        gloo_waits.wait_for(_Message(fails), lambda: False)
    _until_new(1, before)


def test_a_wait_that_gloo_does_not_end_at_its_limit_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gloo_waits, "_LATE_S", 0.1)
    before, late = _waiting(), threading.Event()
    with pytest.raises(RuntimeError, match=r"not ended its wait after 0\.1 s"):
        gloo_waits.wait_for(_Message(late.wait), lambda: False, timedelta(seconds=0.1))
    late.set()
    _until_new(0, before)
