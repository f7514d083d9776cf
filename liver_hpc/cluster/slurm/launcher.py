"""Agents as steps of Slurm jobs: one srun for every agent, a child of this process.

srun is only the messenger. Whether an agent has ended is asked of Slurm too: a step outlives a
killed srun, and srun calls the loss of a node success.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import Launcher, NodeRequest, check_names, unknown_agent
from liver_hpc.cluster.slurm.allocation import Place
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.cluster.slurm.step import Step, StepPlan
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ConfigError, DeadlineError, LiverError

_CLOSE_MARGIN_S = 10.0
_IMMEDIATE_S = 5


@dataclass(frozen=True)
class AgentCommand:
    """What a step runs: the first words, to which the request's options are added."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, config: RunConfig) -> AgentCommand:
        return cls((*python_words(config.cluster), "-m", "liver_hpc.node.agent"))

    def line(self, run_directory: Path, request: NodeRequest) -> list[str]:
        line = [*self.words, "--run-directory", str(run_directory), "--agent", request.agent]
        line += ["--workers", str(request.workers), "--layout", request.layout, "--warnings"]
        if request.slots:
            line += ["--slots", ",".join(map(str, request.slots))]
        return line


class SlurmLauncher(Launcher):
    """Runs agents on the nodes of Slurm jobs.

    where: the place of a node that is held; raises LiverError for another one. What srun prints,
    and an agent before it has a log of its own, goes to logs/srun-NAME.log of the run directory.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        commands: SlurmCommands,
        where: Callable[[str], Place],
        agent_command: AgentCommand | None = None,
    ) -> None:
        self._run_directory = run_directory.absolute()
        self._config = config
        self._commands = commands
        self._where = where
        self._agent_command = agent_command or AgentCommand.of(config)
        self._steps: dict[str, Step] = {}
        self._closed = False

    def launch(self, requests: Sequence[NodeRequest]) -> None:
        check_names(requests, self._steps, self._closed)
        plans = [self._plan(request) for request in requests]
        for plan in plans:
            step = Step(plan, self._commands, self._config.cluster.slurm.unreachable_s)
            self._steps[plan.agent] = step
            step.start()

    def alive(self, agent: str) -> bool:
        return self._step(agent).exit_code is None

    def exit_code(self, agent: str) -> int | None:
        return self._step(agent).exit_code

    def kill(self, agent: str) -> None:
        self._step(agent).kill()

    def close(self) -> None:
        self._closed = True
        for step in self._steps.values():
            step.kill()
        slurm = self._config.cluster.slurm
        limit_s = slurm.unreachable_s + slurm.command_s + _CLOSE_MARGIN_S
        deadline = Deadline.after(SystemClock(), limit_s, "killed steps to end")
        late = [name for name, step in self._steps.items() if not step.join(deadline.remaining_s())]
        if late:
            raise DeadlineError(f"waited {limit_s:g} s for the steps of agents {late} to end")

    def _step(self, agent: str) -> Step:
        try:
            return self._steps[agent]
        except KeyError:
            raise unknown_agent(agent) from None

    def _plan(self, request: NodeRequest) -> StepPlan:
        place = self._where(request.node)
        return StepPlan(
            agent=request.agent,
            name=f"liver-{request.agent}",
            place=place,
            command=(
                *self._srun(request, place),
                *self._agent_command.line(self._run_directory, request),
            ),
            log=self._run_directory / "logs" / f"srun-{request.agent}.log",
        )

    def _srun(self, request: NodeRequest, place: Place) -> list[str]:
        """srun for one task that sees all of the node, whatever else runs there."""
        if not request.node:
            raise LiverError(f"agent {request.agent}: a step of Slurm needs a node")
        program = shutil.which("srun")
        if program is None:
            raise ConfigError("srun is not in PATH")
        words = [program, f"--jobid={place.job_id}"]
        if place.het_group is not None:
            words.append(f"--het-group={place.het_group}")
        words += [f"--job-name=liver-{request.agent}", f"--nodelist={request.node}"]
        words += ["--nodes=1", "--ntasks=1", "--overlap", "--cpu-bind=none", "--input=none"]
        words += ["--no-kill", "--kill-on-bad-exit=0", "--unbuffered"]
        # Left alone, an srun that has to wait asks again only after a minute.
        words.append(f"--immediate={_IMMEDIATE_S}")
        words.append("--mpi=none")
        gpus = self._gpus_per_node(place)
        if gpus:
            words.append(f"--gpus-per-node={gpus}")
        return words

    def _gpus_per_node(self, place: Place) -> int:
        slurm = self._config.cluster.slurm
        if place.burst:
            return slurm.burst.gpus_per_node if slurm.burst else 0
        index = place.het_group or 0
        return slurm.components[index].gpus_per_node if slurm.components else 0
