"""What a run's reconfigurations cost, from its records alone. Pure; a figure that cannot be known
is NaN. The medians of worlds are those of `worlds.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from liver_hpc.report.critical_path import CriticalPath, critical_path
from liver_hpc.report.hours import WorkerHours, worker_hours
from liver_hpc.report.worlds import (
    ABORTED,
    COMPLETED,
    GenerationFigures,
    StepTimes,
    built_anew,
    finite_sum,
    known_sum,
    ratio,
    took_s,
    worlds_of,
)
from liver_hpc.run.records import (
    CrossingRecord,
    EvaluationRecord,
    NoticeRecord,
    ReconfigurationRecord,
    RecoveryRecord,
    RunRecords,
    StepRecord,
)


@dataclass(frozen=True)
class PhaseFigures:
    """How long each phase of an attempt took, in seconds; NaN for a phase that did not end.

    boot: from the attempt's beginning to the last joiner's Hello; prepare: to all workers prepared;
    boundary: to the end of the source's last step; transfer: to the parameters' verdict; commit: to
    the commit verdict; release: to the source world's end.
    """

    boot_s: float
    prepare_s: float
    boundary_s: float
    transfer_s: float
    commit_s: float
    release_s: float


@dataclass(frozen=True, kw_only=True)
class ReconfigurationFigures(ReconfigurationRecord):
    """One attempt, as it was recorded, with what it cost.

    lost_s: from the end of the source's last step to the end of the target's first, less one median
    step of the target; of an aborted attempt the time that the source stood at the boundary.
    slowdown_s: extra time of source steps beside BOOT and PREPARE and of target steps beside
    RELEASE. cost_s: both together, all that training has given for it, as far as that is known of
    one that did not complete. lost_steps, cost_steps: in
    median steps of the world that trained on. reconfiguration_s: notice to the end of the target's
    first step. median_is_disturbed: a median behind these figures had to be taken of disturbed
    steps. path: where the lost time went; None where the workers did not say.
    """

    cost_s: float
    cost_steps: float
    lost_s: float
    lost_steps: float
    slowdown_s: float
    reconfiguration_s: float
    median_is_disturbed: bool
    phases: PhaseFigures
    path: CriticalPath | None

    @property
    def completed(self) -> bool:
        return self.outcome == COMPLETED


@dataclass(frozen=True)
class NoticeFigures:
    """What became of one node's notice. Times in seconds; NaN for what did not happen.

    window_s: from the notice until the node's processes are killed. left_s: from the notice to the
    end of the last process there, of a granted node to the first step with it. pause_s and
    lost_steps: of the handoff that answered it. repeated_steps: training steps done again for it;
    losses of one recovery have the same ones.
    """

    record: NoticeRecord
    window_s: float
    left_s: float
    pause_s: float
    lost_steps: float
    repeated_steps: int


@dataclass(frozen=True)
class RecoveryFigures:
    """What a recovery took. known_s: from the end of the lost world's last step until the loss was
    known; of one that was lost before its first, from when it was filled. let_go_s: until all that
    were left had let the old world go. refill_s: from then until the new one was filled and proved.
    first_step_s: from then to the end of its first step. steps_again: how many were done after it
    that had been done before, until the next way back; 0 where its world was lost before its
    first."""

    record: RecoveryRecord
    known_s: float
    let_go_s: float
    refill_s: float
    first_step_s: float
    steps_again: int

    @property
    def stood_s(self) -> float:
        """How long no step was done for it."""
        return finite_sum((self.known_s, self.let_go_s, self.refill_s))


@dataclass(frozen=True)
class RunFigures:
    """Totals of a run, and its parts: worlds by their number, attempts in the order of the records,
    notices as they came. Sums leave out what is not known. unknown: completed handoffs whose lost
    time is not, of which cost_s has the slowdown alone. Bytes and spares are those of completed
    handoffs.

    steps counts each step once; steps_again were done that had been done before, after recoveries
    and starts from disk; missing_steps were done but not recorded. wall_s: start of the
    first recorded step to the end of the last. goodput: at most 1, as medians of few steps may be
    above what steps took in all; an evaluation within is useful, once. evaluations, evaluation_s:
    how many, and how long they took; each once. hours: of workers, held and what became of them.
    stragglers: how often each node was named as one.
    """

    generations: tuple[GenerationFigures, ...]
    reconfigurations: tuple[ReconfigurationFigures, ...]
    recoveries: tuple[RecoveryFigures, ...]
    notices: tuple[NoticeFigures, ...]
    steps: int
    steps_again: int
    missing_steps: int
    completed: int
    aborted: int
    failed: int
    wall_s: float
    pause_s: float
    cost_s: float
    lost_s: float
    slowdown_s: float
    unknown: int
    bytes_moved: int
    bytes_local: int
    bytes_between_nodes: int
    spares: int
    tokens: int
    tokens_per_s: float
    goodput: float
    evaluations: int
    evaluation_s: float
    hours: WorkerHours
    stragglers: Mapping[str, int]


def run_figures(records: RunRecords) -> RunFigures:
    worlds = worlds_of(records)
    times = StepTimes(records.steps, worlds)
    attempts = _attempts(records, worlds, times)
    completed = [attempt for attempt in attempts if attempt.completed]
    aborted = sum(attempt.outcome == ABORTED for attempt in attempts)
    done = {step.step: step for step in records.steps}
    useful_s = {step.step: times.useful_s(step) for step in done.values()}
    tokens = sum(step.tokens for step in done.values())
    wall_s, within = math.nan, list[EvaluationRecord]()
    if done:
        ended_s = max(step.ended_s for step in records.steps)
        wall_s = ended_s - min(step.started_s for step in records.steps)
        within = [each for each in records.evaluations if each.started_s < ended_s]
    unknown = [attempt for attempt in attempts if math.isnan(attempt.cost_s)]
    cost_s = known_sum([attempt.cost_s for attempt in attempts])
    progress_s = known_sum([*useful_s.values()]) + _evaluated_s(within)
    return RunFigures(
        generations=tuple(worlds.values()),
        reconfigurations=attempts,
        recoveries=_recoveries(records),
        notices=_notices(records, {attempt.generation: attempt for attempt in attempts}),
        steps=len(done),
        steps_again=len(records.steps) - len(done),
        missing_steps=max(done) - min(done) + 1 - len(done) if done else 0,
        completed=len(completed),
        aborted=aborted,
        failed=len(attempts) - len(completed) - aborted,
        wall_s=wall_s,
        pause_s=finite_sum(attempt.pause_s for attempt in attempts),
        cost_s=cost_s + finite_sum(attempt.slowdown_s for attempt in unknown),
        lost_s=known_sum([attempt.lost_s for attempt in attempts]),
        slowdown_s=finite_sum(attempt.slowdown_s for attempt in attempts),
        unknown=sum(math.isnan(attempt.lost_s) for attempt in completed),
        bytes_moved=sum(attempt.bytes_moved for attempt in completed),
        bytes_local=sum(attempt.bytes_local for attempt in completed),
        bytes_between_nodes=sum(attempt.bytes_between_nodes for attempt in completed),
        spares=sum(attempt.spares for attempt in completed),
        tokens=tokens,
        tokens_per_s=ratio(tokens, wall_s),
        goodput=min(ratio(progress_s, wall_s), 1.0) if wall_s > 0 else math.nan,
        evaluations=len({each.step for each in records.evaluations}),
        evaluation_s=_evaluated_s(records.evaluations),
        hours=worker_hours(records, useful_s),
        stragglers=dict(Counter(record.node for record in records.stragglers)),
    )


def _evaluated_s(evaluations: Iterable[EvaluationRecord]) -> float:
    """What they took, each once."""
    return finite_sum({each.step: took_s(each) for each in evaluations}.values())


# ---- reconfigurations


def _attempts(
    records: RunRecords, worlds: Mapping[int, GenerationFigures], times: StepTimes
) -> tuple[ReconfigurationFigures, ...]:
    beside = _steps_beside(records)
    in_order = sorted(records.steps, key=attrgetter("started_s"))
    trained_on = {attempt: generation for generation, attempt in built_anew(records).items()}
    crossings: dict[int, list[CrossingRecord]] = defaultdict(list)
    for row in records.crossings:
        crossings[row.generation].append(row)
    found = []
    for record in records.reconfigurations:
        went_on = record.generation if record.outcome == COMPLETED else record.source_generation
        median_s = times.usual_s(went_on, record.step)
        anew = trained_on.get(record.generation)
        lost_s = _lost_s(record, anew, median_s, in_order)
        disturbed = beside[record.generation]
        slowdown_s = _slowdown_s(record, disturbed, times, records.evaluations)
        cost_s = lost_s + slowdown_s
        if record.outcome != COMPLETED:
            # What one that failed has lost is a recovery's, or the next start's.
            cost_s = known_sum([lost_s, slowdown_s])
        used = {went_on, *(step.generation for step in disturbed)} & worlds.keys()
        found.append(
            ReconfigurationFigures(
                **vars(record),
                cost_s=cost_s,
                cost_steps=ratio(cost_s, median_s),
                lost_s=lost_s,
                lost_steps=0.0 if lost_s == 0 else ratio(lost_s, median_s),
                slowdown_s=slowdown_s,
                reconfiguration_s=record.first_step_ended_s - record.notice_s,
                median_is_disturbed=any(worlds[each].median_is_disturbed for each in used),
                phases=PhaseFigures(
                    boot_s=record.boot_ended_s - record.began_s,
                    prepare_s=record.prepare_ended_s - record.prepare_started_s,
                    boundary_s=record.source_last_step_ended_s - record.armed_s,
                    transfer_s=record.transfer_ended_s - record.source_last_step_ended_s,
                    commit_s=record.committed_s - record.transfer_ended_s,
                    release_s=record.released_s - record.committed_s,
                ),
                path=critical_path(record, crossings[record.generation], median_s),
            )
        )
    return tuple(found)


def _lost_s(
    record: ReconfigurationRecord, anew: int | None, median_s: float, steps: Sequence[StepRecord]
) -> float:
    """anew: the generation of the source world where an abort had it built anew. steps: all, as
    they began."""
    stopped_s = record.source_last_step_ended_s
    if record.outcome == COMPLETED:
        return record.first_step_ended_s - stopped_s - median_s
    if record.outcome != ABORTED:
        return math.nan  # the run ended with it
    if math.isnan(stopped_s):
        return 0.0  # training never stood still
    following = bisect_left(steps, stopped_s, key=attrgetter("started_s"))
    its_own = (record.source_generation, anew)
    if following == len(steps) or steps[following].generation not in its_own:
        return math.nan  # the source was lost before it trained on
    return steps[following].started_s - stopped_s


def _slowdown_s(
    record: ReconfigurationRecord,
    disturbed: Sequence[StepRecord],
    times: StepTimes,
    evaluations: Sequence[EvaluationRecord],
) -> float:
    """What the disturbed steps took beyond their worlds' medians, from the start of the first to
    where lost time begins, and from where that ends: nothing is left out, and nothing counts twice.

    Steps are recorded as rank 0 saw them, lost time begins and ends with the last worker. What rank
    0 then waited for at the boundary belongs to the steps before it; what it waited for after the
    target's first step is in the lost time already.
    """
    slow_s = [took_s(step) - times.usual_s(step.generation, step.step) for step in disturbed]
    stopped_s, first_ended_s = record.source_last_step_ended_s, record.first_step_ended_s
    for step in disturbed:
        last = step.generation == record.source_generation and step.step == record.step - 1
        if last and step.ended_s <= stopped_s:
            aside = (e for e in evaluations if step.ended_s <= e.started_s < stopped_s)
            slow_s.append(stopped_s - step.ended_s - sum(map(took_s, aside)))
        if step.generation == record.generation and step.step == record.step + 1:
            slow_s.append(-max(0.0, first_ended_s - step.started_s))
    return finite_sum(slow_s)


def _steps_beside(records: RunRecords) -> Mapping[int, list[StepRecord]]:
    """The steps that each attempt, by its generation, disturbed.

    A source step belongs to one attempt away from its world: the last that had begun by its end.
    The first step of a source world that was built anew belongs to the attempt that was aborted.
    """
    found: dict[int, list[StepRecord]] = defaultdict(list)
    anew = built_anew(records)
    away: dict[int, list[ReconfigurationRecord]] = defaultdict(list)  # in the order of their starts
    for attempt in records.reconfigurations:
        away[attempt.source_generation].append(attempt)
    for step in records.steps:
        if step.phase == "release":
            found[step.generation].append(step)
        elif step.phase == "first" and step.generation in anew:
            found[anew[step.generation]].append(step)
        elif step.phase == "prepare" and (attempts := away.get(step.generation)):
            begun = bisect_right(attempts, step.ended_s, key=attrgetter("began_s"))
            found[attempts[max(begun - 1, 0)].generation].append(step)
    return found


# ---- recoveries, notices


def _recoveries(records: RunRecords) -> tuple[RecoveryFigures, ...]:
    if not records.recoveries:
        return ()
    first_ended_s = {step.generation: step.ended_s for step in reversed(records.steps)}
    stood_s = {record.generation: record.refilled_s for record in records.recoveries}
    stood_s |= {step.generation: step.ended_s for step in records.steps}
    again = _again_after(records.steps)
    return tuple(
        RecoveryFigures(
            record=record,
            known_s=record.noticed_s - stood_s.get(record.source_generation, math.nan),
            let_go_s=record.halted_s - record.noticed_s,
            refill_s=record.refilled_s - record.halted_s,
            first_step_s=first_ended_s.get(record.generation, math.nan) - record.refilled_s,
            steps_again=again[record.generation],
        )
        for record in records.recoveries
    )


def _again_after(steps: Iterable[StepRecord]) -> Mapping[int, int]:
    """How many steps were done again after each way back, by the generation that began there; a
    handoff may have another world do the rest of them."""
    found: Counter[int] = Counter()
    done: set[int] = set()
    last, generation = -1, -1
    for step in steps:
        if step.step <= last:
            generation = step.generation
        found[generation] += step.step in done
        done.add(step.step)
        last = step.step
    return found


def _notices(
    records: RunRecords, attempts: Mapping[int, ReconfigurationFigures]
) -> tuple[NoticeFigures, ...]:
    notices = sorted(records.notices, key=lambda notice: notice.at_s)
    again_s = sorted(step.started_s for step in _done_again(records.steps)) if notices else []
    starts_s = sorted(step.started_s for step in records.steps) if notices else []
    losses_s = [notice.at_s for notice in notices if _is_loss(notice)]
    figures = []
    for notice in notices:
        repeated = 0
        if _is_loss(notice):
            # Losses without a step between them are of one recovery.
            following_s = _first_from(starts_s, notice.at_s)
            until_s = _first_from(losses_s, following_s)
            repeated = bisect_left(again_s, until_s) - bisect_left(again_s, notice.at_s)
        attempt = attempts.get(notice.generation)
        left_s = notice.left_s
        if notice.kind == "granted":
            left_s = attempt.first_step_ended_s if attempt is not None else math.nan
        figures.append(
            NoticeFigures(
                record=notice,
                window_s=notice.deadline_s - notice.at_s,
                left_s=left_s - notice.at_s,
                pause_s=attempt.pause_s if attempt is not None else math.nan,
                lost_steps=attempt.lost_steps if attempt is not None else math.nan,
                repeated_steps=repeated,
            )
        )
    return tuple(figures)


def _is_loss(notice: NoticeRecord) -> bool:
    """Whether steps may have to be done again for it."""
    return notice.kind in ("lost", "restart", "requeue") or notice.outcome == "lost"


def _first_from(times_s: Sequence[float], at_s: float) -> float:
    """The first of these, which are sorted, that is not before the other."""
    index = bisect_left(times_s, at_s)
    return times_s[index] if index < len(times_s) else math.inf


def _done_again(steps: Iterable[StepRecord]) -> list[StepRecord]:
    """The steps that had been done before."""
    done: set[int] = set()
    found = []
    for step in steps:
        if step.step in done:
            found.append(step)
        done.add(step.step)
    return found
