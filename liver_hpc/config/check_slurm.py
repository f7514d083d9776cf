"""Checks of what a run asks of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator

from liver_hpc.config.schema import BurstSection, ComponentSection, RunConfig, SlurmSection

OWN_OPTIONS = {
    "array": "",
    "comment": "",
    "cpus-per-task": "cpus_per_node",
    "error": "",
    "gpus-per-node": "gpus_per_node",
    "hold": "",
    "job-name": "name",
    "no-requeue": "cluster.slurm.requeue",
    "nodes": "nodes",
    "ntasks": "workers_per_node",
    "ntasks-per-node": "workers_per_node",
    "open-mode": "",
    "output": "",
    "parsable": "",
    "partition": "partition",
    "requeue": "cluster.slurm.requeue",
    "signal": "cluster.slurm.end_window_s",
    "test-only": "",
    "time": "cluster.timeout_min, or time_min of a burst",
    "wait": "",
    "wrap": "",
}
"""Options of sbatch that liver gives itself, and the key that says what it gives."""


def check_slurm(config: RunConfig) -> Iterator[str]:
    slurm = config.cluster.slurm
    yield from _check_texts("cluster.slurm", slurm)
    for index, component in enumerate(slurm.components):
        where = f"cluster.slurm.components.{index}"
        earlier = [other.name for other in slurm.components[:index]]
        if component.name in earlier:
            yield f"{where}.name: {component.name!r} is given twice"
        yield from _check_texts(where, component)
        yield from _check_options(where, component)
    if slurm.components and slurm.components[0].join == "asked":
        yield (
            "cluster.slurm.components.0.join: the first component is used from the start; "
            "only another one can wait to be asked for"
        )
    if slurm.burst is not None:
        yield from _check_burst(slurm.burst)
        if slurm.end_window_s >= 60 * slurm.burst.time_min:
            yield (
                f"cluster.slurm.burst.time_min is {slurm.burst.time_min}, wanted more than "
                f"end_window_s, {slurm.end_window_s:g} s: its nodes would be left at once"
            )
    if slurm.end_window_s >= 60 * config.cluster.timeout_min:
        yield (
            f"cluster.slurm.end_window_s is {slurm.end_window_s:g}, wanted less than the job's "
            f"time limit, cluster.timeout_min: {60 * config.cluster.timeout_min} s"
        )
    if slurm.components:
        yield from _check_slots(config)
    else:
        yield "cluster.slurm.components: a run on Slurm wants at least one component, got none"


def _check_burst(burst: BurstSection) -> Iterator[str]:
    where = "cluster.slurm.burst"
    yield from _check_texts(where, burst)
    yield from _check_options(where, burst)
    for key in ("min_nodes", "nodes_per_request"):
        if getattr(burst, key) > burst.max_nodes:
            yield f"{where}.{key} is {getattr(burst, key)}, more than max_nodes, {burst.max_nodes}"
    if burst.backoff_s > burst.backoff_max_s:
        yield (
            f"{where}.backoff_s is {burst.backoff_s:g}, more than backoff_max_s, "
            f"{burst.backoff_max_s:g}"
        )


def _check_slots(config: RunConfig) -> Iterator[str]:
    """The nodes must carry the workers that the run file promises."""
    cluster, burst = config.cluster, config.cluster.slurm.burst
    held = [(part.nodes, cluster.slots(part), part.name) for part in cluster.slurm.components]
    if burst is not None:
        held.append((burst.max_nodes, cluster.slots(burst), "burst"))
    slots = sum(nodes * workers for nodes, workers, _ in held)
    told = " + ".join(f"{nodes} x {workers} of {name}" for nodes, workers, name in held)
    for key, workers in (("initial", config.workers.initial), ("max", config.workers.max)):
        if workers > slots:
            yield (
                f"workers.{key} is {workers}, but the nodes asked for take {slots} "
                f"({told}, as nodes x workers)"
            )


def _check_options(where: str, part: ComponentSection | BurstSection) -> Iterator[str]:
    for name, value in part.options.items():
        if name in OWN_OPTIONS:
            key = OWN_OPTIONS[name]
            said = f"; its key is {key}" if key else ""
            yield f"{where}.options.{name}: liver gives --{name} itself{said}"
        elif value is False:
            yield f"{where}.options.{name}: wanted a value, or true for none; leave it out instead"
        elif not _is_plain(str(value)):
            yield f"{where}.options.{name}: {value!r} is empty or has control characters"


def _check_texts(
    where: str, section: SlurmSection | ComponentSection | BurstSection
) -> Iterator[str]:
    """Values that become options of sbatch by themselves."""
    for key in ("account", "qos", "partition", "python"):
        value = getattr(section, key, None)
        if value is not None and not _is_plain(value):
            yield f"{where}.{key}: {value!r} is empty or has control characters"


def _is_plain(text: str) -> bool:
    """A line end would begin another line of the batch script."""
    return bool(text.strip()) and text.isprintable()
