"""The pool: answers by worker; one that fails, ends or does not answer is named, and all end."""

from __future__ import annotations

import os

import pytest

from benchmarks.transitions.pool import Pool
from liver_hpc.errors import DeadlineError, LiverError
from tests.benchmarks.transitions.plain import Plain


def test_answers_come_by_worker() -> None:
    with Pool(3, Plain) as pool:
        assert pool.call("count", 30.0, "number", 2) == [0, 2, 4]
        assert pool.call("count", 30.0, "number", 3) == [0, 3, 6]
        assert pool.seconds.keys() == {"number"}


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        (
            "fail",
            LiverError,
            r"worker 1, asked to play, failed:\n(.*\n)*ValueError: as it was told",
        ),
        ("end", LiverError, "worker 1, asked to play, ended: code 5"),
        ("wait", DeadlineError, r"waited 1 s for workers \[1\] to play"),
    ],
)
def test_a_worker_that_does_not_answer_is_named_and_no_process_stays(
    method: str, error: type[Exception], said: str
) -> None:
    limit_s = 1.0 if method == "wait" else 30.0
    with Pool(3, Plain) as pool:
        pids = [process.pid for process in pool._processes]
        with pytest.raises(error, match=said):
            pool.call("play", limit_s, method, 1)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
