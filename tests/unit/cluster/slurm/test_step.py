"""A step of agents, by what a stand-in for srun says of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.launcher import KILLED
from liver_hpc.cluster.slurm import step as module
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.cluster.slurm.step import Step, StepPlan
from liver_hpc.cluster.slurm.together import STEP_VARIABLE
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Command
from tests.fakes import threads_refused

NOTICE = "srun: Received task exit notification for 1 task of StepId=7.0 (status=0x00fd)."
OUT_OF_MEMORY = f"{NOTICE}\nsrun: error: n1: task 0: Out Of Memory\n{NOTICE}"
LIMIT_S = 30.0


said_to_slurm: list[Sequence[str]] = []


def played(words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Of the step nothing is left on n1 and n2."""
    said_to_slurm.append(words)
    shown = ""
    if words[0] == "look":
        shown = "".join(f"{node}\n" for node in words[1:] if node in ("n1", "n2"))
    if words[0] == "squeue":
        shown = "7.0|liver-a1\n"
    return subprocess.CompletedProcess(list(words), 0, shown, "")


Begin = Callable[..., Step]


@pytest.fixture
def step(tmp_path: Path) -> Iterator[Begin]:
    """Of agents a1, a2 and a3 on n1, n2 and n3: its srun says something, and goes on."""
    ended, silent = tmp_path / "ended", tmp_path / "silent"

    def answer(words: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
        done = subprocess.CompletedProcess(list(words), 0, "", "")
        if silent.exists():
            said_to_slurm.append(words)
            return subprocess.CompletedProcess(list(words), 1, "", "Socket timed out")
        return done if ended.exists() else played(words, limit_s)

    def begin(
        said: str, start: bool = True, leads: bool = False, unreachable_s: float = 5.0
    ) -> Step:
        script = f"trap 'echo forced' TERM; echo '{said}'; "
        script += f"while ! test -e {ended}; do sleep 0.1; done"
        command = Command("srun", ["sh", "-c", script], log=tmp_path / "srun.log")
        agents = {f"n{number}": f"a{number}" for number in (1, 2, 3)}
        plan = StepPlan(
            "liver-a1",
            "7",
            agents,
            command,
            lambda nodes: ["kill", *nodes],
            lambda nodes: ["look", *nodes],
            leads,
        )
        made = Step(plan, Squeue(SlurmCommands(1.0, 0.0, run=answer), 1.0), unreachable_s)
        if start:
            made.start()
        return made

    yield begin
    ended.touch()


@pytest.mark.parametrize("asked", [True, False])
def test_one_that_ends_out_of_memory_as_another_has_is_found(asked: bool, step: Begin) -> None:
    """srun names the first alone. Asked to end, or not."""
    agents = step(OUT_OF_MEMORY).agents
    if asked:
        agents["a2"].kill()
    deadline = Deadline.after(SystemClock(), LIMIT_S, "the end of a2")
    poll_until(lambda: agents["a2"].exit_code is not None, deadline)
    assert [agents[name].exit_code for name in ("a1", "a2", "a3")] == [KILLED, KILLED, None]


def test_a_step_that_no_thread_can_keep_is_not_started_and_can_be_again(
    step: Begin, tmp_path: Path
) -> None:
    made = step("it runs", start=False)
    with threads_refused("keep-"), pytest.raises(LiverError, match="can't start new thread"):
        made.start()
    assert not (tmp_path / "srun.log").exists()
    made.start()
    log = tmp_path / "srun.log"
    poll_until(log.exists, Deadline.after(SystemClock(), LIMIT_S, "the srun"))


def test_a_step_that_was_left_and_that_no_thread_can_keep_is_not_taken_for_kept(
    step: Begin,
) -> None:
    agents = step("", start=False).agents
    with threads_refused("keep-"):
        for agent in agents.values():
            with pytest.raises(LiverError, match="can't start new thread"):
                agent.adopt("", 0)
    assert agents["a1"].adopt("", 0)


def test_what_was_left_is_not_taken_for_ended_while_the_controller_does_not_answer(
    step: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However long that is: nothing changes. Nor after this process has stood still for as long."""
    monkeypatch.setattr("liver_hpc.cluster.slurm.step._ADOPTED_LOOK_S", 0.02)
    silent, said_before = tmp_path / "silent", len(said_to_slurm)
    silent.touch()
    agents = step("", start=False, unreachable_s=0.1).agents
    assert agents["a1"].adopt("", 0)
    deadline = Deadline.after(SystemClock(), LIMIT_S, "questions to Slurm")
    poll_until(lambda: len(said_to_slurm) >= said_before + 20, deadline)
    assert [agent.exit_code for agent in agents.values()] == [None] * 3
    (tmp_path / "ended").touch()
    silent.unlink()
    poll_until(lambda: agents["a1"].exit_code is not None, deadline)
    assert agents["a1"].exit_code == KILLED


def test_slurm_is_not_asked_again_and_again_for_a_step_that_was_left(
    step: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may go on for weeks."""
    monkeypatch.setattr(module, "_ADOPTED_LOOK_S", 0.1)
    monkeypatch.setattr(module, "_ADOPTED_ASK_S", 2.4)
    said_to_slurm.clear()
    agents = step("", start=False).agents
    assert all(agent.adopt("", 0) for agent in agents.values())
    time.sleep(2.0)
    assert [words[0] for words in said_to_slurm] == ["squeue"]
    deadline = Deadline.after(SystemClock(), LIMIT_S, "another question")
    poll_until(lambda: len(said_to_slurm) == 2, deadline)


def test_an_agent_for_whose_kill_there_is_no_thread_is_killed_later(
    step: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    said_to_slurm.clear()
    agents = step("it runs").agents
    with threads_refused("kill-"):
        agents["a2"].kill()
        agents["a2"].kill()
    assert caplog.text.count("step liver-a1: agents are killed later: kill-liver-a1: can't") == 1
    deadline = Deadline.after(SystemClock(), LIMIT_S, "the kill of a2")
    poll_until(lambda: ["kill", "n2"] in said_to_slurm, deadline)


def test_an_srun_that_has_no_step_yet_ends_once_all_its_agents_are_killed(
    step: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may wait for a node for ever."""
    monkeypatch.setattr(module, "_SRUN_END_S", 0.2)
    monkeypatch.setattr(module, "_STEP_GRACE_S", 0.2)
    nothing = subprocess.CompletedProcess([], 0, "", "")
    monkeypatch.setitem(globals(), "played", lambda words, limit_s: nothing)
    agents = step("waits for resources").agents
    for agent in agents.values():
        agent.kill()
    deadline = Deadline.after(SystemClock(), LIMIT_S, "the srun to end")
    poll_until(lambda: all(agent.exit_code is not None for agent in agents.values()), deadline)


def test_a_killed_step_that_leads_a_job_of_several_components_ends_without_its_srun(
    step: Begin, tmp_path: Path
) -> None:
    """Slurm 25.11 cancels such a job where an srun kills its step."""
    said_to_slurm.clear()
    for agent in step("it runs", leads=True).agents.values():
        agent.kill()
    killed = ["scancel", "--signal=KILL", "7.0"]
    deadline = Deadline.after(SystemClock(), LIMIT_S, "another scancel")
    poll_until(lambda: said_to_slurm.count(killed) == 2, deadline)
    assert "forced" not in (tmp_path / "srun.log").read_text()


def test_a_look_names_the_node_on_which_nothing_of_a_step_is_left(repository: Path) -> None:
    told = {**os.environ, "PYTHONPATH": str(repository), "SLURMD_NODENAME": "n1"}
    words = [sys.executable, "-m", "liver_hpc.node.kill_task", f"liver-{os.getpid()}", "--look"]
    marked = {**os.environ, STEP_VARIABLE: words[-2]}
    with subprocess.Popen(["sleep", "60"], env=marked) as left:
        assert subprocess.check_output(words, env=told, text=True) == ""
        left.kill()
    assert subprocess.check_output(words, env=told, text=True) == "n1\n"
