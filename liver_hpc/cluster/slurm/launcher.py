"""Agents on the nodes of Slurm jobs: one srun for all that start together in an allocation."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from liver_hpc import __version__
from liver_hpc.cluster.launcher import AGENT_MODULE, LaunchedAgent, Launcher
from liver_hpc.cluster.slurm.container import step_words
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.cluster.slurm.step import Step, StepPlan
from liver_hpc.cluster.slurm.together import (
    STEP_VARIABLE,
    Together,
    note_together,
    together_path,
    told_together,
)
from liver_hpc.config.schema import RunConfig
from liver_hpc.host.child import Command
from liver_hpc.host.process import clean_environment
from liver_hpc.layout.coordinates import Layout
from liver_hpc.run.actions import LaunchAgent

_KILL_MODULE = "liver_hpc.node.kill_task"
_PREFIX = "liver-"
_IMMEDIATE_S = 5
_CLOSE_MARGIN_S = 10.0
_OOM_ENDS_ONE = {"SLURM_OOM_KILL_STEP": "0"}
"""For srun, from 24.11 on: who is out of memory does not end the step, whatever slurm.conf says."""


def slurm_launcher(
    run_directory: Path,
    config: RunConfig,
    squeue: Squeue,
    use: Callable[[str], Allocation],
    program: Sequence[str] = (),
    task: Sequence[str] = (),
) -> Launcher:
    """Runs agents on the nodes of Slurm jobs.

    use: the allocation of a node that is held; raises LiverError for another one. program: what a
    step runs, to which the agents' options are added; without it the agent. task: a module and its
    arguments that run in an agent's place. What srun prints, and an agent before it has a log of
    its own, goes to logs/srun-NAME.log of the run directory, with the name of the first agent.
    """
    slurm, directory = config.cluster.slurm, run_directory.absolute()
    step_options, python, exported = step_words(config, directory)

    def task_words(layout: Layout, together: Path) -> list[str]:
        if task:
            return [*python, *task]
        words = [*(program or (*python, AGENT_MODULE)), "--version", __version__]
        words += ["--run-directory", str(directory)]
        words += ["--layout", str(layout), "--together", str(together), "--warnings"]
        return [*words, "--stay"] if config.workers.warm else words

    def step(name: str, agents: Mapping[str, str], held: Allocation, words: Sequence[str]) -> Step:
        mark = f"{held.job}.{name}"  # a step of another run on the node may have the same name
        kill = [*python_words(config.cluster), "-m", _KILL_MODULE, mark]  # sees into images
        plan = StepPlan(
            name,
            held.job,
            agents,
            Command(
                f"srun of step {name}",
                [*srun_words(held, name, [*agents]), *step_options, *words],
                orphan_signal=None,  # agents end it, if no other coordinator takes over
                environment={
                    **clean_environment(os.environ),
                    **_OOM_ENDS_ONE,
                    **exported,
                    STEP_VARIABLE: mark,
                },
                log=directory / "logs" / f"srun-{name.removeprefix(_PREFIX)}.log",
                apart="session",
            ),
            lambda nodes: [*srun_words(held, f"{name}-kill", nodes, False), *kill],
            lambda nodes: [*srun_words(held, f"{name}-look", nodes, False), *kill, "--look"],
            leads=held.het is not None and held.het[1] == 0,
        )
        return Step(plan, squeue, slurm.unreachable_s)

    def prepare(launches: Sequence[LaunchAgent]) -> list[LaunchedAgent]:
        agents: dict[str, LaunchedAgent] = {}
        for held, those in _together(launches, use):
            name = f"{_PREFIX}{those[0].agent}"
            path, on = together_path(directory, name), {e.seat.node: e.agent for e in those}
            note_together(path, those)
            agents |= step(name, on, held, task_words(those[0].layout, path)).agents
        return [agents[each.agent] for each in launches]

    left: dict[str, LaunchedAgent] = {}
    told: dict[str, Together] = {}

    def find_left(agent: str, node: str) -> LaunchedAgent | None:
        held = use(node)
        if not told:  # once: there may be thousands
            told.update(told_together(directory))
        if agent not in left and agent in told:
            left.update(step(told[agent].step, told[agent].agents, held, ()).agents)
        return left.get(agent)

    close_s = slurm.unreachable_s + slurm.command_s + _CLOSE_MARGIN_S
    return Launcher(prepare, close_s, find_left)


def _together(
    launches: Sequence[LaunchAgent], use: Callable[[str], Allocation]
) -> Iterator[tuple[Allocation, list[LaunchAgent]]]:
    """Those that one srun starts: in one allocation, with one layout, on a node each."""
    found: dict[tuple[str, Layout, int], tuple[Allocation, list[LaunchAgent]]] = {}
    on_node: Counter[str] = Counter()
    for each in launches:
        node, held = each.seat.node, use(each.seat.node)
        found.setdefault((held.job, each.layout, on_node[node]), (held, []))[1].append(each)
        on_node[node] += 1
    yield from found.values()


def srun_words(
    held: Allocation, name: str, nodes: Sequence[str], accelerated: bool = True
) -> list[str]:
    """A step of one task on each of `nodes`, which sees all of its node, whatever else runs there,
    and outlives the end and the loss of another one. What the tasks run follows.

    accelerated: with the accelerators of its nodes. Below Slurm 22.05 steps do not share these, and
    one that asks for none waits for none, either.
    """
    leader, index = held.het or (held.job, None)
    # Told by the environment, too, it is spared what a site or the user has set for new jobs.
    words = ["env", f"SLURM_JOB_ID={leader}", "srun", f"--jobid={leader}"]
    words += [] if index is None else [f"--het-group={index}"]
    words += [f"--job-name={name}", f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}"]
    words += [f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]
    words += ["--overlap", "--cpu-bind=none", "--input=none", "--no-kill"]
    words += ["--kill-on-bad-exit=0", "--wait=0", "--unbuffered"]
    words += ["--verbose"]  # else it does not tell of tasks that end well
    # Left alone, an srun that has to wait asks again only after a minute.
    words += [f"--immediate={_IMMEDIATE_S}", "--mpi=none"]
    if held.gpus_per_node:
        words.append(f"--gpus-per-node={held.gpus_per_node}" if accelerated else "--gres=none")
    return words
