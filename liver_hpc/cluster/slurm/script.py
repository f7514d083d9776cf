"""Pure: the two batch scripts and their options. That of a run is a heterogeneous job of one block
of options per component, that of a burst allocation keeps its nodes."""

from __future__ import annotations

import math
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.config.schema import BurstSection, ClusterSection, ComponentSection, SlurmSection
from liver_hpc.errors import ConfigError
from liver_hpc.host.process import clean_environment
from liver_hpc.run.directory import RunDirectory

END_SIGNAL = "USR2"
"""Tells the coordinator that the end of its job is near; submitit's name for it, too."""

RUN_SCRIPT = "batch.sh"
BURST_SCRIPT = "burst.sbatch"

Options = dict[str, str | int | bool]
"""Options by their long names; True for one that takes no value."""

_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)

# Where sbatch's variables are not called after the option, or others speak of the same.
_MEMORY = tuple(f"SBATCH_MEM_PER_{what}" for what in ("NODE", "CPU", "GPU"))
_VARIABLES = {
    "time": ("SBATCH_TIMELIMIT",),
    "switches": ("SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH"),
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _MEMORY),
}
_OPPOSITES = {"requeue": "no-requeue", "no-requeue": "requeue"}


def python_words(cluster: ClusterSection) -> list[str]:
    """The words that start Python on the nodes; `cluster.slurm.python` split as a shell would.

    -P: what lies in the directory that a job is submitted from is not imported.
    """
    return [*(shlex.split(cluster.slurm.python or "") or [sys.executable]), "-P"]


def batch_script(cluster: ClusterSection, run: RunDirectory) -> str:
    """The script that submits a run. The batch process is submitit, which calls what was pickled
    into its folder. Raises ConfigError for a value that would break its line."""
    blocks = [
        "\n".join(_directive(name, value) for name, value in block.items())
        for block in job_options(cluster, run)
    ]
    folder = str(run.jobs_path)
    submitit = shlex.join([*python_words(cluster), "-u", "-m", "submitit.core._submit", folder])
    parts = [
        "#!/bin/bash",
        "\n#SBATCH hetjob\n".join(blocks),
        # From the first command on, Slurm reads no more options.
        "export SUBMITIT_EXECUTOR=slurm",
        *(["\n".join(cluster.slurm.setup)] if cluster.slurm.setup else []),
        # Slurm signals the batch process alone: it has to be the coordinator, not a shell.
        f"exec {submitit}",
    ]
    return "\n\n".join(parts) + "\n"


def burst_script(cluster: ClusterSection) -> str:
    """It holds the allocation for as long as the run goes on; its argument is the run directory.
    What goes along of the environment stands in it, as others see command lines."""
    options = cluster.slurm.burst.options if cluster.slurm.burst is not None else {}
    keeper = shlex.join([*python_words(cluster), "-m", "liver_hpc.node.keeper"])
    lines = [
        "#!/bin/bash",
        _directive("export", options.get("export", "ALL")),
        "# Keeps preemptible nodes for a run, and gives them back when the run is over.",
        *cluster.slurm.setup,
        f'exec {keeper} --run-directory "$1"',
    ]
    return "\n".join(lines) + "\n"


def job_options(cluster: ClusterSection, run: RunDirectory) -> list[Options]:
    """sbatch's options of each component. Those of the whole job are repeated in each, those of
    the batch process stand in the first alone. The job survives the loss of a node, as far as Slurm
    lets it: of a heterogeneous one while each component has another node."""
    slurm = cluster.slurm
    batch_process = {
        "output": _log_pattern(run.jobs_path, "%j_0_log.out"),  # submitit looks for it there
        "open-mode": "append",
        # B: the batch process gets it; steps are told by the coordinator.
        "signal": f"B:{END_SIGNAL}@{math.ceil(slurm.end_window_s)}",
    }
    job = {
        "job-name": run.path.name,
        "comment": f"liver run {run.path}",
        "time": cluster.timeout_min,
        # From 25.11 on: at once, and on the nodes that it had where they are well.
        "requeue" if slurm.requeue else "no-requeue": slurm.requeue or True,
        "no-kill": True,
        "wait-all-nodes": 1,  # where nodes are booted the script would start with the first one
        "account": slurm.account,
        "qos": slurm.qos,
    }
    first, *others = [
        {**job, "nodes": part.nodes, "partition": part.partition, **_resources(part)}
        for part in slurm.components
    ]
    return [_given(block) for block in ({**batch_process, **first}, *others)]


def burst_options(
    slurm: SlurmSection, part: BurstSection, request: Request, name: str, run_directory: Path
) -> list[str]:
    """A burst job's options for sbatch, beside those of its script. It survives the loss of one of
    its nodes and is never requeued. What the section itself says comes last and wins."""
    options = {
        "job-name": name,
        "partition": part.partition,
        "nodes": request.nodes,
        "time": request.time_min,
        "no-requeue": True,
        "no-kill": True,
        "wait-all-nodes": 1,
        "output": _log_pattern(run_directory / "logs", "burst-%j.log"),
        "open-mode": "append",
        "account": slurm.account,
        "qos": slurm.qos,
        **_resources(part),
        "export": None,
    }
    return option_words(_given(options))


def option_words(options: Mapping[str, str | int | bool]) -> list[str]:
    """As they stand on a command line."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in options.items()
    ]


def sbatch_environment(
    environment: Mapping[str, str], options: Sequence[Options]
) -> dict[str, str]:
    """The environment of sbatch, which the job inherits: `environment` without the variables of the
    job that this process may be in, and without the SBATCH_* variables that would beat the script.

    sbatch takes a variable before the script's options; the run file comes before both.
    """
    given = {name for block in options for name in block}
    given |= {_OPPOSITES[name] for name in given if name in _OPPOSITES}
    beaten = {
        variable
        for name in given
        for variable in _VARIABLES.get(name, (f"SBATCH_{name.upper().replace('-', '_')}",))
    }
    own = clean_environment(environment)
    return {name: value for name, value in own.items() if name not in beaten}


def _resources(part: ComponentSection | BurstSection) -> dict[str, str | int | bool | None]:
    """One task a node, with the accelerators and processors asked for, and further options."""
    return {
        "ntasks-per-node": 1,
        "cpus-per-task": part.cpus_per_node,
        "gpus-per-node": part.gpus_per_node or None,
        **part.options,
    }


def _given(options: Mapping[str, str | int | bool | None]) -> Options:
    """Without those that the run file leaves open."""
    return {name: value for name, value in options.items() if value is not None}


def _log_pattern(directory: Path, name: str) -> str:
    """The path of a log as sbatch takes it; only in its name Slurm replaces anything."""
    return f"{str(directory).replace('%', '%%')}/{name}"


def _directive(name: str, value: str | int | bool) -> str:
    if value is True:
        return f"#SBATCH --{name}"
    text = str(value)
    if not text.isprintable():
        raise ConfigError(f"sbatch --{name}: {text!r} has control characters")
    if not _PLAIN.fullmatch(text):
        # As sbatch reads it: unlike a shell it takes a backslash for one in any quotes.
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        text = f'"{escaped}"'
    return f"#SBATCH --{name}={text}"
