"""The store service: torch's Store semantics, and waits that block nobody."""

from __future__ import annotations

import base64
import threading
from collections.abc import Iterator

import pytest

from liver_hpc.coordinator.store import StoreService
from liver_hpc.protocol.messages import StoreReply, StoreRequest


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


class Waiter:
    """A request in a thread of its own."""

    def __init__(self, store: StoreService, request: StoreRequest) -> None:
        self.reply: StoreReply | None = None
        self._thread = threading.Thread(target=self._run, args=(store, request), daemon=True)
        self._thread.start()

    def _run(self, store: StoreService, request: StoreRequest) -> None:
        self.reply = store.perform(request)

    def result(self) -> StoreReply:
        self._thread.join(10.0)
        assert self.reply is not None, "the wait goes on"
        return self.reply


@pytest.fixture
def store() -> Iterator[StoreService]:
    store = StoreService()
    yield store
    store.close()


def ask(store: StoreService, operation: str, *keys: str, **fields: object) -> StoreReply:
    request = {"operation": operation, "keys": keys, **fields}
    return store.perform(StoreRequest.model_validate(request))


def test_set_and_get(store: StoreService) -> None:
    assert ask(store, "set", "a", value=text("1")) == StoreReply()
    assert ask(store, "get", "a").value == text("1")


def test_add_counts_and_its_value_reads_as_decimal_text(store: StoreService) -> None:
    assert ask(store, "add", "n", amount=3).number == 3
    assert ask(store, "add", "n", amount=-1).number == 2
    assert ask(store, "get", "n").value == text("2")
    ask(store, "set", "n", value=text("40"))
    assert ask(store, "add", "n", amount=2).number == 42


@pytest.mark.parametrize("value", [text("x"), "!!", ""])
def test_add_to_what_is_no_number_is_an_error(store: StoreService, value: str) -> None:
    ask(store, "set", "n", value=value)
    assert ask(store, "add", "n", amount=1).error == "add to n: its value is not a number"


def test_check_wants_all_keys(store: StoreService) -> None:
    ask(store, "set", "a")
    assert ask(store, "check", "a").number == 1
    assert ask(store, "check", "a", "b").number == 0


def test_delete_says_whether_there_was_one(store: StoreService) -> None:
    ask(store, "set", "a")
    assert ask(store, "delete", "a").number == 1
    assert ask(store, "delete", "a").number == 0


def test_an_operation_on_one_key_refuses_several(store: StoreService) -> None:
    assert ask(store, "get", "a", "b").error == "get takes one key, got ['a', 'b']"


def test_a_wait_ends_when_its_last_key_comes_and_holds_nobody_up(store: StoreService) -> None:
    request = StoreRequest(operation="wait", keys=("a", "b"), timeout_s=10.0)
    waiters = [Waiter(store, request) for _ in range(3)]
    ask(store, "set", "a")
    assert ask(store, "check", "a").number == 1
    ask(store, "add", "b", amount=1)
    assert [waiter.result().error for waiter in waiters] == ["", "", ""]


def test_a_get_waits_for_its_key(store: StoreService) -> None:
    waiter = Waiter(store, StoreRequest(operation="get", keys=("a",), timeout_s=10.0))
    ask(store, "set", "a", value=text("late"))
    assert waiter.result().value == text("late")


def test_a_wait_that_times_out_lists_the_missing_keys(store: StoreService) -> None:
    ask(store, "set", "b")
    reply = ask(store, "wait", "a", "b", "c", timeout_s=0.05)
    assert reply.error == "waited 0.05 s; missing keys ['a', 'c']"
    assert "missing keys ['a']" in ask(store, "get", "a", timeout_s=0.0).error


def test_forget_drops_a_generations_keys_and_ends_its_waits(store: StoreService) -> None:
    for key in ("g1/a", "g1/b", "g10/a", "g2/a"):
        ask(store, "set", key)
    waiter = Waiter(store, StoreRequest(operation="wait", keys=("g1/z",), timeout_s=10.0))
    other = Waiter(store, StoreRequest(operation="wait", keys=("g2/z",), timeout_s=10.0))
    while len(store._waits) < 2:  # both have to be waiting
        threading.Event().wait(0.001)
    store.forget("g1/")
    assert waiter.result().error == "the keys under g1/ are gone; missing keys ['g1/z']"
    kept = [key for key in ("g1/a", "g1/b", "g10/a", "g2/a") if ask(store, "check", key).number]
    assert kept == ["g10/a", "g2/a"]
    ask(store, "set", "g2/z")
    assert other.result().error == ""


def test_a_key_that_is_deleted_meanwhile_is_waited_for_again(store: StoreService) -> None:
    waiter = Waiter(store, StoreRequest(operation="wait", keys=("a", "b"), timeout_s=10.0))
    while not store._waits:
        threading.Event().wait(0.001)
    ask(store, "set", "a")
    ask(store, "delete", "a")
    ask(store, "set", "b")
    assert waiter.reply is None
    ask(store, "set", "a")
    assert waiter.result().error == ""
    assert not store._waits, "nothing is left of a wait that has ended"


def test_a_wait_is_not_woken_for_the_keys_of_others(
    store: StoreService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers by the thousand wait at once: each of them woken for every key is their square."""
    woken = 0
    notify = threading.Condition.notify

    def counted(self: threading.Condition, n: int = 1) -> None:
        nonlocal woken
        woken += 1
        notify(self, n)

    waiters = [
        Waiter(store, StoreRequest(operation="get", keys=(f"k{n}",), timeout_s=10.0))
        for n in range(20)
    ]
    while len(store._waits) < len(waiters):
        threading.Event().wait(0.001)
    monkeypatch.setattr(threading.Condition, "notify", counted)
    for n in range(20):
        ask(store, "set", f"k{n}", value=text(str(n)))
    monkeypatch.undo()
    assert [waiter.result().value for waiter in waiters] == [text(str(n)) for n in range(20)]
    assert woken <= 2 * len(waiters), "one each, and the threads' own ends"


def test_close_ends_every_wait(store: StoreService) -> None:
    waiter = Waiter(store, StoreRequest(operation="wait", keys=("a",), timeout_s=10.0))
    store.close()
    assert "the coordinator is shutting down" in waiter.result().error
