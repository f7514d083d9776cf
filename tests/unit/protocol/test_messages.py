"""Messages on the wire: what training came to is carried as it is, what decides something is
finite."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from pydantic import ValidationError

from liver_hpc.protocol import messages as m
from liver_hpc.protocol.messages import Reply, StepDone, decode, encode
from liver_hpc.protocol.status import StatusSnapshot

NOT_FINITE = [math.nan, math.inf, -math.inf]


def strict(text: str | bytes) -> Any:
    """JSON as the standard has it, which knows neither NaN nor Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON: {text!r}")

    return json.loads(text, parse_constant=refuse)


def step_done(**changes: Any) -> StepDone:
    values: dict[str, Any] = {
        "worker": 0,
        "generation": 1,
        "step": 7,
        "loss": 2.5,
        "grad_norm": 1.0,
        "learning_rate": 1e-3,
        "tokens": 64,
        "started_s": 10.0,
        "ended_s": 10.5,
    }
    return StepDone(**values | changes)


def snapshot(loss: float) -> StatusSnapshot:
    return StatusSnapshot(
        run="r", state="training", step=8, steps=9, loss=loss, grad_norm=loss, tokens_per_s=1.0,
        step_s=0.5, generation=1, layout="tp1 pp1 dp1", workers=(0,), handoffs_done=0,
        handoffs_aborted=0, queued=(), handoff=None, last_event="", journal_error="", now_s=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["loss", "grad_norm", "learning_rate"])
@pytest.mark.parametrize("value", NOT_FINITE)
def test_what_a_step_came_to_is_carried_as_it_is(name: str, value: float) -> None:
    data = encode(step_done(**{name: value}))
    strict(data)
    got = decode(data)
    assert isinstance(got, StepDone)
    assert repr(getattr(got, name)) == repr(value)
    assert {**got.model_dump(), name: 0} == {**step_done().model_dump(), name: 0}


@pytest.mark.parametrize("value", NOT_FINITE)
def test_the_status_of_a_run_whose_loss_is_not_finite_reaches_its_reader(value: float) -> None:
    """As the coordinator sends it, and as `liver status --json` prints it."""
    data = encode(Reply(ok=True, text="", data=snapshot(value).model_dump()))
    strict(data)
    got = decode(data)
    assert isinstance(got, Reply)
    shown = StatusSnapshot.model_validate(got.data)
    assert (repr(shown.loss), repr(shown.grad_norm)) == (repr(value), repr(value))
    assert strict(shown.model_dump_json())["loss"] == {"nan": "NaN", "inf": "Infinity"}.get(
        str(value), "-Infinity"
    )


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", '"NaN"', '"inf"', "1e999"])
@pytest.mark.parametrize(
    "message",
    [
        '{"type": "drain", "node": "n1", "within_s": %s}',
        '{"type": "warned", "agent": "a", "signal": "SIGTERM", "at_s": %s}',
        '{"type": "store", "operation": "wait", "keys": ["k"], "timeout_s": %s}',
        '{"type": "prepared", "worker": 1, "generation": 1, "timings_s": {"groups": %s}}',
        '{"type": "first_step", "worker": 1, "generation": 1, "started_s": 1, "ended_s": %s}',
        '{"type": "hello", "worker": 1, "pid": 1, "host": "h", "booted_s": %s}',
    ],
)
def test_a_time_that_is_not_finite_is_refused(message: str, number: str) -> None:
    with pytest.raises(ValidationError, match="finite number"):
        decode((message % number).encode())


def test_a_step_whose_time_or_count_is_not_finite_is_refused() -> None:
    for name in ("started_s", "ended_s", "step", "tokens"):
        fields = step_done().model_dump() | {name: math.inf}
        with pytest.raises(ValidationError):
            decode(json.dumps(fields).encode())


def test_what_several_want_to_see_of_the_store_is_asked_for_once_and_told_to_each() -> None:
    def asked(number: int, operation: str, key: str, **fields: object) -> m.StoreRequest:
        values = {"number": number, "operation": operation, "keys": (key,), **fields}
        return m.StoreRequest.model_validate(values)

    together = m.StoreAsks.of(
        [
            (0, asked(7, "get", "a", timeout_s=5.0)),
            (1, asked(7, "get", "b", timeout_s=5.0)),
            (2, asked(9, "get", "a", timeout_s=5.0)),
            (3, asked(1, "get", "a", timeout_s=6.0)),
            (0, asked(8, "add", "n", amount=2)),
            (1, asked(8, "add", "n", amount=2)),
        ]
    )
    assert [(each.operation, each.keys, each.askers) for each in together.asks] == [
        ("get", ("a",), ((0, 7), (2, 9))),
        ("get", ("b",), ((1, 7),)),
        ("get", ("a",), ((3, 1),)),
        ("add", ("n",), ((0, 8),)),
        ("add", ("n",), ((1, 8),)),
    ]
    assert [each.amount for each in together.asks] == [0, 0, 0, 2, 2]
    answers = m.StoreAnswers(
        answers=(
            m.StoreAnswer(askers=((0, 7), (2, 9)), value="MQ=="),
            m.StoreAnswer(askers=((1, 8),), count=4),
        )
    )
    assert [*answers.replies()] == [
        (0, m.StoreReply(number=7, value="MQ==")),
        (2, m.StoreReply(number=9, value="MQ==")),
        (1, m.StoreReply(number=8, count=4)),
    ]
