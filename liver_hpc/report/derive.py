"""What a run's reconfigurations cost, from its records alone. Pure; a figure that cannot be known
is NaN.

The median of a generation is that of its undisturbed steps; where it has none, that of all but its
first step, and a flag says so; where it has no other step either, NaN.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from liver_hpc.run.records import ReconfigurationRecord, RunRecords, StepRecord

COMPLETED = "completed"
ABORTED = "aborted"
_TIMES = [f.name for f in fields(ReconfigurationRecord) if f.name.endswith("_s")]
_TIMES.remove("pause_s")


@dataclass(frozen=True)
class GenerationFigures:
    """What one world did. layout is empty where no record names it."""

    generation: int
    layout: str
    steps: int
    median_step_s: float
    median_is_disturbed: bool
    tokens_per_s: float


@dataclass(frozen=True)
class PhaseFigures:
    """How long each phase of an attempt took, in seconds; NaN for a phase that did not end.

    boot: notice to the last joiner's Hello, with the time that the notice had to wait its turn;
    prepare: to all workers prepared; boundary: to the end of the source's last step; transfer: to
    the parameters' verdict; commit: to the commit verdict; release: to the source world's end.
    """

    boot_s: float
    prepare_s: float
    boundary_s: float
    transfer_s: float
    commit_s: float
    release_s: float


@dataclass(frozen=True)
class ReconfigurationFigures:
    """What one attempt cost.

    lost_s: what the handoff cost beyond one median step of the target; of an aborted attempt the
    time that the source stood at the boundary. lost_steps: the same in median steps of the world
    that trained on. slowdown_s: extra time of source steps beside PREPARE and of target steps
    beside RELEASE. reconfiguration_s: notice to the end of the target's first step.
    median_is_disturbed: a median behind these figures had to be taken of disturbed steps.
    """

    generation: int
    source: str
    target: str
    notice: str
    outcome: str
    detail: str
    step: int
    pause_s: float
    lost_s: float
    lost_steps: float
    slowdown_s: float
    reconfiguration_s: float
    bytes_moved: int
    bytes_local: int
    digest_equal: bool
    median_is_disturbed: bool
    phases: PhaseFigures

    @property
    def completed(self) -> bool:
        return self.outcome == COMPLETED


@dataclass(frozen=True)
class RunFigures:
    """Totals of a run. Sums leave out what is not known; bytes are those of completed handoffs;
    aborted counts all others.

    steps counts each step once; missing_steps were done but not recorded. wall_s: start of the
    first recorded step to the end of the last. goodput: between 0 and 1.
    """

    generations: tuple[GenerationFigures, ...]
    reconfigurations: tuple[ReconfigurationFigures, ...]
    steps: int
    missing_steps: int
    completed: int
    aborted: int
    wall_s: float
    pause_s: float
    lost_s: float
    slowdown_s: float
    bytes_moved: int
    bytes_local: int
    tokens: int
    tokens_per_s: float
    goodput: float


def run_figures(records: RunRecords) -> RunFigures:
    """Everything that is derived of a run."""
    generations = generation_figures(records)
    attempts = reconfiguration_figures(records)
    completed = [attempt for attempt in attempts if attempt.completed]
    done = list({step.step: step for step in records.steps}.values())
    wall_s = _wall_s(records.steps)
    tokens = sum(step.tokens for step in done)
    numbers = [step.step for step in done]
    return RunFigures(
        generations=generations,
        reconfigurations=attempts,
        steps=len(done),
        missing_steps=max(numbers) - min(numbers) + 1 - len(done) if done else 0,
        completed=len(completed),
        aborted=len(attempts) - len(completed),
        wall_s=wall_s,
        pause_s=_sum(attempt.pause_s for attempt in attempts),
        lost_s=_sum(attempt.lost_s for attempt in attempts),
        slowdown_s=_sum(attempt.slowdown_s for attempt in attempts),
        bytes_moved=sum(attempt.bytes_moved for attempt in completed),
        bytes_local=sum(attempt.bytes_local for attempt in completed),
        tokens=tokens,
        tokens_per_s=_ratio(tokens, wall_s),
        goodput=_ratio(_useful_s(records, done), wall_s),
    )


# ---- worlds


def generation_figures(records: RunRecords) -> tuple[GenerationFigures, ...]:
    """The worlds that trained, in the order of their numbers."""
    by_generation: dict[int, list[StepRecord]] = defaultdict(list)
    for step in records.steps:
        by_generation[step.generation].append(step)
    figures = []
    for generation, steps in sorted(by_generation.items()):
        median_s, disturbed = _median_step_s(steps)
        figures.append(
            GenerationFigures(
                generation=generation,
                layout=_layout_of(generation, records.reconfigurations),
                steps=len(steps),
                median_step_s=median_s,
                median_is_disturbed=disturbed,
                tokens_per_s=_ratio(statistics.median(s.tokens for s in steps), median_s),
            )
        )
    return tuple(figures)


def _median_step_s(steps: Iterable[StepRecord]) -> tuple[float, bool]:
    """The median of one generation's steps, and whether it had to be taken of disturbed ones."""
    took_s: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        took_s[step.phase].append(step.ended_s - step.started_s)
    if took_s[""]:
        return statistics.median(took_s[""]), False
    rest_s = [s for phase, phase_s in took_s.items() if phase != "first" for s in phase_s]
    return (statistics.median(rest_s) if rest_s else math.nan), True


def _layout_of(generation: int, attempts: Sequence[ReconfigurationRecord]) -> str:
    for attempt in attempts:
        if attempt.source_generation == generation:
            return attempt.source
        if attempt.generation == generation and attempt.outcome == COMPLETED:
            return attempt.target
    for attempt in attempts:
        # An aborted attempt may leave the source world to be built anew, under the next number.
        if attempt.generation + 1 == generation and attempt.outcome == ABORTED:
            return attempt.source
    return ""


# ---- reconfigurations


def reconfiguration_figures(records: RunRecords) -> tuple[ReconfigurationFigures, ...]:
    """Every attempt's cost, in the order of the records."""
    worlds = {figures.generation: figures for figures in generation_figures(records)}
    beside = _steps_beside(records)
    begun_s = _begun_s(records.reconfigurations)
    return tuple(
        replace(
            _attempt_figures(attempt, records.steps, worlds, beside[attempt.generation]),
            phases=_phase_figures(attempt, begun_s[attempt.generation]),
        )
        for attempt in records.reconfigurations
    )


def _attempt_figures(
    record: ReconfigurationRecord,
    steps: Sequence[StepRecord],
    worlds: Mapping[int, GenerationFigures],
    beside: Sequence[StepRecord],
) -> ReconfigurationFigures:
    source, target = worlds.get(record.source_generation), worlds.get(record.generation)
    went_on = target if record.outcome == COMPLETED else source
    median_s = went_on.median_step_s if went_on is not None else math.nan
    if record.outcome == COMPLETED:
        lost_s = record.first_step_ended_s - record.source_last_step_ended_s - median_s
    elif record.outcome == ABORTED:
        lost_s = _stood_still_s(record, steps)
    else:
        lost_s = math.nan  # the run ended with it
    extra_s = (s.ended_s - s.started_s - worlds[s.generation].median_step_s for s in beside)
    used = {s.generation for s in beside} | ({went_on.generation} if went_on is not None else set())
    return ReconfigurationFigures(
        generation=record.generation,
        source=record.source,
        target=record.target,
        notice=record.notice,
        outcome=record.outcome,
        detail=record.detail,
        step=record.step,
        pause_s=record.pause_s,
        lost_s=lost_s,
        lost_steps=0.0 if lost_s == 0 else _ratio(lost_s, median_s),
        slowdown_s=math.fsum(extra_s),
        reconfiguration_s=record.first_step_ended_s - record.notice_s,
        bytes_moved=record.bytes_moved,
        bytes_local=record.bytes_local,
        digest_equal=record.digest_equal,
        median_is_disturbed=any(worlds[generation].median_is_disturbed for generation in used),
        phases=_phase_figures(record, record.notice_s),
    )


def _phase_figures(record: ReconfigurationRecord, begun_s: float) -> PhaseFigures:
    """Seconds in each phase; a notice's time in the queue belongs to none of them."""
    return PhaseFigures(
        boot_s=record.boot_ended_s - begun_s,
        prepare_s=record.prepare_ended_s - record.prepare_started_s,
        boundary_s=record.source_last_step_ended_s - record.armed_s,
        transfer_s=record.transfer_ended_s - record.source_last_step_ended_s,
        commit_s=record.committed_s - record.transfer_ended_s,
        release_s=record.released_s - record.committed_s,
    )


def _stood_still_s(record: ReconfigurationRecord, steps: Sequence[StepRecord]) -> float:
    """From the boundary to the next step of whatever trained on; 0 when it was not reached."""
    stopped_s = record.source_last_step_ended_s
    if math.isnan(stopped_s):
        return 0.0
    next_s = min((s.started_s for s in steps if s.started_s >= stopped_s), default=math.nan)
    return next_s - stopped_s


def _steps_beside(records: RunRecords) -> dict[int, list[StepRecord]]:
    """The steps that each attempt, by its generation, disturbed.

    A source step belongs to one attempt away from its world: the last that had begun by its end.
    """
    found: dict[int, list[StepRecord]] = defaultdict(list)
    begun_s = _begun_s(records.reconfigurations)
    for step in records.steps:
        if step.phase == "release":
            found[step.generation].append(step)
        elif step.phase == "prepare":
            away = [a for a in records.reconfigurations if a.source_generation == step.generation]
            begun = [a for a in away if begun_s[a.generation] <= step.ended_s]
            for attempt in begun[-1:] or away[:1]:
                found[attempt.generation].append(step)
    return found


def _begun_s(attempts: Sequence[ReconfigurationRecord]) -> dict[int, float]:
    """When each attempt began at the earliest: with its notice, but after the one before it."""
    begun_s: dict[int, float] = {}
    over_s = -math.inf
    for attempt in attempts:
        begun_s[attempt.generation] = max(attempt.notice_s, over_s)
        times_s = [getattr(attempt, name) for name in _TIMES]
        over_s = max([over_s, *(time_s for time_s in times_s if not math.isnan(time_s))])
    return begun_s


# ---- notices


@dataclass(frozen=True)
class NoticeFigures:
    """What became of one node's notice. Times in seconds; NaN for what did not happen.

    window_s: from the notice until the node's processes are killed. left_s: from the notice to the
    end of the last process there, of a granted node to the first step with it. pause_s and
    lost_steps: of the handoff that answered it. repeated_steps: training steps done again since.
    """

    kind: str
    node: str
    allocation: str
    window_s: float
    left_s: float
    generation: int
    pause_s: float
    lost_steps: float
    repeated_steps: int
    outcome: str
    action: str


def notice_figures(records: RunRecords) -> tuple[NoticeFigures, ...]:
    """Every notice, in the order in which they came."""
    attempts = {a.generation: a for a in reconfiguration_figures(records)}
    ends_s = {r.generation: r.first_step_ended_s for r in records.reconfigurations}
    notices = sorted(records.notices, key=lambda notice: notice.at_s)
    figures = []
    for number, notice in enumerate(notices):
        later = (other.at_s for other in notices[number:] if other.at_s > notice.at_s)
        attempt = attempts.get(notice.generation)
        granted = notice.kind == "granted"
        left_s = ends_s.get(notice.generation, math.nan) if granted else notice.left_s
        figures.append(
            NoticeFigures(
                kind=notice.kind,
                node=notice.node,
                allocation=notice.allocation,
                window_s=notice.deadline_s - notice.at_s,
                left_s=left_s - notice.at_s,
                generation=notice.generation,
                pause_s=attempt.pause_s if attempt is not None else math.nan,
                lost_steps=attempt.lost_steps if attempt is not None else math.nan,
                repeated_steps=_repeated(records.steps, notice.at_s, min(later, default=math.inf)),
                outcome=notice.outcome,
                action=notice.action,
            )
        )
    return tuple(figures)


def _repeated(steps: Sequence[StepRecord], from_s: float, to_s: float) -> int:
    """Steps that began in a span of time and had been done before."""
    done: set[int] = set()
    count = 0
    for step in steps:
        count += step.step in done and from_s <= step.started_s < to_s
        done.add(step.step)
    return count


# ---- totals


def _wall_s(steps: Sequence[StepRecord]) -> float:
    if not steps:
        return math.nan
    return max(step.ended_s for step in steps) - min(step.started_s for step in steps)


def _useful_s(records: RunRecords, done: Sequence[StepRecord]) -> float:
    """Each step at the median of its world; where that has none, of its layout's other worlds."""
    worlds = {figures.generation: figures for figures in generation_figures(records)}
    quiet_s: dict[str, list[float]] = defaultdict(list)
    for step in records.steps:
        if step.phase == "" and worlds[step.generation].layout:
            quiet_s[worlds[step.generation].layout].append(step.ended_s - step.started_s)
    useful_s = []
    for step in done:
        world = worlds[step.generation]
        if world.median_is_disturbed and quiet_s[world.layout]:
            useful_s.append(statistics.median(quiet_s[world.layout]))
        else:
            useful_s.append(world.median_step_s)
    return _sum(useful_s)


def _sum(values: Iterable[float]) -> float:
    return math.fsum(value for value in values if math.isfinite(value))


def _ratio(value: float, base: float) -> float:
    return value / base if base > 0 else math.nan
