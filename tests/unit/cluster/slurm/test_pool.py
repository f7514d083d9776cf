"""The pool's threads with a controller that is played: signals, strange answers, shared nodes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import TimeoutExpired

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.pool import SlurmPool
from liver_hpc.cluster.slurm.script import BURST_SCRIPT
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.config.schema import RunConfig
from liver_hpc.run.events import (
    BurstOver,
    NodeGone,
    NodeGranted,
    NodeWarned,
    PoolEvent,
    PoolNote,
)
from tests.slurm_answers import Answer

BURST = {"partition": "preempt", "max_nodes": 2, "backoff_s": 60.0}
NAMES = ("main", "left", "right")
LIMIT_S = 10.0


def own() -> list[Allocation]:
    return [
        Allocation(name, str(n + 1), (f"n{n + 1}",), 1, ("1", n), own=n == 0)
        for n, name in enumerate(NAMES)
    ]


class Controller:
    """squeue lists `jobs`, by a name those of `named`; else it succeeds and says nothing, or
    `says`."""

    def __init__(self) -> None:
        self.jobs = {n: f"{n}|1+{n - 1}|RUNNING|None|9999999999|n{n}|run" for n in (1, 2, 3)}
        self.named = ""
        self.says = {"sbatch": "9\n"}
        self.asked: list[list[str]] = []
        self.hold: Callable[[], None] = lambda: None

    def answers_if(self, answering: threading.Event) -> None:
        if not answering.is_set():
            raise TimeoutExpired("squeue", 1.0)

    def __call__(self, words: Sequence[str], limit_s: float) -> Answer:
        self.asked.append(list(words))
        if words[0] != "squeue":
            return Answer(0, self.says.get(words[0], ""))
        self.hold()
        if any(word.startswith("--name") for word in words):
            return Answer(0, self.named)
        return Answer(0, "".join(f"{line}\n" for line in self.jobs.values()))


class Watched:
    """A pool and what it has told."""

    def __init__(
        self, run_directory: Path, controller: Controller, poll_s: float, **burst: float
    ) -> None:
        components = [{"name": name} for name in NAMES]
        slurm = {"components": components, "burst": BURST | burst, "poll_s": poll_s}
        config = RunConfig.model_validate(
            {
                "data": {"text": "python-stdlib"},
                "train": {"steps": 1, "global_batch": 8},
                "workers": {"initial": 3, "max": 4},
                "layouts": {3: {}, 4: {}},
                "cluster": {"kind": "slurm", "slurm": slurm},
            }
        )
        clock = SystemClock()
        commands = SlurmCommands(5.0, 0.0, clock, controller)
        self.told: list[PoolEvent] = []
        squeue = Squeue(commands, 5.0)
        self.pool = SlurmPool(config, commands, squeue, own(), run_directory, clock)

    def until(self, condition: Callable[[], object], waits_for: str) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, f"{waits_for}; told: {self.told}")
        poll_until(lambda: bool(condition()), deadline)

    def notes(self) -> str:
        return "\n".join(event.text for event in self.told if isinstance(event, PoolNote))


@pytest.fixture
def controller() -> Controller:
    return Controller()


@pytest.fixture
def watch(tmp_path: Path, controller: Controller) -> Iterator[Callable[[float], Watched]]:
    watched: list[Watched] = []

    def start(poll_s: float) -> Watched:
        watched.append(Watched(tmp_path, controller, poll_s))
        watched[-1].pool.start(watched[-1].told.append)
        return watched[-1]

    yield start
    controller.jobs.clear()
    for one in watched:
        one.pool.close()


def test_signals_that_come_together_are_one_question(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    watched = watch(600.0)
    asked = len(controller.asked)
    questions: list[int] = []

    def slow() -> None:
        questions.append(1)
        if len(questions) == 1:  # the others come while the first one waits for its answer
            for node in ("n2", "n3", "n3"):
                watched.pool.warned(node, "SIGTERM", 2.0)

    controller.hold = slow
    watched.pool.warned("n2", "SIGTERM", 1.0)
    wanted = {"n2", "n3"}

    def warned() -> bool:
        return {e.node for e in watched.told if isinstance(e, NodeWarned)} == wanted

    watched.until(warned, "both warnings")
    assert len(controller.asked) - asked == 2
    assert "--jobs=2,3" in controller.asked[-1]


def test_a_node_whose_clock_is_ahead_has_no_later_deadline(
    watch: Callable[[float], Watched],
) -> None:
    watched, now_s = watch(600.0), SystemClock().now_s()
    watched.pool.warned("n2", "SIGTERM", now_s + 1000.0)
    watched.until(lambda: any(isinstance(e, NodeWarned) for e in watched.told), "the warning")
    (warned,) = (e for e in watched.told if isinstance(e, NodeWarned))
    assert warned.at_s < now_s + 900.0


def test_an_answer_that_makes_no_sense_is_told_and_watching_goes_on(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    lines = dict(controller.jobs)
    watched = watch(0.05)
    controller.jobs = {1: "something else"}
    watched.until(lambda: "wanted 7 fields" in watched.notes(), "the note")
    controller.jobs = {1: lines[1], 2: lines[2]}
    watched.until(lambda: "NodeGone" in str(watched.told), "the end of a component")


def test_what_another_coordinator_held_is_there_before_slurm_says_a_word(
    tmp_path: Path, controller: Controller
) -> None:
    """Once it does, what is gone is told, and what there is to know of partitions is asked."""
    answering = threading.Event()
    controller.hold = lambda: controller.answers_if(answering)
    watched = Watched(tmp_path, controller, 0.05)
    watched.pool.start(watched.told.append, adopt={"n1": None, "n3": None})
    try:
        assert [e.node.name for e in watched.told if isinstance(e, NodeGranted)] == ["n1", "n3"]
        watched.until(lambda: "does not answer" in watched.notes(), "the note")
        assert not [e for e in watched.told if isinstance(e, NodeGone)]
        del controller.jobs[3]
        controller.says["sinfo"] = "preempt|7|REQUEUE|n[4-9]\n"
        answering.set()
        watched.until(lambda: NodeGone in map(type, watched.told), "the end of a component")
        asked = [words[0] for words in controller.asked]
        watched.until(lambda: "scontrol" in asked, "what KillWait is")
    finally:
        controller.jobs.clear()
        watched.pool.close()


CONFIGURED = """\
PartitionName=spot GraceTime=600 PreemptMode=REQUEUE Nodes=n[1-3]
KillWait                = 30 sec
"""


def test_what_another_coordinators_nodes_were_warned_of_is_known(
    tmp_path: Path, controller: Controller
) -> None:
    """What was told is not told again, and what is over is withdrawn; a preemption of which that
    one has not heard is known by the grace time."""
    end_s = SystemClock().now_s() // 1 + 500.0
    for n in (2, 3):
        controller.jobs[n] = f"{n}|1+{n - 1}|RUNNING|None|{end_s:.0f}|n{n}|run"
    controller.says |= {"scontrol": CONFIGURED, "sinfo": "n1|mixed|\n"}
    watched = Watched(tmp_path, controller, 0.05)
    for held in watched.pool._own[1:]:
        held.partition = "spot"
    drained = NodeWarned("n1", "drained", 1.0, None)
    preempted = NodeWarned("n2", "preempted", 1.0, end_s)
    watched.pool.start(watched.told.append, {"n1": drained, "n2": preempted, "n3": None})
    try:
        told = lambda kind: [e for e in watched.told if isinstance(e, kind)]  # noqa: E731
        watched.until(lambda: len(told(NodeGranted)) == 4 and told(NodeWarned), "n1 to be as new")
        assert told(NodeGranted)[3].node.name == "n1"
        (warning,) = told(NodeWarned)
        assert (warning.node, warning.reason) == ("n3", "preempted")
        assert warning.deadline_s == end_s
    finally:
        controller.jobs.clear()
        watched.pool.close()


@pytest.mark.parametrize(
    ("known", "granted"), [({"n1"}, ["n1", "n4", "n5"]), ({"n1", "n5"}, ["n1", "n5"])]
)
def test_of_a_burst_job_there_are_the_nodes_that_the_run_has_not_lost(
    known: set[str], granted: list[str], tmp_path: Path, controller: Controller
) -> None:
    """All of one that was granted just before, of which it has not heard."""
    job = {"nodes": ["n4", "n5"], "since_s": 5.0}
    (tmp_path / "burst.json").write_text(json.dumps({"job_name": "b", "granted": {"9": job}}))
    watched = Watched(tmp_path, controller, 600.0)
    watched.pool.start(watched.told.append, adopt=dict.fromkeys(known))
    try:
        told = [e.node.name for e in watched.told if isinstance(e, NodeGranted)]
        assert told == granted
    finally:
        controller.jobs.clear()
        watched.pool.close()


def test_a_burst_job_on_a_node_that_is_held_already_goes_back(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    controller.jobs[9] = "9|9|RUNNING|None|9999999999|n2|run"  # once it is asked for
    watched = watch(0.05)
    watched.pool.want(1)
    watched.until(lambda: ["scancel", "9"] in controller.asked, "it to be cancelled")
    assert "burst job 9 goes back: n2 held already" in watched.notes()
    assert [e.node.name for e in watched.told if isinstance(e, NodeGranted)] == ["n1", "n2", "n3"]
    assert [words[0] for words in controller.asked].count("sbatch") == 1, "no back-off"


def test_where_slurm_does_not_answer_at_first_all_components_are_there(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    controller.hold = lambda: controller.answers_if(threading.Event())
    told = watch(600.0).told
    controller.hold = lambda: None
    assert [e.node.name for e in told if isinstance(e, NodeGranted)] == ["n1", "n2", "n3"]


def test_nodes_of_partitions_that_preempt_nobody_are_not_preemptible(
    tmp_path: Path, controller: Controller
) -> None:
    controller.says["scontrol"] = CONFIGURED + "PartitionName=stable GraceTime=0 PreemptMode=OFF\n"
    watched = Watched(tmp_path, controller, 600.0)
    for held, partition in zip(watched.pool._own[1:], ("spot", "stable"), strict=True):
        held.partition = partition
    watched.pool.start(watched.told.append)
    try:
        nodes = [event.node for event in watched.told if isinstance(event, NodeGranted)]
        assert [node.preemptible for node in nodes] == [False, True, False]
    finally:
        controller.jobs.clear()
        watched.pool.close()


def test_a_burst_job_that_has_ended_does_not_count_as_held(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    """Else no other one would be asked for in its place."""
    watched = watch(0.05)
    held = watched.pool._burst.policy.held
    watched.pool.want(1)
    watched.until(lambda: "sbatch" in [words[0] for words in controller.asked], "the request")
    controller.jobs[9] = "9|9|RUNNING|None|9999999999|n4|burst"
    watched.until(lambda: "9" in held, "the grant")
    del controller.jobs[9]
    watched.until(lambda: NodeGone("n4", "job 9 has ended") in watched.told, "its end")
    watched.until(lambda: "9" not in held, "its end to count")


@pytest.mark.parametrize("how", ["avoid", "reject", "drained"])
def test_a_node_that_is_of_no_use_does_not_count_as_held(
    how: str, tmp_path: Path, controller: Controller
) -> None:
    """Where others of its allocation are, that goes on to hold it."""
    watched = Watched(tmp_path, controller, 0.05, max_nodes=4, nodes_per_request=2)
    asked = lambda: [words[0] for words in controller.asked].count("sbatch")  # noqa: E731
    watched.pool.start(watched.told.append)
    try:
        watched.pool.want(2)
        watched.until(asked, "the request")
        controller.says["scontrol"] = "n4\nn5\n"
        controller.jobs[9] = "9|9|RUNNING|None|9999999999|n[4-5]|burst"
        watched.until(lambda: "9" in watched.pool._burst.policy.held, "the grant")
        assert asked() == 1
        if how == "avoid":
            watched.pool.avoid("n4")
        elif how == "reject":
            watched.pool.reject("n4", "its GPU is gone")
        else:
            controller.says["sinfo"] = "n4|ALLOCATED+DRAIN|\n"
        watched.until(lambda: asked() == 2, "another request")
    finally:
        controller.jobs.clear()
        watched.pool.close()


def test_a_withdrawn_request_that_a_lost_controller_has_forgotten_is_withdrawn_again(
    watch: Callable[[float], Watched], controller: Controller
) -> None:
    """It is as its last saved state has it, and nobody would use what it grants."""
    answers = threading.Event()
    watched = watch(0.05)
    controller.hold = lambda: controller.answers_if(answers)
    watched.until(lambda: "does not answer" in watched.notes(), "the controller to be missed")
    controller.named = "9|9|PENDING|Resources|0||burst\n"
    answers.set()
    watched.until(lambda: ["scancel", "9"] in controller.asked, "it to be cancelled")
    controller.named = ""


@pytest.mark.parametrize("adopts", [False, True])
def test_that_no_burst_nodes_are_asked_for_any_more_is_told_once(
    adopts: bool, tmp_path: Path, controller: Controller
) -> None:
    """At a start that finds the cap used up, before its first launch is allowed."""
    (tmp_path / "burst.json").write_text(json.dumps({"job_name": "b", "node_hours": 2.0}))
    watched = Watched(tmp_path, controller, 0.05, node_hours=2.0)
    known = {"n1": None, "n2": None, "n3": None} if adopts else None
    watched.pool.start(watched.told.append, known)
    try:
        told = lambda: [each for each in watched.told if isinstance(each, BurstOver)]  # noqa: E731
        assert adopts or told()
        asked = len(controller.asked)
        watched.until(lambda: len(controller.asked) > asked + 5, "some polls")
        (over,) = told()
        assert "2.00 of 2 node hours are used" in over.reason
    finally:
        controller.jobs.clear()
        watched.pool.close()


def test_a_cap_that_is_used_up_later_is_told_then(tmp_path: Path, controller: Controller) -> None:
    watched = Watched(tmp_path, controller, 0.05, node_hours=2.0)
    watched.pool.start(watched.told.append)
    try:
        asked = len(controller.asked)
        watched.until(lambda: len(controller.asked) > asked + 3, "some polls")
        assert BurstOver not in map(type, watched.told)
        watched.pool._burst.policy.spent_node_hours = 2.0
        watched.until(lambda: BurstOver in map(type, watched.told), "its end")
    finally:
        controller.jobs.clear()
        watched.pool.close()


def test_where_burst_requests_cannot_be_made_ready_none_will_be_made(
    tmp_path: Path, controller: Controller
) -> None:
    (tmp_path / BURST_SCRIPT).mkdir()  # where the requests' script would be
    watched = Watched(tmp_path, controller, 600.0)
    watched.pool.start(watched.told.append)
    try:
        (over,) = (each for each in watched.told if isinstance(each, BurstOver))
        assert BURST_SCRIPT in over.reason
    finally:
        controller.jobs.clear()
        watched.pool.close()
