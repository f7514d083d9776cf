"""`python -m benchmarks.soak --events 200 --json s.json`: a run on nodes that come, go and die."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from benchmarks.harness import BenchmarkResult, loss_difference, losses, parser, reported
from benchmarks.live_runs import LiveRun
from benchmarks.models import text_data
from benchmarks.processes import living
from benchmarks.soak.recipe import PAUSE
from benchmarks.soak.storm import HANG_S, Held, Log, Storm
from liver_hpc.cli.options import positive
from liver_hpc.config.schema import RunConfig
from liver_hpc.report.derive import run_figures
from liver_hpc.report.store import read_run
from liver_hpc.report.worlds import COMPLETED
from liver_hpc.run.records import RunRecords

EVENTS, QUICK_EVENTS = 200, 12
SETTLED_EVENTS = 50
"""Before them whatever grows may grow: caches, pools, arenas."""
PAUSE_S = 0.4
SEED = 20
FIXED_S = 1200.0
LAYOUTS: Mapping[int, Sequence[Mapping[str, int]]] = {
    1: [{"dp": 1}],
    2: [{"tp": 2}],
    3: [{"dp": 3}],
    4: [{"tp": 2, "dp": 2}],
}
MOST = {
    "wrong_digests": 0,
    "hangs": 0,
    "lost_steps_beyond_copies": 0,
    "steps_missing": 0,
    "processes_left": 0,
    "restarts_from_disk": 0,
    "worker_memory_growth_percent": 2,
    "worker_descriptors_more": 4,
    "agent_memory_growth_percent": 2,
    "agent_descriptors_more": 4,
}
"""What is more calls for the logs."""
UNDISTURBED, OTHER = {2: [{"dp": 2}]}, {2: [{"tp": 2}]}

METHOD = {
    "run": "a small GPT, fp32, one worker a node, four nodes of this machine of which the first is "
    "never struck; snapshots every step, a checkpoint every 100; steps take at least "
    f"{PAUSE_S:g} s, so that joiners have room beside them",
    "events": "1.5 to 6 s after one another, drawn with a fixed seed: grants, warnings (6 to 30 "
    "s), SIGKILL of a worker, of an agent, of all of a node, SIGSTOP of a worker or an agent for "
    "0.5 to 8 s (deadlines.heartbeat_s 3), SIGKILL of the coordinator with another one 0.2 to 3 s "
    "later. They overlap with handoffs and with each other, but for losses: one strikes a world "
    "that has done 4 steps, so that copies of all its state are there",
    "wrong_digests": "handoffs that were completed without equal digests",
    "hangs": f"times at which no step was done for {HANG_S:g} s",
    "lost_steps_beyond_copies": "steps that were done again, less one for each loss",
    "growth": "of the first node's worker and agent, from event "
    f"{SETTLED_EVENTS} on: of the process, and of a worker's layout, that was seen most; the last "
    "quarter of what was seen of it against the first, medians; resident memory without files",
    "loss": "largest relative difference of a step's loss to that of an undisturbed run of dp2; "
    "over another layout: over the same of an undisturbed run of tp2",
}


def run_config(directory: Path, layouts: Mapping[int, Any], **sections: Any) -> RunConfig:
    """The model and its training are the same in all runs."""
    values = {
        "name": "soak",
        "runs_directory": str(directory / "runs"),
        "recipe": "benchmarks.soak.recipe:PacedGPT",
        "model": {
            "layers": 2,
            "hidden": 64,
            "ffn_hidden": 128,
            "heads": 4,
            "query_groups": 2,
            "seq_length": 32,
        },
        "data": {**text_data(directory / "data")},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4},
        "schedule": {"warmup_steps": 20, "decay_steps": 4000},
        "train": {"steps": 1_000_000, "global_batch": 12, "micro_batch": 2},
        "workers": {"initial": min(2, max(layouts)), "max": max(layouts)},
        "layouts": layouts,
        "cluster": {"kind": "local"},
    }
    return RunConfig.model_validate({**values, **sections})


STORMY: Mapping[str, Any] = {
    "snapshots": {"every_steps": 1},
    "checkpoint": {"every_steps": 100},
    "policy": {"settle_s": 0.5, "retry_s": 2.0},
    "deadlines": {
        "heartbeat_s": 3.0,
        "boot_s": 40.0,
        "prepare_s": 40.0,
        "boundary_s": 30.0,
        "transfer_s": 20.0,
        "release_s": 15.0,
        "coordinator_s": 30.0,
        "exit_s": 4.0,
    },
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("soak", "what becomes of a run that is struck again and again")
    options.add_argument("--events", type=positive, help=f"how many; {EVENTS} unless said")
    options.add_argument("--seed", type=int, default=SEED, help=f"of what is drawn; {SEED}")
    given = options.parse_args(arguments)
    events = given.events or (QUICK_EVENTS if given.quick else EVENTS)
    return reported(lambda: run(events, given.seed), given)


def run(events: int, seed: int) -> BenchmarkResult:
    """The storm, then two undisturbed runs of as many steps. What they have written stays where
    something has come up that calls for it, or an error."""
    begun_s = time.time()
    directory = Path(mkdtemp(prefix="soak-"))
    os.environ[PAUSE] = str(PAUSE_S)
    with Storm(run_config(directory, LAYOUTS, **STORMY), seed) as storm:
        storm.strike(events)
    records = read_run(storm.run.path)
    left = len(living(str(storm.run.path)))
    steps = max(each.step for each in records.steps)
    os.environ[PAUSE] = "0"
    fixed = [fixed_losses(run_config(directory, its), steps) for its in (UNDISTURBED, OTHER)]
    found = result(storm.log, records, fixed, left, time.time() - begun_s)
    figures = found.figures
    came_up = {
        name: figures[name] for name, most in MOST.items() if not figures.get(name, 0) <= most
    }
    if came_up:
        print(f"{came_up}: {storm.run.path} stays", file=sys.stderr)
    else:
        shutil.rmtree(directory)
    return found


def fixed_losses(config: RunConfig, steps: int) -> dict[int, float]:
    """Of a run that nothing happens to."""
    with LiveRun(config, FIXED_S) as run:
        run.reach(steps + 1)
    return losses(run.records())


def result(
    log: Log,
    records: RunRecords,
    fixed: Sequence[Mapping[int, float]],
    left: int,
    seconds: float,
) -> BenchmarkResult:
    ours = losses(records)
    undisturbed, other = ({step: each[step] for step in ours} for each in fixed)
    redone = len(records.steps) - len(ours)
    allowed = sum(min(1, each.steps_redone) for each in records.recoveries)
    outcomes = Counter(each.outcome for each in records.reconfigurations)
    completed = [each for each in records.reconfigurations if each.outcome == COMPLETED]
    differs, usual = loss_difference(ours, undisturbed), loss_difference(other, undisturbed)
    figures = {
        "events": len(log.events),
        "wrong_digests": sum(not each.digest_equal for each in completed),
        "hangs": len(log.hangs),
        "lost_steps_beyond_copies": redone - allowed,
        "steps_missing": max(ours) + 1 - len(ours),
        "steps_done": len(ours),
        "steps_redone": redone,
        "handoffs": len(completed),
        "handoffs_called_off": outcomes["aborted"],
        "recoveries": len(records.recoveries),
        "restarts_from_disk": sum(each.kind == "restart" for each in records.notices),
        **growth(log, records),
        "loss_difference": differs,
        "loss_difference_over_another_layout": differs / usual,
        "processes_left": left,
        "minutes": seconds / 60.0,
    }
    kinds = Counter(name for _, name, _ in log.events)
    rows: list[dict[str, Any]] = [{"event": name, "times": kinds[name]} for name in sorted(kinds)]
    samples: list[dict[str, Any]] = [
        {"at_s": at_s, "event": name, "what": what} for at_s, name, what in log.events
    ]
    samples += [{"of": kind, **asdict(each)} for kind, held in log.held.items() for each in held]
    samples += [{"hang": text} for text in log.hangs]
    return BenchmarkResult("soak", figures, rows, method=METHOD, samples=samples)


def growth(log: Log, records: RunRecords) -> dict[str, float]:
    """Per cent of memory, and descriptors and threads, of each kind of process."""
    layouts = {each.generation: each.layout for each in run_figures(records).generations}
    figures = dict[str, float]()
    for kind, held in log.held.items():
        groups = defaultdict[tuple[int, str], list[Held]](list)
        for each in held:
            if each.event > SETTLED_EVENTS:
                layout = layouts.get(each.generation, "") if kind == "worker" else ""
                groups[each.pid, layout].append(each)
        seen = max(groups.values(), key=len, default=[])
        quarter = len(seen) // 4
        first, last = seen[:quarter], seen[len(seen) - quarter :]
        figures |= {f"{kind}_{name}": value for name, value in _grown(first, last).items()}
        figures[f"{kind}_seen"] = len(seen)
    return figures


def _grown(first: Sequence[Held], last: Sequence[Held]) -> dict[str, float]:
    if not first:
        return {"memory_growth_percent": math.nan, "descriptors_more": math.nan}
    before, after = (
        [statistics.median(float(getattr(each, name)) for each in some) for name in _TOLD]
        for some in (first, last)
    )
    return {
        "memory_growth_percent": 100.0 * (after[0] / before[0] - 1.0),
        "descriptors_more": after[1] - before[1],
        "threads_more": after[2] - before[2],
    }


_TOLD = ("memory_bytes", "descriptors", "threads")


if __name__ == "__main__":
    sys.exit(main())
