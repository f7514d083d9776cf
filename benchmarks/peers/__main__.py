"""`python -m benchmarks.peers`: what other systems lose when a worker joins or leaves, and we.

Needs the extra `bench` for all but torchrun and Megatron's refit; what cannot be tried is a line
of the table that says why.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.harness import (
    BenchmarkResult,
    Spread,
    interleaved,
    loss_difference,
    parser,
    reported,
)
from benchmarks.peers import torchft_settings, torchrun_job
from benchmarks.peers.refit_job import REFIT, try_refit
from benchmarks.peers.trial import LIVE, PEERS, QUICK, Effort, Row, Trial, try_live, try_peer
from liver_hpc.errors import LiverError

SYSTEMS = (LIVE, *PEERS, REFIT)
MOST_FAILURES = 2

METHOD = {
    "all": "the same model, samples, global batch and micro-batch; 12 bytes a parameter (fp32, "
    "Adam's two moments); data parallel, one thread a worker, all on this machine; in turns. "
    "lost_s: end of the last step of the old world to the end of the first of the new, less a "
    "median step of the new; steps done again are lost too. slowdown_s: what steps of the old "
    "world took longer from the notice on. cost_s: both. Ratios are of costs in the same round; "
    "one in which either side's cannot be told from nothing gives none",
    "peers_loss_difference": "largest relative difference of a step's loss between the peers' "
    "trials, over the steps that both have done: where changes lie among them, the state came "
    "through them whole",
    "live": "a handoff by liver_hpc, distributed optimizer; its joiner boots beside training, and "
    "its leaver stays until the state has moved",
    "torchrun": "elastic agents over c10d, one worker each; plain loop under torch's DDP, every "
    "worker with the whole optimizer; on SIGTERM all stop at the same step boundary and rank 0 "
    "writes the state to disk (page cache warm), which all load. All processes of all nodes start "
    "again. Last call "
    f"{torchrun_job.LAST_CALL_S} s (default 30), keep-alive {torchrun_job.KEEP_ALIVE_S} s "
    "(default 5), so that it waits little; TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which "
    "joins hung in the rendezvous with torch 2.13",
    "torchft": "0.2, DDP only: no tensor or pipeline parallelism inside a change. Gloo, HTTP "
    "checkpoint transport. A joiner boots beside training; in the step in which it fetches the "
    "state it contributes nothing, which is a step of the old world: a median step of that is no "
    "loss, all its extra time is. A leaver ends at its boundary after SIGTERM; the lighthouse "
    f"misses its heartbeat after {torchft_settings.HEARTBEAT_TIMEOUT_MS} ms (default 5000)",
    "inprocess": "nvidia-resiliency-ext 0.4: the last of two ranks is killed, the other starts its "
    "function again in its process and takes the state from its own memory, which works because "
    "every rank has all of it. Knows no join. Unlike ours and the others it has no warning",
    "refit": "megatron.core.resharding with its gloo service, between two worlds in the same two "
    "processes; parameters alone, never the optimizer, with nothing trained: so no ratio of lost "
    "time, but of seconds against our TRANSFER of the same parameters in the same processes. "
    "Plans, groups and buffers of both exist already; what the first call takes is in the rows. "
    "partition_stride is set to 2 on gated layers: 0.16 leaves 1 there, and then halves of fc1 "
    "arrive mixed",
}


def main(arguments: list[str] | None = None) -> int:
    options = parser("peers", __doc__ or "")
    options.add_argument(
        "--only", nargs="+", choices=SYSTEMS, default=SYSTEMS, metavar="SYSTEM", help="of these"
    )
    chosen = options.parse_args(arguments)
    effort = QUICK if chosen.quick else Effort()
    return reported(lambda: run(effort, chosen.only), chosen)


def run(effort: Effort, systems: Sequence[str] = SYSTEMS) -> BenchmarkResult:
    """All systems in turns; then the refit, which has no world that trains."""
    with tempfile.TemporaryDirectory() as directory:
        attempts: dict[str, Callable[[], Trial]] = {
            name: _Attempt(name, effort, Path(directory))
            for name in (LIVE, *PEERS)
            if name in systems
        }
        rounds = interleaved(attempts, effort.repeats)
        refit = Trial([])
        if REFIT in systems:
            refit = _guarded(REFIT, partial(try_refit, effort, Path(directory)))
    return result(rounds, refit.rows, effort.repeats)


class _Attempt:
    """Tries one system. One of others that failed twice, or cannot run here, is not tried again."""

    def __init__(self, name: str, effort: Effort, directory: Path) -> None:
        self._name = name
        self._try = partial(try_live if name == LIVE else partial(try_peer, name), effort)
        self._directory = directory
        self._failures = 0

    def __call__(self) -> Trial:
        why_not = PEERS[self._name].why_not() if self._name in PEERS else None
        if why_not is not None:
            return Trial([Row(self._name, "none", detail=why_not)])
        if self._failures >= MOST_FAILURES:
            return Trial([Row(self._name, "none", detail="not tried again")])
        if self._name == LIVE:  # a failure of our own is none to go on from
            return self._try(self._directory)
        trial = _guarded(self._name, partial(self._try, self._directory))
        self._failures += sum(math.isnan(row.lost_s) for row in trial.rows)
        return trial


def _guarded(name: str, attempt: Callable[[], Trial]) -> Trial:
    """What a failure says instead of a number."""
    try:
        return attempt()
    except (LiverError, OSError) as error:
        return Trial([Row(name, "none", detail=f"did not work: {error}")])


def result(
    rounds: Mapping[str, Sequence[Trial]], refit: Sequence[Row], repeats: int
) -> BenchmarkResult:
    """Figures of all rounds: ratios are of the same round, and seconds plain."""
    spread: dict[str, Spread] = {}
    by_system = {name: [trial.rows for trial in trials] for name, trials in rounds.items()}
    for name, trials in by_system.items():
        for event in _events(trials):
            lost = [row.lost_s for row in _of(trials, event) if math.isfinite(row.lost_s)]
            cost = [row.cost_s for row in _of(trials, event) if math.isfinite(row.cost_s)]
            spread[f"{name}_{event}_cost_s"] = Spread.of(cost)
            spread[f"{name}_{event}_lost_s"] = Spread.of(lost)
            ratios = list(_ratios(trials, by_system.get(LIVE, []), event)) if name != LIVE else []
            if ratios:
                spread[f"{name}_{event}_over_live"] = Spread.of(ratios)
    rows = [row for turn in zip(*by_system.values(), strict=True) for rows in turn for row in rows]
    figures = {name: one.median for name, one in spread.items()}
    losses = [trial.losses for trials in rounds.values() for trial in trials if trial.losses]
    differences = [loss_difference(some, losses[0]) for some in losses[1:]]
    if differences:
        figures["peers_loss_difference"] = max(differences)
    ours = {row.workers: row.swap_s for row in refit if row.event == "ours"}
    for row in refit:
        if row.event == "refit" and ours.get(row.workers, 0.0) > 0.0:
            name = row.workers.replace(" -> ", "_to_")
            figures[f"refit_{name}_over_transfer"] = row.swap_s / ours[row.workers]
    return BenchmarkResult(
        "peers",
        figures,
        [asdict(row) for row in (*rows, *refit)],
        method=METHOD,
        spread=spread,
        repeats=min((one.count for one in spread.values()), default=repeats),
    )


def _events(trials: Sequence[Sequence[Row]]) -> list[str]:
    """Those that were measured at least once, in their order."""
    found = [row.event for rows in trials for row in rows if math.isfinite(row.lost_s)]
    return list(dict.fromkeys(found))


def _of(trials: Sequence[Sequence[Row]], event: str) -> Iterator[Row]:
    return (row for rows in trials for row in rows if row.event == event)


def _ratios(
    trials: Sequence[Sequence[Row]], live: Sequence[Sequence[Row]], event: str
) -> Iterator[float]:
    """Cost over ours, round by round; only where both are something that can be measured."""
    for theirs, ours in zip(trials, live, strict=False):
        for row in theirs:
            for own in ours:
                if row.event == own.event == event and own.cost_s > 0 and row.cost_s > 0:
                    yield row.cost_s / own.cost_s


if __name__ == "__main__":
    sys.exit(main())
