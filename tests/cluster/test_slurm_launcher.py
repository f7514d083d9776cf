"""Agents as steps of a real Slurm: beside each other, killed, lost, orphaned."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from liver_hpc.cluster.launcher import KILLED
from tests.cluster.driven import (
    DrivenRun,
    driven,
    processes_with,
    start_controller,
    stop_controller,
    wait_for,
)
from tests.cluster.harness import SlurmCluster

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(150)]

# Says what it sees, has a child that has left its session, ignores SIGTERM, and ends as told.
AGENT = """
import json, os, pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
here = pathlib.Path(sys.argv[0]).parent
together = json.loads(pathlib.Path(sys.argv[sys.argv.index("--together") + 1]).read_text())
own = together[os.environ["SLURMD_NODENAME"]]
name = own["agent"]
child = subprocess.Popen(["setsid", "sleep", "611", ])
seen = {
    "host": os.uname().nodename, "words": sys.argv[1:], "pid": os.getpid(),
    "gpus": os.environ.get("CUDA_VISIBLE_DEVICES"), "job": os.environ.get("SLURM_JOB_ID"),
    "slots": own["slots"], "task": os.environ.get("SLURM_PROCID"),
    "pmi": [name for name in os.environ if name.startswith("PMI")],
}
(here / f"{name}.new").write_text(json.dumps(seen))
(here / f"{name}.new").rename(here / f"{name}.up")
while not (here / f"{name}.end").exists():
    time.sleep(0.05)
child.kill()
sys.exit(int((here / f"{name}.end").read_text()))
"""

MAIN = {"name": "main", "partition": "stable", "nodes": 1, "gpus_per_node": 2}
EXTRA = {"name": "extra", "partition": "preempt", "nodes": 1, "gpus_per_node": 2}
TIME = ("--time=10", "--gpus-per-node=2", "--no-kill", "--nodes=1")


@pytest.fixture
def run(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[DrivenRun]:
    """A het job of two components on a node each, all GPUs included."""
    slurm = {"components": [MAIN, EXTRA], "burst": {"partition": "preempt", "max_nodes": 1}}
    with driven(slurm_cluster, request.node.name, slurm) as run:
        (run.path / "agent.py").write_text(AGENT, encoding="utf-8")
        run.submit(("--partition=stable", *TIME), ("--partition=preempt", *TIME))
        run.start()
        yield run
    wait_for(lambda: not living(run), 10.0, "the agents' processes to end")


@pytest.fixture
def both(slurm_cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[DrivenRun]:
    """A job of two nodes."""
    slurm = {"components": [{**MAIN, "nodes": 2}]}
    with driven(slurm_cluster, request.node.name, slurm) as run:
        (run.path / "agent.py").write_text(AGENT, encoding="utf-8")
        run.submit(("--partition=stable", "--time=10", "--no-kill", "--nodes=2"))
        run.start()
        yield run
    wait_for(lambda: not living(run), 10.0, "the agents' processes to end")


def living(run: DrivenRun) -> list[str]:
    """What lives of the run's agents: their names, and "child" for every child of theirs."""
    script = str(run.path / "agent.py")
    # srun has the same words on its command line, further behind
    agents = [each for each in processes_with(script) if each.info["cmdline"][1] == script]
    return sorted([*map(name_of, agents), *("child" for _ in processes_with("sleep", "611"))])


def name_of(agent: psutil.Process) -> str:
    words = agent.info["cmdline"]
    together = json.loads(Path(words[words.index("--together") + 1]).read_text(encoding="utf-8"))
    return str(together[agent.environ()["SLURMD_NODENAME"]]["agent"])


def node_of(run: DrivenRun, allocation: str) -> str:
    return str(run.told("NodeGranted", allocation=allocation)[0]["node"]["name"])


def launch(run: DrivenRun, agent: str, node: str) -> dict[str, Any]:
    """Starts an agent; what it sees."""
    run.ask("launch", [agent, node])
    return came_up(run, agent)


def came_up(run: DrivenRun, agent: str, limit_s: float = 15.0) -> dict[str, Any]:
    path = run.path / f"{agent}.up"
    try:
        wait_for(path.exists, limit_s, f"agent {agent}")
    except Exception as error:
        logs = [log.read_text(encoding="utf-8") for log in (run.path / "logs").glob("*.log")]
        raise AssertionError("\n".join([str(error), *logs])) from error
    seen = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(seen, dict)
    return seen


def end(run: DrivenRun, agent: str, code: int) -> None:
    new = run.path / f"{agent}.end.new"
    new.write_text(str(code), encoding="utf-8")
    new.rename(run.path / f"{agent}.end")


def ended(run: DrivenRun, agent: str, limit_s: float = 15.0) -> int:
    wait_for(lambda: not run.ask("alive", agent), limit_s, f"the end of {agent}")
    return int(run.ask("exit_code", agent))


def step_names(run: DrivenRun) -> set[str]:
    """Of all steps on the cluster, the batch scripts left out."""
    names = run.cluster.run("squeue", "--noheader", "--steps", "--format=%j").split()
    return {name for name in names if name.startswith("liver-")}


def test_agents_start_beside_each_other_and_see_the_whole_node(run: DrivenRun) -> None:
    main, extra = node_of(run, "main"), node_of(run, "extra")
    run.ask("want", 1)
    burst = run.wait_told("NodeGranted", burst=True)["node"]["name"]
    for agent, node in (("a", main), ("b", main), ("c", extra), ("d", extra)):
        seen = launch(run, agent, node)
        assert (seen["host"], seen["gpus"], seen["pmi"]) == (node, "0,1", [])
        assert (seen["words"][-2:], seen["slots"]) == (["--warnings", "--stay"], [0])
    assert launch(run, "e", burst)["host"] == burst
    assert step_names(run) == {"liver-a", "liver-b", "liver-c", "liver-d", "liver-e"}
    end(run, "c", 0)
    assert ended(run, "c") == 0
    assert launch(run, "f", extra)["host"] == extra  # after another one
    end(run, "d", 87)
    assert ended(run, "d") == 87
    assert all(run.ask("alive", agent) for agent in ("a", "b", "e", "f"))
    run.ask("close")
    assert step_names(run) == set()


def test_a_killed_agent_is_gone_with_all_it_started_and_others_stay(run: DrivenRun) -> None:
    main, extra = node_of(run, "main"), node_of(run, "extra")
    for agent, node in (("a", main), ("b", main), ("c", extra)):
        launch(run, agent, node)
    assert living(run) == ["a", "b", "c", "child", "child", "child"]
    for agent in ("a", "c"):
        run.ask("kill", agent)
        assert ended(run, agent) == KILLED
        assert agent not in living(run)
    assert living(run) == ["b", "child"]
    assert step_names(run) == {"liver-b"}
    run.ask("close")
    assert living(run) == []


def test_an_agent_that_is_killed_at_once_never_comes_up_later(run: DrivenRun) -> None:
    run.ask("launch", ["a", node_of(run, "extra")])
    run.ask("kill", "a")
    assert ended(run, "a") != 0
    assert step_names(run) == set()
    assert living(run) == []


def test_steps_outlive_a_killed_coordinator_and_belong_to_the_next_one(run: DrivenRun) -> None:
    main, extra = node_of(run, "main"), node_of(run, "extra")
    launch(run, "a", main)
    launch(run, "c", extra)
    run.kill()
    run.start(adopt=True)
    assert step_names(run) == {"liver-a", "liver-c"}
    assert run.ask("adopt", "a", main)
    assert run.ask("adopt", "c", extra)
    assert not run.ask("adopt", "z", extra)
    assert run.ask("alive", "a")
    run.ask("kill", "a")
    assert ended(run, "a") == KILLED
    assert step_names(run) == {"liver-c"}
    run.ask("close")
    wait_for(lambda: not step_names(run), 5.0, "the steps to end")
    wait_for(lambda: not living(run), 5.0, "the agents' processes to end")


def test_agents_on_all_nodes_of_an_allocation_are_one_step(both: DrivenRun) -> None:
    first, second = (event["node"]["name"] for event in both.told("NodeGranted"))
    both.ask("launch", ["a", first], ["b", second])
    seen = {name: came_up(both, name) for name in ("a", "b")}
    assert [seen["a"]["host"], seen["b"]["host"]] == [first, second]
    assert {one["task"] for one in seen.values()} == {"0", "1"}
    assert step_names(both) == {"liver-a"}
    end(both, "a", 0)
    assert ended(both, "a") == 0, "its end is told while the other one goes on"
    assert both.ask("alive", "b")
    assert launch(both, "c", first)["host"] == first
    assert step_names(both) == {"liver-a", "liver-c"}
    end(both, "b", 87)
    assert ended(both, "b") == 87
    assert step_names(both) == {"liver-c"}
    both.ask("close")
    assert step_names(both) == set()


def test_one_agent_of_a_step_is_killed_and_the_others_are_adopted(both: DrivenRun) -> None:
    first, second = (event["node"]["name"] for event in both.told("NodeGranted"))
    both.ask("launch", ["a", first], ["b", second])
    for name in ("a", "b"):
        came_up(both, name)
    both.ask("kill", "b")
    assert ended(both, "b") == KILLED
    assert both.ask("alive", "a")
    wait_for(lambda: living(both) == ["a", "child"], 5.0, "the killed one to be gone")
    both.kill()
    both.start(adopt=True)
    assert both.ask("adopt", "a", first)
    assert not both.ask("adopt", "b", second), "its end is in the log"
    end(both, "a", 87)
    assert ended(both, "a") == 87
    both.ask("close")


def test_one_whose_end_srun_does_not_tell_is_found(both: DrivenRun) -> None:
    """As srun says it of the second that ends out of memory, which the test cluster cannot have."""
    first, second = (event["node"]["name"] for event in both.told("NodeGranted"))
    both.ask("launch", ["a", first], ["b", second])
    for name in ("a", "b"):
        came_up(both, name)
    both.kill()
    script = str(both.path / "agent.py")
    agents = [each for each in processes_with(script) if each.info["cmdline"][1] == script]
    (agent,) = [each for each in agents if name_of(each) == "b"]
    for process in (*agent.children(), agent):
        process.kill()
    (log,) = (both.path / "logs").glob("srun-*.log")
    told = f"srun: error: {second}: task 1: Killed"
    wait_for(lambda: told in log.read_text(), 10.0, "srun's word")
    said = log.read_text().replace(f"{told}\n", "")
    log.write_text(re.sub(r"\(status=0x\w+\)", "(status=0x00fd)", said))
    both.start(adopt=True)
    assert both.ask("adopt", "b", second), "nobody has told its end"
    assert both.ask("adopt", "a", first)
    assert ended(both, "b") == KILLED
    assert both.ask("alive", "a")
    both.ask("close")


@pytest.mark.long
def test_the_others_of_a_step_outlive_the_loss_of_a_node(both: DrivenRun) -> None:
    first, second = (event["node"]["name"] for event in both.told("NodeGranted"))
    both.ask("launch", ["a", first], ["b", second])
    for name in ("a", "b"):
        came_up(both, name)
    both.cluster.testbed("kill-node", second)
    assert ended(both, "b", limit_s=80.0) == KILLED
    assert both.ask("alive", "a")
    end(both, "a", 0)
    assert ended(both, "a") == 0


@pytest.mark.long
def test_an_agent_lost_with_its_node_did_not_end_well(run: DrivenRun) -> None:
    launch(run, "a", node_of(run, "main"))
    node = node_of(run, "extra")
    launch(run, "c", node)
    run.cluster.testbed("kill-node", node)
    assert ended(run, "c", limit_s=80.0) == KILLED  # as soon as Slurm knows
    run.wait_told("NodeGone", node=node)
    assert run.ask("alive", "a")


@pytest.mark.long
def test_agents_start_and_end_although_the_controller_is_away(run: DrivenRun) -> None:
    main, extra = node_of(run, "main"), node_of(run, "extra")
    for agent in ("a", "b"):
        launch(run, agent, main)
    stop_controller(run.cluster)
    try:
        end(run, "a", 0)
        run.ask("kill", "b")
        run.ask("launch", ["c", extra])
        assert ended(run, "a", limit_s=40.0) == 0
        assert living(run) == ["b", "child"], "only Slurm's controller can kill a step"
        assert run.ask("alive", "b")
    finally:
        start_controller(run.cluster)
    assert ended(run, "b", limit_s=40.0) == KILLED
    assert "b" not in living(run)
    came_up(run, "c", limit_s=40.0)
    end(run, "c", 0)
    assert ended(run, "c") == 0
    run.ask("close")
    # A step that ended unheard is listed until its node tells of it again, once a minute.
    wait_for(lambda: not step_names(run), 80.0, "Slurm to hear of the ends")
    states = run.cluster.run("sinfo", "--noheader", "--Node", "--format=%T").split()
    assert "draining" not in states
