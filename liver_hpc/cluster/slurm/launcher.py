"""Agents as steps of Slurm jobs: one srun for every agent, a child of this process.

srun is only the messenger. Whether an agent has ended is asked of Slurm too: a step outlives a
killed srun, and srun calls the loss of a node success.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from liver_hpc.cluster.launcher import AGENT_MODULE, Launcher, NodeRequest
from liver_hpc.cluster.slurm import words
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.holdings import Place
from liver_hpc.cluster.slurm.script import python_words
from liver_hpc.cluster.slurm.step import Step
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.host.child import Command

_CLOSE_MARGIN_S = 10.0


class SlurmLauncher(Launcher):
    """Runs agents on the nodes of Slurm jobs.

    where: the place of a node that is held; raises LiverError for another one. program: what a
    step runs, to which the request's options are added; without it the agent. What srun prints,
    and an agent before it has a log of its own, goes to logs/srun-NAME.log of the run directory.
    """

    def __init__(
        self,
        run_directory: Path,
        config: RunConfig,
        commands: SlurmCommands,
        where: Callable[[str], Place],
        program: Sequence[str] = (),
    ) -> None:
        self._slurm = config.cluster.slurm
        super().__init__(self._slurm.unreachable_s + self._slurm.command_s + _CLOSE_MARGIN_S)
        self._run_directory = run_directory.absolute()
        self._commands = commands
        self._where = where
        self._program = program or (*python_words(config.cluster), "-m", AGENT_MODULE)

    def _prepare(self, request: NodeRequest) -> Step:
        if not request.node:
            raise LiverError(f"agent {request.agent}: a step of Slurm needs a node")
        place, name = self._where(request.node), f"liver-{request.agent}"
        srun = words.srun(
            place.job_id,
            name,
            [request.node],
            het_group=place.het_group,
            gpus_per_node=self._gpus_per_node(place),
        )
        agent = [*self._program, *request.options(self._run_directory), "--warnings"]
        command = Command(
            f"srun of agent {request.agent}",
            [*srun, *agent],
            orphan_signal=signal.SIGTERM,  # an orphaned srun still ends its step
            log=self._run_directory / "logs" / f"srun-{request.agent}.log",
            apart="session",
        )
        unreachable_s = self._slurm.unreachable_s
        return Step(request.agent, command, name, place.steps_of, self._commands, unreachable_s)

    def _gpus_per_node(self, place: Place) -> int:
        if place.burst:
            return self._slurm.burst.gpus_per_node if self._slurm.burst else 0
        index = place.het_group or 0
        return self._slurm.components[index].gpus_per_node if self._slurm.components else 0
