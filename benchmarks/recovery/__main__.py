"""`python -m benchmarks.recovery --json r.json`: workers and nodes that are lost without a word."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.harness import BenchmarkResult, Spread, interleaved, parser, reported
from benchmarks.recovery import copies, torchft
from benchmarks.recovery.trials import (
    CASES,
    DISK,
    HEARTBEAT_S,
    KILLED,
    MEMORY,
    SILENT,
    TORCHFT,
    Case,
    Trial,
    Trials,
)
from liver_hpc.cli.options import positive
from liver_hpc.errors import ConfigError

SILENT_SIZE = 0
"""The smallest model: how long silence lasts does not depend on it."""
COPY_PAIRS, COPY_STEPS = 12, 3
"""Many short blocks: from minute to minute a step's cost differs by more than snapshots take."""
_METHODS = (MEMORY, DISK, TORCHFT)
QUICK_CASES = (CASES[0], CASES[-1])

METHOD = {
    "loss": "the last worker of a world is killed by SIGKILL (worker), or an agent with its two "
    "workers (node: two agents stand for two nodes of this machine, so that partners are on the "
    "other one); snapshots every step. The signal comes once a certain step has been reported, "
    "with either method: so recovery and restart go back to the boundary before it, do it again, "
    "and the step that was under way, too",
    "detection": "from just before the signal to when the coordinator knew, the largest; killed: "
    f"with any method; silent: by SIGSTOP, never woken, deadlines.heartbeat_s {HEARTBEAT_S:g}, "
    "smallest model",
    "recovery": "from the signal to the end of the first step beyond all that had been done, less "
    "one undisturbed step of that layout: detection and redone steps are in it; steps are those of "
    "a run of that layout that nothing happens to, with snapshots every step, too, which each step "
    "pays for. bare_over_restart: less a step of a run without. Growing back comes after that "
    "(whole_s), as a handoff, whose cost is that of any other",
    "restart": "the same of a run that begins again from its checkpoint by itself, in its best "
    "case: one is written after every step, page cache warm. Training "
    "stands still while they are written; that is left out. Copies that are taken beside redone "
    "steps slow them, and are in recovery",
    "whole": "from the signal to the end of the first step in the layout that there was",
    "layouts": "from memory in what is left: dp2 to dp1, tp2 dp2 to tp2; the restart begins in the "
    "layout that there was, as this machine has room for others",
    "over": "ratio of the two in the same round, median; recovery_over_restart: the worst case",
    "max_relative_difference": "of a step's loss, of all runs that lost somebody, against an "
    "undisturbed run's of the layout that was left",
    "copies": f"25M parameters, dp2, {copies.TOKENS} tokens a step, snapshots.every_steps auto; "
    "CPU seconds a step of all processes of a run with them over those of one without, in turns: "
    "one trains for some intervals between snapshots while the other is stopped (SIGSTOP); median "
    "of the pairs. copies_every_steps: the interval that was chosen last",
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser("recovery", "what the loss of a worker or a node costs")
    options.add_argument("--sizes", nargs="+", metavar="SIZE", help="25m, 100m; both unless said")
    options.add_argument("--repeats", type=positive, help="of every loss; 5 unless said")
    given = options.parse_args(arguments)
    repeats = given.repeats or (1 if given.quick else 5)
    return reported(lambda: run(given.sizes, repeats, given.quick), given)


def run(sizes: Sequence[str] | None, repeats: int, quick: bool) -> BenchmarkResult:
    """All losses in turns; then copies, in two runs that lose nobody."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        trials = Trials(directory)
        sizes = sizes or trials.sizes[: 1 if quick else None]
        if unknown := [size for size in sizes if size not in trials.sizes]:
            raise ConfigError(f"--sizes: wanted some of {trials.sizes}, got {unknown}")
        cases = QUICK_CASES if quick else CASES
        found = [
            one for size in sizes for case in cases for one in _lose(trials, size, case, repeats)
        ]
        silent = partial(trials.lose, trials.sizes[SILENT_SIZE], method=MEMORY, fault=SILENT)
        for _ in range(repeats):
            found += [silent(case=case) for case in (cases[0], cases[-1])]
        pairs = 1 if quick else COPY_PAIRS
        blocks = copies.measure(directory, pairs, COPY_STEPS)
    return result(found, blocks)


def _lose(trials: Trials, size: str, case: Case, repeats: int) -> list[Trial]:
    """From memory, from disk and, where it can, by torchft, in turns."""
    methods = [MEMORY, DISK]
    if case is CASES[0] and torchft.why_not() is None:
        methods.append(TORCHFT)
    makers = {method: partial(trials.lose, size, case, method) for method in methods}
    by_method = interleaved(makers, repeats)
    return [trial for turn in zip(*by_method.values(), strict=True) for trial in turn]


def result(
    trials: Sequence[Trial], blocks: Mapping[str, Sequence[copies.Block]]
) -> BenchmarkResult:
    """Detection is the largest, what a loss costs the median of its repeats, and over all sizes and
    cases the worst of these."""
    ours = [trial for trial in trials if trial.method != TORCHFT]
    detection_s = {
        fault: max(trial.noticed_s for trial in ours if trial.fault == fault)
        for fault in (KILLED, SILENT)
    }
    spread = {name: Spread.of(values) for name, values in _by_case(trials).items()}
    spread["copies_overhead_percent"] = copies.overhead_percent(blocks)
    medians = {name: each.median for name, each in spread.items()}
    figures = {
        "detection_s": max(detection_s.values()),
        **{f"detection_{fault}_s": each_s for fault, each_s in detection_s.items()},
        **{
            figure: max(value for name, value in medians.items() if name.startswith(f"{figure}_of"))
            for figure in ("recovery_s", "recovery_over_restart", "bare_over_restart")
        },
        "steps_rolled_back_max": max(t.steps_redone for t in trials if t.method == MEMORY),
        "max_relative_difference": max(trial.difference for trial in ours),
        "processes_left": max(trial.left for trial in ours),
        "copies_every_steps": blocks[copies.WITH][-1].every_steps,
    }
    samples = [
        {"side": side, "pair": number, **asdict(block)}
        for side, each in blocks.items()
        for number, block in enumerate(each)
    ]
    return BenchmarkResult(
        "recovery",
        figures | medians,
        [asdict(trial) for trial in trials],
        method=METHOD | {"torchft": torchft.why_not() or torchft.METHOD},
        spread=spread,
        repeats=min(each.count for each in spread.values()),
        samples=samples,
    )


def _by_case(trials: Sequence[Trial]) -> dict[str, list[float]]:
    """Seconds by method and the ratio of both, by size and case; only of those that were killed."""
    found: dict[str, list[float]] = {}
    killed = [trial for trial in trials if trial.fault == KILLED]
    for size, case in dict.fromkeys((trial.size, trial.case) for trial in killed):
        here = [trial for trial in killed if (trial.size, trial.case) == (size, case)]
        by_method = {method: [t for t in here if t.method == method] for method in _METHODS}
        some, others, theirs = by_method.values()
        for method, trials_of in ((MEMORY, some), (DISK, others)):
            found[f"{method}_s_of_{case}_{size}"] = [trial.lost_s for trial in trials_of]
            found[f"{method}_whole_s_of_{case}_{size}"] = [trial.whole_s for trial in trials_of]
        found[f"recovery_over_restart_of_{case}_{size}"] = _ratios(some, others)
        found[f"bare_over_restart_of_{case}_{size}"] = [
            one.bare_s / other.lost_s for one, other in zip(some, others, strict=True)
        ]
        if theirs:
            found[f"{TORCHFT}_s_of_{case}_{size}"] = [trial.lost_s for trial in theirs]
            found[f"recovery_over_torchft_of_{case}_{size}"] = _ratios(some, theirs)
    return found


def _ratios(some: Sequence[Trial], others: Sequence[Trial]) -> list[float]:
    """Of what was lost, round by round."""
    return [one.lost_s / other.lost_s for one, other in zip(some, others, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
