"""The store service: torch's Store semantics, and waits that block nobody."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence

import pytest

from liver_hpc.clock import FakeClock
from liver_hpc.coordinator.store import StoreService
from liver_hpc.protocol.messages import StoreAnswers, StoreAsks, StoreReply, StoreRequest, decode
from liver_hpc.rendezvous.channel import Part


def text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()


class Asker:
    """One at the other end of a channel, who asks and keeps the replies."""

    def __init__(self, store: StoreService) -> None:
        self._store = store
        self._number = 0
        self._replies: dict[int, StoreReply] = {}
        self.frames = 0

    @property
    def replies(self) -> dict[int, StoreReply]:
        self._store.flush()
        return self._replies

    def post(self, parts: Sequence[Part]) -> None:
        self.frames += 1
        for part in parts:
            answers = decode(part.data)
            assert isinstance(answers, StoreAnswers)
            self._replies |= {reply.number: reply for _, reply in answers.replies()}

    def begin(self, operation: str, *keys: str, **fields: object) -> int:
        """The number of a request, which may wait."""
        self._number += 1
        asked = {"number": self._number, "operation": operation, "keys": keys, **fields}
        self._store.ask(self, StoreAsks.of([(3, StoreRequest.model_validate(asked))]))
        return self._number

    def __call__(self, operation: str, *keys: str, **fields: object) -> StoreReply:
        number = self.begin(operation, *keys, **fields)
        return self.replies[number]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> Iterator[StoreService]:
    made = StoreService(clock, gather_s=1000.0)  # a test says when
    yield made
    made.close()


@pytest.fixture
def ask(store: StoreService) -> Asker:
    return Asker(store)


def test_set_and_get(ask: Asker) -> None:
    assert ask("set", "a", value=text("1")).error == ""
    assert ask("get", "a").value == text("1")


def test_add_counts_and_its_value_reads_as_decimal_text(ask: Asker) -> None:
    assert ask("add", "n", amount=3).count == 3
    assert ask("add", "n", amount=-1).count == 2
    assert ask("get", "n").value == text("2")
    ask("set", "n", value=text("40"))
    assert ask("add", "n", amount=2).count == 42


@pytest.mark.parametrize("value", [text("x"), "!!", ""])
def test_add_to_what_is_no_number_is_an_error(ask: Asker, value: str) -> None:
    ask("set", "n", value=value)
    assert ask("add", "n", amount=1).error == "add to n: its value is not a number"


def test_check_wants_all_keys(ask: Asker) -> None:
    ask("set", "a")
    assert ask("check", "a").count == 1
    assert ask("check", "a", "b").count == 0


def test_delete_says_whether_there_was_one(ask: Asker) -> None:
    ask("set", "a")
    assert ask("delete", "a").count == 1
    assert ask("delete", "a").count == 0


def test_several_are_got_and_deleted_at_once(ask: Asker) -> None:
    ask("set", "a", value=text("1"))
    number = ask.begin("get", "a", "b", timeout_s=10.0)
    assert number not in ask.replies
    ask("set", "b", value=text("2"))
    assert ask.replies[number].value == f"{text('1')},{text('2')}"
    assert ask("delete", "a", "b", "c").count == 2
    assert ask("check", "a").count == ask("check", "b").count == 0


def test_an_operation_on_one_key_refuses_several(ask: Asker) -> None:
    assert ask("set", "a", "b").error == "set takes one key, got ['a', 'b']"


def test_a_wait_ends_when_its_last_key_comes(ask: Asker) -> None:
    waits = [ask.begin("wait", "a", "b", timeout_s=10.0) for _ in range(3)]
    ask("set", "a")
    assert not set(waits) & ask.replies.keys()
    frames = ask.frames
    ask("add", "b", amount=1)
    assert [ask.replies[number].error for number in waits] == ["", "", ""]
    assert ask.frames == frames + 1  # with that of who has added


def test_a_get_waits_for_its_key(ask: Asker) -> None:
    number = ask.begin("get", "a", timeout_s=10.0)
    ask("set", "a", value=text("late"))
    assert ask.replies[number].value == text("late")


def test_a_wait_that_times_out_lists_the_missing_keys(
    ask: Asker, store: StoreService, clock: FakeClock
) -> None:
    ask("set", "b")
    number = ask.begin("wait", "a", "b", "c", timeout_s=5.0)
    later = ask.begin("get", "a", timeout_s=6.0)
    clock.advance(5.0)
    store.expire()
    assert ask.replies[number].error == "waited 5 s; missing keys ['a', 'c']"
    assert later not in ask.replies
    clock.advance(1.0)
    store.expire()
    assert "missing keys ['a']" in ask.replies[later].error
    assert not store._waits, "nothing is left of a wait that has ended"


def test_forget_drops_a_generations_keys_and_ends_its_waits(
    ask: Asker, store: StoreService
) -> None:
    for key in ("g1/a", "g1/b", "g10/a", "g2/a"):
        ask("set", key)
    gone, other = (ask.begin("wait", f"{g}/z", timeout_s=10.0) for g in ("g1", "g2"))
    store.forget("g1/")
    assert ask.replies[gone].error == "the keys under g1/ are gone; missing keys ['g1/z']"
    kept = [key for key in ("g1/a", "g1/b", "g10/a", "g2/a") if ask("check", key).count]
    assert kept == ["g10/a", "g2/a"]
    ask("set", "g2/z")
    assert ask.replies[other].error == ""


def test_a_key_that_is_deleted_meanwhile_is_waited_for_again(
    ask: Asker, store: StoreService
) -> None:
    number = ask.begin("wait", "a", "b", timeout_s=10.0)
    ask("set", "a")
    ask("delete", "a")
    ask("set", "b")
    assert number not in ask.replies
    ask("set", "a")
    assert ask.replies[number].error == ""
    assert not store._waits, "nothing is left of a wait that has ended"


def test_close_ends_every_wait(ask: Asker, store: StoreService) -> None:
    number = ask.begin("wait", "a", timeout_s=10.0)
    store.close()
    assert "the coordinator is shutting down" in ask.replies[number].error
    assert "the coordinator is shutting down" in ask("wait", "a", timeout_s=10.0).error
