"""Pure: the two batch scripts and their options. That of a run is a heterogeneous job of one block
of options per component, that of a burst allocation keeps its nodes."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.config.schema import BurstSection, ClusterSection, ComponentSection, SlurmSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.process import clean_environment

END_SIGNAL = "USR2"
"""Tells the coordinator that the end of its job is near; submitit's name for it, too."""

BURST_SCRIPT = "burst.sbatch"

Option = tuple[str, str | int | bool]
"""An option by its long name; True for one that takes no value."""

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)

# Where sbatch's variable is not called after the option.
_VARIABLES = {"time": "SBATCH_TIMELIMIT", "no-requeue": "SBATCH_NO_REQUEUE"}
_OPPOSITES = {"requeue": "no-requeue", "no-requeue": "requeue"}


@dataclass(frozen=True)
class Submission:
    """A run as it is handed to Slurm: `name` is the job's, `folder` is what submitit writes to."""

    cluster: ClusterSection
    name: str
    comment: str
    folder: Path

    @classmethod
    def of_run(cls, cluster: ClusterSection, run_directory: Path, folder: Path) -> Submission:
        """The job is called after the run directory, and its comment is the whole path."""
        return cls(cluster, run_directory.name, f"liver run {run_directory}", folder)

    @property
    def script_path(self) -> Path:
        return self.folder / "batch.sh"

    @property
    def output(self) -> Path:
        """Where the job's output goes; %j is its id. submitit looks for it there."""
        return Path(str(self.folder).replace("%", "%%")) / "%j_0_log.out"


def python_words(cluster: ClusterSection) -> list[str]:
    """The words that start Python on the nodes; `cluster.slurm.python` split as a shell would.

    -P: what lies in the directory that a job is submitted from is not imported.
    """
    return [*(shlex.split(cluster.slurm.python or "") or [sys.executable]), "-P"]


def coordinator_command(submission: Submission) -> list[str]:
    """The batch process: submitit, which calls what was pickled into its folder."""
    python = python_words(submission.cluster)
    return [*python, "-u", "-m", "submitit.core._submit", str(submission.folder)]


def batch_script(submission: Submission, command: Sequence[str]) -> str:
    """The script for sbatch. Raises ConfigError for a value that would break its line."""
    blocks = ["\n".join(map(_directive, block)) for block in job_options(submission)]
    parts = [
        "#!/bin/bash",
        "\n#SBATCH hetjob\n".join(blocks),
        # From the first command on, Slurm reads no more options.
        "export SUBMITIT_EXECUTOR=slurm",
    ]
    if submission.cluster.slurm.setup:
        parts.append("\n".join(submission.cluster.slurm.setup))
    # Slurm signals the batch process alone: it has to be the coordinator, not a shell.
    parts.append(f"exec {shlex.join(command)}")
    return "\n\n".join(parts) + "\n"


def burst_script(cluster: ClusterSection) -> str:
    """It holds the allocation for as long as the run goes on; its argument is the run directory."""
    keeper = shlex.join([*python_words(cluster), "-m", "liver_hpc.node.keeper"])
    lines = [
        "#!/bin/bash",
        "# Keeps preemptible nodes for a run, and gives them back when the run is over.",
        *cluster.slurm.setup,
        f'exec {keeper} --run-directory "$1"',
    ]
    return "\n".join(lines) + "\n"


def job_options(submission: Submission) -> list[list[Option]]:
    """sbatch's options of each component. Those of the whole job are repeated in each, those of
    the batch process stand in the first alone."""
    components = submission.cluster.slurm.components
    common = _of_job(submission)
    # A component's own options come last: its account or qos may be another one.
    blocks = [dict([*common, *_of_component(component)]) for component in components]
    return [
        [*(_of_batch_process(submission) if index == 0 else []), *block.items()]
        for index, block in enumerate(blocks)
    ]


def burst_options(
    slurm: SlurmSection, part: BurstSection, request: Request, name: str, run_directory: Path
) -> list[str]:
    """A burst job's options for sbatch. It survives the loss of one of its nodes and is never
    requeued. What the section itself says comes last and wins."""
    logs = str(run_directory / "logs").replace("%", "%%")
    asked: list[Option] = [("job-name", name), ("partition", part.partition)]
    asked += [("nodes", request.nodes), ("time", request.time_min)]
    asked += [("no-requeue", True), ("no-kill", True)]
    asked += [("output", f"{logs}/burst-%j.log"), ("open-mode", "append"), ("export", "ALL")]
    return _words([*asked, *_paid_by(slurm), *_resources(part)])


def sbatch_environment(
    environment: Mapping[str, str], options: Sequence[Sequence[Option]]
) -> dict[str, str]:
    """The environment of sbatch, which the job inherits: `environment` without the variables of the
    job that this process may be in, and without the SBATCH_* variables that would beat the script.

    sbatch takes a variable before the script's options; the run file comes before both.
    """
    given = {name for block in options for name, _ in block}
    given |= {_OPPOSITES[name] for name in given if name in _OPPOSITES}
    # The whole environment goes along: without it neither Python nor a recipe would be found.
    given |= {"export", "array-inx"}
    beaten = {_VARIABLES.get(name, f"SBATCH_{name.upper().replace('-', '_')}") for name in given}
    own = clean_environment(environment)
    return {name: value for name, value in own.items() if name not in beaten}


def _of_batch_process(submission: Submission) -> list[Option]:
    window_s = math.ceil(submission.cluster.slurm.end_window_s)
    return [
        ("output", str(submission.output)),
        ("open-mode", "append"),
        # B: the batch process gets it; steps are told by the coordinator.
        ("signal", f"B:{END_SIGNAL}@{window_s}"),
    ]


def _of_job(submission: Submission) -> list[Option]:
    cluster, slurm = submission.cluster, submission.cluster.slurm
    return [
        ("job-name", submission.name),
        ("comment", submission.comment),
        ("time", cluster.timeout_min),
        ("requeue" if slurm.requeue else "no-requeue", True),
        *_paid_by(slurm),
    ]


def _of_component(component: ComponentSection) -> list[Option]:
    options: list[Option] = [("nodes", component.nodes)]
    if component.partition is not None:
        options.append(("partition", component.partition))
    return [*options, *_resources(component)]


def _directive(option: Option) -> str:
    name, value = option
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"sbatch --{name}: {text!r} has control characters")
    return f"#SBATCH --{name}={_quoted(text)}"


def _quoted(text: str) -> str:
    """As sbatch reads it: unlike a shell it takes a backslash for one in any quotes."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _words(given: Iterable[Option]) -> list[str]:
    """As words; of an option that is given twice the later one holds."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in dict(given).items()
    ]


def _resources(part: ComponentSection | BurstSection) -> list[Option]:
    """One task a node, with the accelerators and processors asked for, and further options."""
    asked: list[Option] = [("ntasks-per-node", 1)]
    if part.cpus_per_node is not None:
        asked.append(("cpus-per-task", part.cpus_per_node))
    if part.gpus_per_node:
        asked.append(("gpus-per-node", part.gpus_per_node))
    return [*asked, *part.options.items()]


def _paid_by(slurm: SlurmSection) -> list[Option]:
    """The account and the quality of service of a run's jobs."""
    named = (("account", slurm.account), ("qos", slurm.qos))
    return [(name, value) for name, value in named if value is not None]
