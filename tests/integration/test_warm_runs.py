"""Runs whose workers are forked from a warm process, and such as cannot have any."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from liver_hpc.cli.client import request
from liver_hpc.protocol.messages import ReplaceRequest, ResizeRequest
from liver_hpc.run.directory import RunDirectory
from tests.integration.noting_rehearsals import REHEARSALS, STEPS
from tests.integration.runs import (
    ENDLESS,
    finish,
    processes_of,
    run_config,
    start,
    stop_and_read,
    wait_until,
    watch,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("unhurried_steps")]

NOTING = "tests.integration.noting_rehearsals:NotingGPT"
EXECUTED = "no warm process, workers are executed: "
SET = """
import os, time
real = time.time
time.time = lambda: real() + (900.0 if os.path.exists({path!r}) else 0.0)
"""


def running(run: RunDirectory, module: str) -> list[psutil.Process]:
    return [process for process in processes_of(run) if module in process.cmdline()]


def agent_logs(run: RunDirectory) -> list[str]:
    return [path.read_text() for path in sorted(run.path.glob("logs/agent-*.log"))]


def notes(run: RunDirectory, what: str) -> dict[int, str]:
    """By process: whether what a loss imports had been imported before its first one."""
    return {int(path.name): path.read_text() for path in (run.path / what).iterdir()}


def test_one_agent_rehearses_once_and_forks_all_workers_and_executes_when_it_cannot(
    tmp_path: Path,
) -> None:
    run = start(run_config(tmp_path, ENDLESS, recipe=NOTING))
    watch(run, lambda status: status.step >= 1, 60.0)
    request(run, ResizeRequest(workers=4))
    watch(run, lambda status: status.handoffs_done == 1, 60.0)
    (agent,) = running(run, "liver_hpc.node.agent")
    (warm,) = running(run, "liver_hpc.worker.warm")
    workers = running(run, "liver_hpc.worker.main")
    assert len(workers) == 4
    assert {process.ppid() for process in (warm, *workers)} == {agent.pid}
    assert all(worker.create_time() > warm.create_time() for worker in workers)
    (rehearsed,) = notes(run, REHEARSALS).items()  # in a child that has ended
    assert rehearsed == (rehearsed[0], "False")
    steps = notes(run, STEPS)
    assert steps == {worker.pid: "True" for worker in workers}
    assert rehearsed[0] not in steps
    warm.kill()
    wait_until(lambda: f"{EXECUTED}it has ended" in agent_logs(run)[0], 20.0, "the agent to know")
    request(run, ReplaceRequest(replace=0))
    watch(run, lambda status: status.handoffs_done == 2, 90.0)
    assert {*workers} & {*running(run, "liver_hpc.worker.main")}  # its end ended no worker
    (executed,) = {*running(run, "liver_hpc.worker.main")} - {*workers}
    assert notes(run, REHEARSALS) == dict([rehearsed]) | {executed.pid: "False"}
    records = stop_and_read(run)
    assert [(r.outcome, r.digest_equal) for r in records.reconfigurations] == [
        ("completed", True),
        ("completed", True),
    ]
    assert [each.generation for each in records.networks] == [0, 1, 2]
    assert {each.transport for each in records.networks} == {"gloo tcp"}
    assert all("lo/127.0.0.1" in each.detail for each in records.networks)
    wait_until(lambda: not processes_of(run), 20.0, "the run's processes to end")


def test_a_machine_whose_clock_is_set_or_that_slept_shows_no_other_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process goes on by the clock that it began with; what starts later would have another."""
    (tmp_path / "sitecustomize.py").write_text(SET.format(path=str(tmp_path / "set")))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run = start(run_config(tmp_path, ENDLESS))
    watch(run, lambda status: status.step >= 1, 60.0)
    (tmp_path / "set").touch()
    request(run, ReplaceRequest(replace=0))
    watch(run, lambda status: status.handoffs_done == 1, 60.0)
    (handoff,) = stop_and_read(run).reconfigurations
    took_s = handoff.first_step_ended_s - handoff.source_last_step_ended_s
    assert 0.0 < took_s < 60.0


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("threaded:ThreadedGPT", "the warm process: it has 2 threads"),
        ("opening:OpeningGPT", f"has opened {Path(__file__).with_name('opening.py')} as it was"),
    ],
)
def test_a_recipe_that_workers_cannot_share_is_executed(
    recipe: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LIVER_TEST_STEP_S")
    run = start(run_config(tmp_path, 3, recipe=f"tests.integration.{recipe}"))
    finish(run)
    (log,) = agent_logs(run)
    assert EXECUTED in log
    assert why in log


@pytest.mark.long
def test_without_warm_processes_every_launch_has_an_agent_of_its_own(tmp_path: Path) -> None:
    run = start(run_config(tmp_path, ENDLESS, workers={"warm": False}))
    watch(run, lambda status: status.step >= 1, 60.0)
    request(run, ReplaceRequest(replace=0))
    watch(run, lambda status: status.handoffs_done == 1, 90.0)
    assert len(running(run, "liver_hpc.node.agent")) == 2
    assert not running(run, "liver_hpc.worker.warm")
    stop_and_read(run)
    assert len(agent_logs(run)) == 2
