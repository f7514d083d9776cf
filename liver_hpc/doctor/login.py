"""Checks that need no node: this host, and what the controller says of the cluster."""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path

from liver_hpc.cluster.slurm.commands import SlurmError
from liver_hpc.doctor.checks import Check, Order, Result, failed, passed, skipped, warned
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.candidates import resolve_layouts
from liver_hpc.recipes.base import load_recipe
from liver_hpc.report.wording import bytes_text

COMMANDS = ("sbatch", "srun", "scancel", "scontrol", "squeue", "sinfo")

# A controller that does not trust this host's credentials hangs up.
_AUTHENTICATION = re.compile(r"munge|sack|credential|authenticat|Zero Bytes", re.I)
_HINT = "If munged is up"
_LEAST_SLURM = 22, 5
_CANCELS_WHOLE_JOB = 25, 11
"""From here on Slurm takes the end of a step of the first of several components for the job's."""


def _commands(order: Order) -> Result:
    missing = [name for name in COMMANDS if shutil.which(name) is None]
    if missing:
        return failed(
            f"not on the path: {', '.join(missing)}",
            "load the site's Slurm module, or run this where jobs are submitted from",
        )
    return passed(f"in {Path(str(shutil.which('srun'))).parent}")


def _controller(order: Order) -> Result:
    try:
        version = order.commands.setting("SLURM_VERSION")
        order.commands.check_cluster(os.environ)
    except SlurmError as error:
        complaint = error.complaint or str(error)
        for line in complaint.splitlines():
            if _AUTHENTICATION.search(line) and _HINT not in line:
                advice = (
                    "start munged (with auth/slurm: sackd) here and on the controller, with the "
                    "same key and right time"
                )
                return failed(line, advice)
        return failed(complaint, "ask for slurmctld; `scontrol ping` says where it should be")
    number = re.match(r"(\d+)\.(\d+)", version)
    if number and (int(number[1]), int(number[2])) < _LEAST_SLURM:
        return warned(
            f"Slurm {version}: below 22.05 steps on a node do not share its GPUs",
            "ask for a newer one; until then leave workers.warm at true where there are GPUs",
        )
    release = (int(number[1]), int(number[2])) if number else (0, 0)
    if release >= _CANCELS_WHOLE_JOB and len(order.slurm.components) > 1:
        return warned(
            f"Slurm {version} cancels a whole job of several components where a step of the first "
            "is ended, as by the loss of one of its nodes",
            "have one component, and what else is wanted in cluster.slurm.burst",
        )
    cluster, kind = order.commands.setting("ClusterName"), order.commands.setting("AuthType")
    return passed(f"cluster {cluster} takes this host's credentials ({kind}), Slurm {version}")


def _partitions(order: Order) -> Result:
    held = order.partitions
    listed = ", ".join(
        f"{p.name} (preempt mode {p.preempt_mode}, grace {p.grace_s:g} s)" for p in held.values()
    )
    named = [component.partition for component in order.slurm.components]
    named += [order.slurm.burst.partition if order.slurm.burst else None, order.partition]
    asked = (name for names in named if names for name in names.split(","))
    missing = list(dict.fromkeys(name for name in asked if name not in held))
    if missing:
        return failed(
            f"no partition {', '.join(map(repr, missing))}; there are {listed or 'none'}",
            "correct the run file's cluster.slurm, or --partition",
        )
    return passed(listed)


def _preemption(order: Order) -> Result:
    """Whether what is meant to be preempted is, and with time enough to leave."""
    kind = order.commands.setting("PreemptType")
    if kind.endswith("none"):
        return passed(f"{kind}: no job is preempted")
    if kind.endswith("qos"):
        return passed(
            f"{kind}: jobs are preempted as their QOS says, with its grace time; "
            "`sacctmgr show qos format=Name,Preempt,PreemptMode,GraceTime` shows it"
        )
    # Slurm preempts a het job only when every component may be.
    found = ((part.name, order.partitions_of(part.partition)) for part in order.slurm.components)
    parts = {name: {one.preempt_mode for one in its} for name, its in found if its}
    shields = sorted(name for name, modes in parts.items() if "OFF" in modes)
    shielded = sorted(parts.keys() - set(shields))
    if shields and shielded:
        return warned(
            f"components {', '.join(shielded)} are never preempted: {', '.join(shields)} of the "
            "same job cannot be",
            "move what is to be preempted to cluster.slurm.burst, a job of its own",
        )
    burst = order.slurm.burst
    name = burst.partition if burst else order.partition
    asked = {part.partition or order.partition for part in order.slurm.components}
    asked |= {name} if name else set()
    reached = (one for names in asked for one in order.partitions_of(names))
    if stopping := sorted({one.name for one in reached if "SUSPEND" in one.preempt_mode}):
        return warned(
            f"{', '.join(stopping)}: PreemptMode SUSPEND stops a job's processes where it preempts "
            "it, without a warning; stopped for more than deadlines.collective_s, they are lost",
            "ask for PreemptMode=REQUEUE or CANCEL on it, which have a grace time; else set "
            "`snapshots`, or deadlines.collective_s above the longest suspension",
        )
    if name is None:
        return passed(f"{kind}; no burst partition is named")
    preempting = [one for one in order.partitions_of(name) if one.preempt_mode != "OFF"]
    if not preempting:
        return passed(f"{kind}; jobs in {name} are never preempted (PreemptMode OFF)")
    mode, grace_s = preempting[0].preempt_mode, min(one.grace_s for one in preempting)
    if grace_s <= 0:
        return warned(
            f"{name} gives no grace time: its nodes are lost without a warning",
            "ask for GraceTime on it; until then a preemption ends in the last resort",
        )
    took_s = slowest_handoff_s(order.runs_directory)
    if grace_s < took_s:
        return warned(
            f"{name} gives {grace_s:g} s of grace, the slowest handoff measured took "
            f"{took_s:.1f} s",
            "ask for a longer GraceTime, or for layouts that move less",
        )
    return passed(f"{kind}; {name}: {mode} with {grace_s:g} s of grace")


def _signals(order: Order) -> Result:
    """Whether `scancel` reaches more than it names: srun ends its step when it is signalled."""
    kind = order.commands.setting("ProctrackType")
    if kind.endswith("linuxproc") and order.slurm.burst is not None:
        return warned(
            f"{kind}: `scancel` of a run's job signals its srun processes, too, which kill the "
            "workers on burst nodes at once",
            "end runs by `liver stop --checkpoint`",
        )
    return passed(kind)


def _switch(order: Order) -> Result:
    """Whether processes of different steps and jobs reach each other over the fast network: those
    that the doctor tries are of one step."""
    kind, burst = order.commands.setting("SwitchType"), order.slurm.burst is not None
    if kind.endswith("nvidia_imex") and (burst or len(order.slurm.components) > 1):
        return warned(
            f"{kind}: each component and each burst job has an IMEX channel of its own: over "
            "NVLink their nodes reach no others",
            "set network.nccl: {NCCL_MNNVL_ENABLE: 0}",
        )
    if not kind.endswith("hpe_slingshot"):
        return passed(kind)
    if burst:
        return warned(
            f"{kind}: each job has a network of its own: over CXI burst nodes reach no others",
            "leave burst out, or set network.nccl: {NCCL_NET: Socket}",
        )
    if "job_vni" not in str(order.slurm.step_options.get("network", "")).split(","):
        return warned(
            f"{kind}: each srun has a network of its own: over CXI nodes reach none that another "
            "srun has begun to use, as of another component, or after a loss",
            "set cluster.slurm.step_options: {network: 'single_node_vni,job_vni'}",
        )
    return passed(f"{kind}, with a network of the job")


def slowest_handoff_s(runs_directory: Path) -> float:
    """Beginning to release of the slowest handoff in the newest run here, 0 when none is known. One
    that had to boot joiners does not count: whoever leaves a node boots none."""
    from liver_hpc.report.store import read_run

    try:
        records = read_run(runs_directory / "latest")
    except (ConfigError, OSError):
        return 0.0
    took_s = [
        record.released_s - record.began_s
        for record in records.reconfigurations
        if record.outcome == "completed"
        and set(record.target_workers.split(",")) <= set(record.source_workers.split(","))
    ]
    return max(took_s, default=0.0)


def _runs_directory(order: Order) -> Result:
    directory = order.runs_directory
    there = next(path for path in (directory, *directory.parents) if os.path.exists(path))
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        return failed(f"{there} cannot be written to", "name another by --runs-directory")
    mode = stat.S_IMODE(os.stat(there).st_mode)
    if mode & 0o022 and not mode & stat.S_ISVTX:
        return warned(
            f"others may write to {there} (mode {mode:o}), and have their code executed in a run",
            "chmod go-w it, or name another by --runs-directory",
        )
    return passed(str(directory) if there == directory else f"{directory}, which can be made")


def _memory(order: Order) -> Result:
    """What a handoff takes of a worker, in the change of layout that takes most."""
    if "train" not in order.config.model_fields_set:
        return skipped("no run file is given; --config RUN.yaml names one")
    recipe = load_recipe(order.config)
    try:
        recipe.spec = order.derive(order.config)
    except ConfigError:
        raise
    except LiverError as error:
        return skipped(f"the model's spec can be derived on the nodes alone: {error}")
    config = resolve_layouts(order.config, recipe.spec, recipe.check_layout)
    budget = Budget(config, recipe.spec, recipe.rehearsal_bytes)
    faults = [
        f"{one}: {fault}" for one in config.layouts_listed if (fault := budget.layout_fault(one))
    ]
    faults = faults or [fault for fault in [budget.change_fault(config.layouts_listed)] if fault]
    if faults:
        return failed(faults[0], _FITS)
    change = budget.fullest_change(config.layouts_listed)
    if why := budget.bounded_because(change.source, change.target):
        peak, *_ = budget.fullest_bounded_change(config.layouts_listed)
        return warned(
            f"handoffs are made in bounded memory, as {why}; they take up to {bytes_text(peak)}",
            "training stands while a checkpoint of the boundary is written: have it on a fast disk",
        )
    return passed(
        f"a handoff takes up to {bytes_text(change.held.together)} of a worker ({change}), beside "
        f"training's activations; policy.memory_bytes is {config.policy.memory_bytes}"
    )


_FITS = "leave the largest layouts out, or give policy.memory_bytes what a worker really has"
_ASK = "ask the cluster's staff; this is Slurm's own word"

LOGIN_CHECKS = (
    Check("commands", _commands),
    Check("controller", _controller, ("commands",)),
    Check("partitions", _partitions, ("controller",), _ASK),
    Check("preemption", _preemption, ("partitions",), _ASK),
    Check("signals", _signals, ("controller",), _ASK),
    Check("switch", _switch, ("controller",), _ASK),
    Check("run directory", _runs_directory),
    Check("memory", _memory, advice=_FITS),
)
