"""Pure: the command lines of Slurm, all that are run. What they print is in `replies`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from liver_hpc.cluster.slurm.burst import Request
from liver_hpc.cluster.slurm.replies import JOB_FORMAT, STEP_FORMAT
from liver_hpc.config.schema import BurstSection, ComponentSection, SlurmSection

Option = tuple[str, str | int | bool]
"""An option by its long name; True for one that takes no value."""

_IMMEDIATE_S = 5


def options(given: Iterable[Option]) -> list[str]:
    """As words; of an option that is given twice the later one holds."""
    return [
        f"--{name}" if value is True else f"--{name}={value}" for name, value in dict(given).items()
    ]


def resources(part: ComponentSection | BurstSection) -> list[Option]:
    """One task a node, with the accelerators and processors asked for, and further options."""
    asked: list[Option] = [("ntasks-per-node", 1)]
    if part.cpus_per_node is not None:
        asked.append(("cpus-per-task", part.cpus_per_node))
    if part.gpus_per_node:
        asked.append(("gpus-per-node", part.gpus_per_node))
    return [*asked, *part.options.items()]


def paid_by(slurm: SlurmSection) -> list[Option]:
    """The account and the quality of service of a run's jobs."""
    named = (("account", slurm.account), ("qos", slurm.qos))
    return [(name, value) for name, value in named if value is not None]


def burst(
    slurm: SlurmSection, part: BurstSection, request: Request, name: str, run_directory: Path
) -> list[str]:
    """A burst job's options for sbatch. It survives the loss of one of its nodes and is never
    requeued. What the section itself says comes last and wins."""
    logs = str(run_directory / "logs").replace("%", "%%")
    asked: list[Option] = [("job-name", name), ("partition", part.partition)]
    asked += [("nodes", request.nodes), ("time", request.time_min)]
    asked += [("no-requeue", True), ("no-kill", True)]
    asked += [("output", f"{logs}/burst-%j.log"), ("open-mode", "append"), ("export", "ALL")]
    return options([*asked, *paid_by(slurm), *resources(part)])


def sbatch(given: Sequence[str], script: Path, arguments: Sequence[str] = ()) -> list[str]:
    return ["sbatch", "--parsable", *given, str(script), *arguments]


def srun(
    job: str,
    name: str,
    nodes: Sequence[str],
    *,
    het_group: int | None = None,
    gpus_per_node: int = 0,
    mpi: str = "none",
) -> list[str]:
    """A step of one task on each of `nodes`, which sees all of its node, whatever else runs there,
    and outlives the loss of another one. What the tasks run follows."""
    words = ["srun", f"--jobid={job}"]
    if het_group is not None:
        words.append(f"--het-group={het_group}")
    words += [f"--job-name={name}", f"--nodelist={','.join(nodes)}"]
    words += [f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--overlap", "--cpu-bind=none"]
    words += ["--input=none", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered"]
    # Left alone, an srun that has to wait asks again only after a minute.
    words += [f"--immediate={_IMMEDIATE_S}", f"--mpi={mpi}"]
    return [*words, f"--gpus-per-node={gpus_per_node}"] if gpus_per_node else words


def cancel(job: str, signal: str = "") -> list[str]:
    """A job, a component ("123+1", or its own id) or a step ("123.4")."""
    return ["scancel", *([f"--signal={signal}"] if signal else []), job]


def cancel_named(name: str, user: int) -> list[str]:
    return ["scancel", f"--user={user}", f"--name={name}"]


def requeue(job: str) -> list[str]:
    return ["scontrol", "requeue", job]


def jobs(ids: Iterable[str]) -> list[str]:
    return ["squeue", "--noheader", f"--jobs={','.join(ids)}", f"--format={JOB_FORMAT}"]


def jobs_named(name: str, user: int) -> list[str]:
    which = [f"--user={user}", f"--name={name}"]
    return ["squeue", "--noheader", *which, f"--format={JOB_FORMAT}"]


def steps(job: str) -> list[str]:
    return ["squeue", "--noheader", "--steps", f"--jobs={job}", f"--format={STEP_FORMAT}"]


def node_states(names: Iterable[str]) -> list[str]:
    which = ["--noheader", "--Node", f"--nodes={','.join(names)}"]
    return ["sinfo", *which, "--Format=NodeList:|,StateComplete:|"]


def hostnames(nodelist: str) -> list[str]:
    return ["scontrol", "show", "hostnames", nodelist]


def partitions() -> list[str]:
    """Of all partitions, hidden ones too: a job may be submitted to them."""
    return ["scontrol", "--all", "--oneliner", "show", "partition"]


def configuration() -> list[str]:
    return ["scontrol", "show", "config"]
