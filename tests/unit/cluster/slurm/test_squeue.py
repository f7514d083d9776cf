"""Questions that wait for squeue's turn are one question."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.errors import DeadlineError, LiverError
from tests.fakes import threads_refused
from tests.slurm_answers import Answer

JOBS = "1|1|RUNNING|None|9999999999|n1|run\n2|2|RUNNING|None|9999999999|n2|run\n"
STEPS = "1.0|liver-a0\n2.3|liver-a1\n"


class Controller:
    """Answers once it is let."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.comes = threading.Event()
        self.let = threading.Event()
        self.away = False

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        if words[0] != "squeue":
            return Answer(0, "")
        self.asked.append(list(words))
        self.comes.set()
        assert self.let.wait(10.0)
        if self.away:
            return Answer(1, "", "Unable to contact slurm controller (connect failure)")
        return Answer(0, STEPS if "--steps" in words else JOBS)


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def squeue(controller: Controller) -> Squeue:
    return Squeue(SlurmCommands(5.0, 0.0, run=controller), 5.0)


@contextmanager
def asking(*questions: Callable[[], Any]) -> Iterator[list[Any]]:
    answers: list[Any] = []

    def ask(question: Callable[[], Any]) -> None:
        try:
            answers.append(question())
        except (ControllerUnreachable, DeadlineError) as error:
            answers.append(error)

    threads = [threading.Thread(target=ask, args=(question,)) for question in questions]
    for thread in threads:
        thread.start()
    yield answers
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()


def test_all_who_come_meanwhile_get_one_answer(squeue: Squeue, controller: Controller) -> None:
    with asking(lambda: squeue.jobs(["1"])):
        assert controller.comes.wait(10.0)
        later = [lambda job=job: [*squeue.jobs([job])] for job in "12121212"]
        with asking(*later, lambda: squeue.steps("1", "liver-a0"), lambda: squeue.steps("2", "b")):
            threading.Event().wait(0.2)
            controller.let.set()
    which = [
        next(word for word in words if word.startswith("--jobs")) for words in controller.asked
    ]
    assert which == ["--jobs=1", "--jobs=1,2", "--jobs=1,2"]
    assert ["--steps" in words for words in controller.asked].count(True) == 1


def test_everybody_gets_what_was_asked_for(squeue: Squeue, controller: Controller) -> None:
    controller.let.set()
    assert [*squeue.jobs(["2"])] == ["2"]
    assert squeue.steps("1", "liver-a0") == ["1.0"]
    assert squeue.steps("1", "liver-a7") == []
    assert squeue.jobs([]) == {}


def test_who_cannot_wait_comes_first_and_waits_no_longer(
    squeue: Squeue, controller: Controller
) -> None:
    with asking(lambda: squeue.jobs(["1"])):
        assert controller.comes.wait(10.0)
        with asking(lambda: squeue.steps("1", "liver-a0")):
            with asking(lambda: squeue.jobs(["2"], urgent_s=0.3)) as urgent:
                threading.Event().wait(0.1)
            assert isinstance(urgent[0], DeadlineError)
            controller.let.set()
    assert ["--steps" in words for words in controller.asked] == [False, False, True]


def test_all_hear_of_a_controller_that_is_away(squeue: Squeue, controller: Controller) -> None:
    controller.away = True
    controller.let.set()
    with asking(lambda: squeue.jobs(["1"]), lambda: squeue.jobs(["2"])) as answers:
        pass
    assert [type(answer) for answer in answers] == [ControllerUnreachable] * 2
    controller.away = False
    assert [*squeue.jobs(["1"])] == ["1"]


def test_a_thread_that_cannot_be_started_costs_that_question_alone(
    squeue: Squeue, controller: Controller
) -> None:
    controller.let.set()
    with threads_refused(), pytest.raises(LiverError, match="can't start new thread"):
        squeue.jobs(["1"])
    assert list(squeue.jobs(["1"])) == ["1"]
