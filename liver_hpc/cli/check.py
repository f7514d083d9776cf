"""Checks of a run that need more than one key: layouts, notices, budgets, data, this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from liver_hpc.cluster.network import node_facts, worker_network_environment
from liver_hpc.cluster.slurm.container import needed_in_image
from liver_hpc.config.indexed_data import read_indexed_data
from liver_hpc.config.megatron_checkpoint import (
    TRACKER_FILE,
    loaded_checkpoint,
    tracked_step,
    weights_checkpoint,
)
from liver_hpc.config.schema import (
    BurstSection,
    CheckpointSection,
    DataSection,
    NetworkSection,
    RunConfig,
    gpu_count,
)
from liver_hpc.errors import CheckpointError, ConfigError
from liver_hpc.layout.batch import batch_fault
from liver_hpc.layout.budget import Budget
from liver_hpc.layout.ramp import decay_steps
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.text_data import text_files
from liver_hpc.run.requests import noticed_layout
from liver_hpc.tracking.base import missing_packages

SMALLEST_BUCKET_BYTES = 65_536
"""Below this, messages cost more than the bytes in them."""

_LOCAL_WORKERS = 8
_LOCAL_WORKERS_PER_CORE = 4


def check_run(config: RunConfig, recipe: Recipe, found: Sequence[str] = ()) -> None:
    """Raises ConfigError with everything that is wrong with the run, one problem a line; as far as
    that can be seen without the spec of the recipe's model, where that is not known yet.

    found: problems that were found elsewhere, told with these. `config.cluster.kind` "local" also
    checks this machine, "slurm" what is asked of the cluster; resolve "auto" before.
    """
    layouts = [*_check_layouts(config, recipe)]
    if recipe.knows_spec and not layouts:  # those that fit a worker each may not do so in pairs
        budget = Budget(config, recipe.spec, recipe.rehearsal_bytes)
        fault = budget.change_fault(config.layouts_listed)
        layouts += [f"handoff {fault}"] if fault else []
    problems = [
        *found,
        *_check_counts(config),
        *layouts,
        *_check_notices(config),
        *_check_budgets(config),
        *_check_schedule(config),
        *_check_data(config.data, recipe),
        *_check_checkpoints(config.checkpoint, config.train.steps),
        *_check_network(config.network),
        *missing_packages(config.tracking),
    ]
    if config.cluster.kind == "local":
        problems += _check_machine(config)
    if config.cluster.kind == "slurm":
        problems += _check_slurm(config)
    if problems:
        raise ConfigError(*problems)


def local_workers_limit() -> int:
    return max(_LOCAL_WORKERS, _LOCAL_WORKERS_PER_CORE * (os.cpu_count() or 1))


def _check_checkpoints(section: CheckpointSection, steps: int) -> Iterator[str]:
    """What a new run begins with is there, and where it saves it would not go on with another's."""
    load, directory = section.load, section.directory
    same = section.goes_on_from_others
    try:
        found = None if load is None else loaded_checkpoint(load)
        if load is not None and found is None and not same:
            yield f"checkpoint.load: {load} has no checkpoint: it lacks {TRACKER_FILE}"
        if found is not None and found[0] >= steps and not same:
            yield (
                f"checkpoint.load: {load} is of step {found[0]}, and train.steps, which counts "
                f"from step 0 on, is {steps}: nothing would be trained"
            )
        if directory is not None and not same and (step := tracked_step(directory)) is not None:
            yield (
                f"checkpoint.directory: {directory} holds checkpoints of another run, the newest "
                f"of step {step}; to go on from that make it checkpoint.load, too, else give "
                "another directory"
            )
        if section.weights is not None:
            if load is not None and not same:
                yield (
                    f"checkpoint.weights: {section.weights}, beside checkpoint.load: {load}: a run "
                    "begins with one of them; both may be given where load is also directory"
                )
            weights_checkpoint(section.weights)
    except CheckpointError as error:
        yield f"checkpoint: {error}"


def _check_counts(config: RunConfig) -> Iterator[str]:
    initial, most = config.workers.initial, config.workers.max
    counts = config.worker_counts
    if not config.layout_table.get(initial):
        yield (
            f"workers.initial is {initial}, but layouts has no entry for {initial} workers "
            f"(entries: {', '.join(map(str, counts)) or 'none'})"
        )
    for count in counts:
        if count > most:
            yield f"layouts.{count}: more workers than workers.max, which is {most}"


def _check_layouts(config: RunConfig, recipe: Recipe) -> Iterator[str]:
    for count in config.worker_counts:
        if not config.layout_table[count]:
            yield f"layouts.{count}: wanted at least one layout, got none"
        for index, layout in enumerate(config.allowed_layouts(count)):
            where = f"layouts.{count}.{index} ({layout})"
            if layout.workers != count:
                yield f"{where}: tp x pp x dp x cp is {layout.workers}, wanted {count}"
            if layout in config.allowed_layouts(count)[:index]:
                yield f"{where}: given twice"
            faults = [batch_fault(config.train, layout)]
            try:
                if not recipe.knows_spec:
                    recipe.check_options_in(layout)
                else:
                    recipe.check_layout(layout)
                    faults.append(Budget(config, recipe.spec).layout_fault(layout))
            except ConfigError as error:
                faults.append(str(error))
            yield from (f"{where}: {fault}" for fault in faults if fault)


def _check_notices(config: RunConfig) -> Iterator[str]:
    """Plays the scripted notices through, as they go when every handoff succeeds."""
    allowed = config.allowed_layouts(config.workers.initial)
    if not allowed:
        return
    layout, born, gone = allowed[0], config.workers.initial, set[int]()
    in_order = sorted(enumerate(config.notices), key=lambda entry: entry[1].at_step)
    for index, notice in in_order:
        where = f"notices.{index} (at step {notice.at_step})"
        if notice.at_step >= config.train.steps:
            yield f"{where}: the run ends at step {config.train.steps}, before it"
        if notice.replace is not None:
            worker = notice.replace
            if worker in gone:
                yield f"{where}: worker {worker} has been replaced by then"
            elif worker >= born:
                yield f"{where}: there is no worker {worker} by then; the newest is {born - 1}"
            gone.add(worker)
            born += 1
            continue
        try:
            target = noticed_layout(config, notice)
        except ConfigError as error:
            yield f"{where}: {error}"
            continue
        if target == layout:
            yield f"{where}: {target} is the layout in force by then; nothing would change"
        born += max(0, target.workers - layout.workers)
        layout = target


def _check_budgets(config: RunConfig) -> Iterator[str]:
    bucket, staging = config.handoff.bucket_bytes, config.handoff.staging_bytes
    if bucket < SMALLEST_BUCKET_BYTES:
        yield (
            f"handoff.bucket_bytes is {bucket}, below the smallest bucket of "
            f"{SMALLEST_BUCKET_BYTES} bytes"
        )
    if staging < 2 * bucket:
        yield (
            f"handoff.staging_bytes is {staging}, wanted at least two buckets "
            f"(one to fill, one on the wire): 2 x bucket_bytes = {2 * bucket}"
        )
    memory = config.policy.memory_bytes
    if memory is not None and memory <= staging:
        yield f"policy.memory_bytes is {memory}, wanted more than handoff.staging_bytes, {staging}"


def _check_schedule(config: RunConfig) -> Iterator[str]:
    schedule, optimizer = config.schedule, config.optimizer
    decay = decay_steps(schedule, config.train)
    if schedule.warmup_steps >= decay:
        name = "train.steps" if schedule.decay_steps is None else "schedule.decay_steps"
        if schedule.decay_steps is None and config.train.rampup is not None:
            name += " in steps of train.global_batch samples"
        warmup = f"schedule.warmup_steps is {schedule.warmup_steps:g}"
        yield f"{warmup}, wanted less than {name}, {decay:g}"
    tail = schedule.wsd_decay_steps
    if (schedule.style == "WSD") != (tail is not None):
        given = "not given" if tail is None else f"{tail:g}"
        yield (
            f"schedule.wsd_decay_steps is {given}, wanted with schedule.style WSD, and only with "
            f"it; schedule.style is {schedule.style}"
        )
    elif tail is not None and tail > decay - schedule.warmup_steps:
        yield (
            f"schedule.wsd_decay_steps is {tail:g}, wanted at most what comes after the warm-up, "
            f"{decay - schedule.warmup_steps:g}"
        )
    if schedule.warmup_init > optimizer.lr:
        init = f"schedule.warmup_init is {schedule.warmup_init:g}"
        yield f"{init}, more than optimizer.lr {optimizer.lr:g}"
    if optimizer.min_lr > optimizer.lr:
        yield f"optimizer.min_lr is {optimizer.min_lr:g}, more than optimizer.lr {optimizer.lr:g}"


def _check_data(data: DataSection | None, recipe: Recipe) -> Iterator[str]:
    missing = [*_missing_data(data)]
    yield from missing
    if not missing:
        try:
            recipe.check_data()
        except ConfigError as error:
            yield from error.args


def _missing_data(data: DataSection | None) -> Iterator[str]:
    if data is None:
        return
    if data.text is not None:
        try:
            text_files(data)  # what is not there is noticed
        except ConfigError as error:
            yield str(error)
    named = [("data.prefix", data.prefix)] if data.prefix is not None else []
    named += [(f"data.blend.{i}.prefix", each.prefix) for i, each in enumerate(data.blend or ())]
    for key, prefix in named:
        try:
            read_indexed_data(prefix)
        except ConfigError as error:
            yield f"{key}: {error}"


_OWN_KEYS = {"NCCL_SOCKET_IFNAME": "nccl_interface", "NCCL_IB_HCA": "ib_hca"}


def _check_network(network: NetworkSection) -> Iterator[str]:
    for variable, key in _OWN_KEYS.items():
        if variable in network.nccl:
            yield f"network.nccl.{variable}: has a key of its own; write network.{key}"
    for key in ("nccl_interface", "gloo_interface", "ib_hca"):
        given = getattr(network, key)
        if given is not None and not all(part.strip(" ^=") for part in given.split(",")):
            yield f"network.{key}: wanted names with commas between, got {given!r}"


def _check_machine(config: RunConfig) -> Iterator[str]:
    if config.cluster.slurm.container is not None:
        yield "cluster.slurm.container: a run on this machine starts no container; it wants Slurm"
    workers, limit, cores = config.workers, local_workers_limit(), os.cpu_count() or 1
    if workers.max + workers.standby > limit:
        beside = f" and workers.standby {workers.standby}" if workers.standby else ""
        yield (
            f"workers.max is {workers.max}{beside}, but a local run on this machine may have "
            f"{limit} workers "
            f"(the larger of {_LOCAL_WORKERS} and {_LOCAL_WORKERS_PER_CORE} x {cores} cores)"
        )
    try:
        worker_network_environment(config.network, "local", node_facts(), {})
    except ConfigError as error:
        yield str(error)


# ---- what is asked of Slurm


def _check_slurm(config: RunConfig) -> Iterator[str]:
    slurm = config.cluster.slurm
    if slurm.container is not None:
        for path in needed_in_image(config, config.runs_directory):
            if {*":,"} & {*str(path)}:
                yield f"cluster.slurm.container: {path} cannot be mounted: it has ':' or ',' in it"
    for index, component in enumerate(slurm.components):
        where = f"cluster.slurm.components.{index}"
        earlier = [other.name for other in slurm.components[:index]]
        if component.name in earlier:
            yield f"{where}.name: {component.name!r} is given twice"
    counts = [(part.name, gpu_count(part.gpus_per_node)) for part in slurm.components]
    if slurm.burst is not None:
        counts.append(("burst", gpu_count(slurm.burst.gpus_per_node)))
    without = [name for name, count in counts if not count]
    if without and len(without) < len(counts):
        yield (
            f"cluster.slurm: gpus_per_node of {', '.join(without)} is 0, others have some: workers "
            "on CPUs cannot train with those on GPUs"
        )
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
    for key, limit in (
        ("min_nodes", "max_nodes"),
        ("nodes_per_request", "max_nodes"),
        ("backoff_s", "backoff_max_s"),
    ):
        value, most = getattr(burst, key), getattr(burst, limit)
        if value > most:
            yield f"cluster.slurm.burst.{key} is {value:g}, more than {limit}, {most:g}"


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
