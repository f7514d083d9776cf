"""What a reconfiguration cost, against figures worked out by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest

from liver_hpc.report.derive import PhaseFigures, ReconfigurationFigures, run_figures
from liver_hpc.report.tables import summary_lines
from liver_hpc.run.records import (
    NoticeRecord,
    PlacementRecord,
    ReconfigurationRecord,
    RunRecords,
    StepRecord,
)
from tests.unit.report.rows import evaluation, reconfiguration, recovery, step


def records(
    steps: list[StepRecord], attempts: list[ReconfigurationRecord] | None = None
) -> RunRecords:
    return RunRecords(steps, attempts or [], [], {})


def run_of_one_handoff(**changes: Any) -> RunRecords:
    """Source steps of 1.0 s (median; a first of 3 s), target steps of 0.5 s (a first of 0.8 s).

    Steps 4 and 5 run beside PREPARE and take 1.25 and 1.5 s, step 8 beside RELEASE takes 0.6 s.
    The source stops at 108.75 s, the target's first step runs from 108.85 to 109.65 s.
    """
    steps = [
        step(0, started_s=100.0, took_s=3.0, phase="first"),
        step(1, started_s=103.0, took_s=1.0),
        step(2, started_s=104.0, took_s=0.9),
        step(3, started_s=104.9, took_s=1.1),
        step(4, started_s=106.0, took_s=1.25, phase="prepare"),
        step(5, started_s=107.25, took_s=1.5, phase="prepare"),
        step(6, started_s=108.85, took_s=0.8, phase="first", generation=1),
        step(7, started_s=109.65, took_s=0.6, phase="release", generation=1),
        step(8, started_s=110.25, took_s=0.5, generation=1),
        step(9, started_s=110.75, took_s=0.5, generation=1),
    ]
    times = {
        "step": 6,
        "notice_s": 106.0,
        "boot_ended_s": 106.75,
        "prepare_started_s": 106.75,
        "prepare_ended_s": 107.5,
        "armed_s": 107.5,
        "source_last_step_ended_s": 108.75,
        "transfer_ended_s": 108.875,
        "first_step_started_s": 108.85,
        "committed_s": 109.5,
        "first_step_ended_s": 109.65,
        "released_s": 110.0,
        "pause_s": 0.1,
    }
    return records(steps, [reconfiguration(**times | changes)])


def only(run: RunRecords) -> ReconfigurationFigures:
    (figures,) = run_figures(run).reconfigurations
    return figures


def test_lost_time_is_from_last_to_first_step_end_without_one_median_step_of_the_target() -> None:
    figures = only(run_of_one_handoff())
    assert figures.lost_s == pytest.approx(109.65 - 108.75 - 0.5)
    assert figures.lost_steps == pytest.approx(0.4 / 0.5)
    assert figures.pause_s == 0.1
    assert not figures.median_is_disturbed


def test_slowdown_is_what_disturbed_steps_took_beyond_the_median_of_their_world() -> None:
    beside_prepare = (1.25 - 1.0) + (1.5 - 1.0)
    beside_release = 0.6 - 0.5
    assert only(run_of_one_handoff()).slowdown_s == pytest.approx(beside_prepare + beside_release)


def test_the_cost_is_all_that_the_steps_took_beyond_their_medians() -> None:
    """From the start of the first step beside PREPARE to the end of the one beside RELEASE."""
    figures = only(run_of_one_handoff())
    assert figures.cost_s == pytest.approx((110.25 - 106.0) - 2 * 1.0 - 2 * 0.5)
    assert figures.cost_s == pytest.approx(figures.lost_s + figures.slowdown_s)
    assert figures.cost_steps == pytest.approx(figures.cost_s / 0.5)


def test_what_the_last_worker_takes_longer_than_rank_0_counts_once() -> None:
    """The source's last step ends 0.25 s later elsewhere, the target's first one 0.125 s later."""
    as_rank_0_saw_it = only(run_of_one_handoff()).cost_s
    figures = only(
        run_of_one_handoff(source_last_step_ended_s=109.0, first_step_ended_s=109.65 + 0.125)
    )
    assert figures.cost_s == pytest.approx(as_rank_0_saw_it)
    assert figures.lost_s == pytest.approx(0.4 - 0.25 + 0.125)


def test_an_evaluation_before_the_boundary_is_no_slowdown() -> None:
    run = run_of_one_handoff(source_last_step_ended_s=109.0)
    slowdown_s = only(run).slowdown_s
    run.evaluations.append(evaluation(step=6, started_s=108.75))
    assert only(run).slowdown_s == pytest.approx(slowdown_s - 0.25)


def test_reconfiguration_time_is_from_the_notice_to_the_end_of_the_first_step() -> None:
    assert only(run_of_one_handoff()).reconfiguration_s == pytest.approx(3.65)


def test_phases_follow_one_another() -> None:
    assert only(run_of_one_handoff()).phases == PhaseFigures(
        boot_s=0.75,
        prepare_s=0.75,
        boundary_s=1.25,
        transfer_s=0.125,
        commit_s=0.625,
        release_s=0.5,
    )


def test_what_is_recorded_is_passed_on() -> None:
    figures = only(run_of_one_handoff(bytes_moved=12, bytes_local=34, digest_equal=False))
    assert (figures.bytes_moved, figures.bytes_local, figures.digest_equal) == (12, 34, False)
    assert (figures.generation, figures.step, figures.outcome) == (1, 6, "completed")
    assert (figures.source, figures.target) == ("tp1 pp1 dp2", "tp2 pp1 dp2")
    assert figures.notice == "resize to tp2 pp1 dp2 (operator)"


# ---- medians that cannot be taken as they should


def test_without_an_undisturbed_step_the_median_is_of_all_but_the_first_and_that_is_told() -> None:
    run = run_of_one_handoff()
    del run.steps[-2:]  # the target is left with its first step and one beside RELEASE
    figures = only(run)
    assert figures.lost_s == pytest.approx(109.65 - 108.75 - 0.6)
    assert figures.median_is_disturbed


def test_with_nothing_but_a_first_step_lost_time_is_not_known() -> None:
    run = run_of_one_handoff()
    del run.steps[-3:]
    figures = only(run)
    assert math.isnan(figures.lost_s)
    assert math.isnan(figures.lost_steps)
    assert figures.median_is_disturbed
    assert figures.slowdown_s == pytest.approx(0.75)
    assert figures.reconfiguration_s == pytest.approx(3.65)


def test_a_source_without_an_undisturbed_step_is_told() -> None:
    run = run_of_one_handoff()
    del run.steps[1:4]
    figures = only(run)
    assert figures.lost_s == pytest.approx(0.4)  # the target's median is as it should be
    median_s = (1.25 + 1.5) / 2
    assert figures.slowdown_s == pytest.approx((1.25 - median_s) + (1.5 - median_s) + 0.1)
    assert figures.median_is_disturbed


# ---- attempts that do not succeed

NEVER = {
    "transfer_ended_s": math.nan,
    "first_step_started_s": math.nan,
    "committed_s": math.nan,
    "first_step_ended_s": math.nan,
    "released_s": math.nan,
    "pause_s": math.nan,
}


def test_an_attempt_aborted_before_the_boundary_has_lost_nothing() -> None:
    run = run_of_one_handoff(outcome="aborted", source_last_step_ended_s=math.nan, **NEVER)
    del run.steps[6:]
    figures = only(run)
    assert (figures.lost_s, figures.lost_steps) == (0.0, 0.0)
    assert figures.slowdown_s == pytest.approx(0.75)
    assert math.isnan(figures.reconfiguration_s)
    assert math.isnan(figures.phases.boundary_s)


def test_an_attempt_aborted_at_the_boundary_has_lost_the_time_to_the_next_step() -> None:
    run = run_of_one_handoff(outcome="aborted", **NEVER)
    run.steps[6:] = [step(6, started_s=109.15, phase="prepare"), step(7, started_s=110.15)]
    figures = only(run)
    assert figures.lost_s == pytest.approx(0.4)
    assert figures.lost_steps == pytest.approx(0.4 / 1.0)  # in steps of the source


def test_a_source_world_that_was_built_anew_ends_the_lost_time_too() -> None:
    run = run_of_one_handoff(outcome="aborted", **NEVER)
    run.steps[6:] = [
        step(6, started_s=109.75, took_s=1.25, phase="first", generation=2),
        step(7, started_s=111.0, generation=2),
    ]
    figures = only(run)
    assert figures.lost_s == pytest.approx(1.0)
    # Its first step is slower than the others, and belongs to the attempt.
    assert figures.slowdown_s == pytest.approx(0.25 + 0.5 + 0.25)
    layouts = [world.layout for world in run_figures(run).generations]
    assert layouts == ["tp1 pp1 dp2", "tp1 pp1 dp2"]


def test_a_source_that_was_lost_before_it_trained_on_leaves_lost_time_unknown() -> None:
    """Aborted at the boundary; the next step is one of the next start, hours later."""
    run = run_of_one_handoff(outcome="aborted", **NEVER)
    run.steps[6:] = [step(6, started_s=36108.75, generation=4)]
    assert math.isnan(only(run).lost_s)
    assert run_figures(run).cost_s == only(run).slowdown_s == pytest.approx(0.75)


def test_the_world_of_a_recovery_is_not_that_of_an_attempt_that_was_aborted_before() -> None:
    """It has the number that a source world built anew would have."""
    run = run_of_one_handoff(outcome="aborted", source_last_step_ended_s=math.nan, **NEVER)
    run.steps[6:] = [
        step(6, started_s=108.75),
        step(6, started_s=112.0, took_s=9.0, phase="first", generation=2),
        step(7, started_s=121.0, generation=2),
    ]
    run.recoveries.append(recovery(generation=2, source_generation=0))
    assert only(run).slowdown_s == pytest.approx(0.75)


def test_of_an_attempt_that_ended_the_run_lost_time_is_not_known() -> None:
    run = run_of_one_handoff(outcome="failed", **NEVER)
    del run.steps[6:]
    assert math.isnan(only(run).lost_s)
    assert math.isnan(only(run).lost_steps)
    assert only(run).cost_s == only(run).slowdown_s > 0, "that much is known"


def test_each_disturbed_step_is_of_one_attempt() -> None:
    """The second notice came at 104.5 s already, but had to wait for the end of the first."""
    first = reconfiguration(
        generation=1, outcome="aborted", notice_s=104.0, boot_ended_s=105.0, prepare_started_s=105.0
    )
    second = reconfiguration(generation=2, outcome="aborted", notice_s=104.5, began_s=105.0)
    steps = [
        step(0, started_s=102.0),
        step(1, started_s=103.0),
        step(2, started_s=103.75, took_s=1.1, phase="prepare"),
        step(3, started_s=104.85, took_s=2.0, phase="prepare"),
    ]
    slowdowns = [
        f.slowdown_s for f in run_figures(records(steps, [first, second])).reconfigurations
    ]
    assert slowdowns == [pytest.approx(0.1), pytest.approx(1.0)]


# ---- the run as a whole


def test_worlds_have_their_layout_median_and_rate() -> None:
    first, second = run_figures(run_of_one_handoff()).generations
    assert (first.generation, first.layout, first.steps) == (0, "tp1 pp1 dp2", 6)
    assert first.median_step_s == pytest.approx(1.0)
    assert first.tokens_per_s == pytest.approx(512)
    assert (second.generation, second.layout, second.steps) == (1, "tp2 pp1 dp2", 4)
    assert second.median_step_s == pytest.approx(0.5)
    assert second.tokens_per_s == pytest.approx(1024)


def test_a_world_that_no_handoff_began_or_ended_has_the_layout_that_it_was_placed_in() -> None:
    run = records([step(0), step(1, generation=2)])
    placed = {0: "tp1 pp1 dp2", 2: "tp2 pp1 dp1"}
    run.placements.extend(PlacementRecord(*world, "n1", 2) for world in placed.items())
    assert {each.generation: each.layout for each in run_figures(run).generations} == placed


def test_goodput_is_steps_at_their_median_over_wall_time() -> None:
    figures = run_figures(run_of_one_handoff())
    assert figures.wall_s == pytest.approx(11.25)
    assert figures.goodput == pytest.approx((6 * 1.0 + 4 * 0.5) / 11.25)


def test_goodput_is_not_known_before_any_step_has_a_median() -> None:
    run = records([step(0, phase="first")])
    run.evaluations.append(evaluation(step=1, started_s=100.5))
    assert math.isnan(run_figures(run).goodput)


def test_goodput_is_at_most_all_of_the_time() -> None:
    lengths_s = (0.2, 0.2, 1.0, 1.0, 1.0)
    starts_s = itertools.accumulate(lengths_s, initial=100.0)
    steps = zip(lengths_s, starts_s, strict=False)
    run = RunRecords([], [], [], {})
    run.steps.extend(step(i, started_s=at_s, took_s=s) for i, (s, at_s) in enumerate(steps))
    assert run_figures(run).goodput == 1.0


def test_what_a_handoff_cost_is_unknown_before_its_world_has_a_median() -> None:
    run = run_of_one_handoff()
    run.steps[:] = [each for each in run.steps if each.generation == 0]
    figures = run_figures(run)
    assert math.isnan(figures.cost_s)
    assert math.isnan(figures.lost_s)
    assert summary_lines(figures, run)["cost"].startswith("-: lost -, slowdown ")


def and_back(**changes: Any) -> RunRecords:
    """A second handoff, which stands for 30 s, to a world that is lost after its first step."""
    run = run_of_one_handoff()
    run.steps[-1] = step(9, started_s=110.75, took_s=2.0, phase="prepare", generation=1)
    run.steps.append(step(10, started_s=142.75, took_s=1.0, phase="first", generation=2))
    times: dict[str, Any] = {
        "source_last_step_ended_s": 112.75,
        "first_step_ended_s": 143.75,
        "step": 10,
    }
    times |= {"source_generation": 1, "notice_s": 110.75, "source": "tp2 pp1 dp2"}
    run.reconfigurations.append(reconfiguration(generation=2, **times | changes))
    return run


def test_a_world_lost_after_its_first_step_is_judged_by_others_of_its_layout() -> None:
    figures = run_figures(and_back(target="tp1 pp1 dp2"))
    assert figures.reconfigurations[1].lost_s == pytest.approx(31.0 - 1.0)
    assert figures.reconfigurations[1].median_is_disturbed
    assert figures.cost_s == pytest.approx(1.25 + 30.0 + 1.5)


def test_a_sum_with_a_handoff_whose_lost_time_is_not_known_says_so() -> None:
    run = and_back(target="tp1 pp2 dp1")
    figures = run_figures(run)
    assert figures.lost_s == pytest.approx(0.4)
    assert figures.unknown == 1
    assert figures.cost_s == pytest.approx(figures.lost_s + figures.slowdown_s)
    cost = summary_lines(figures, run)["cost"]
    assert cost == "2.8 s: lost 0.4 s, slowdown 2.3 s; what 1 lost is not known"


def test_slowdown_is_known_where_a_world_built_anew_has_done_one_step() -> None:
    run = run_of_one_handoff(outcome="aborted", **NEVER)
    run.steps[6:] = [step(6, started_s=109.75, took_s=1.25, phase="first", generation=2)]
    figures = only(run)
    assert figures.slowdown_s == pytest.approx(0.25 + 0.5 + 0.25)
    assert figures.cost_s == pytest.approx(figures.lost_s + figures.slowdown_s)


def test_an_evaluation_is_useful_once() -> None:
    run = run_of_one_handoff()
    useful_s = run_figures(run).goodput * 11.25
    run.evaluations.extend(evaluation(step=4, started_s=at_s) for at_s in (106.0, 107.0))
    run.evaluations.append(evaluation(step=10, started_s=111.25))  # after the last step
    figures = run_figures(run)
    assert (figures.evaluations, figures.evaluation_s) == (2, 0.5)
    assert figures.goodput == pytest.approx((useful_s + 0.25) / 11.25)


def test_goodput_of_a_world_without_a_median_takes_that_of_its_layout() -> None:
    run = run_of_one_handoff()
    back = reconfiguration(generation=2, source_generation=1, target="tp1 pp1 dp2")
    run.reconfigurations.append(back)
    run.steps.append(step(10, started_s=111.25, took_s=3.75, phase="first", generation=2))
    assert run_figures(run).goodput == pytest.approx((7 * 1.0 + 4 * 0.5) / 15.0)


def test_bytes_within_a_worker_were_copied() -> None:
    """What a worker that stays keeps in the same memory is not among them."""
    run = run_of_one_handoff(bytes_moved=2048, bytes_local=0, bytes_between_nodes=0)
    assert summary_lines(run_figures(run), run)["moved"] == "2.0 KiB; 0 B copied within workers"


def test_totals_add_up() -> None:
    run = run_of_one_handoff()
    failed = reconfiguration(generation=2, source_generation=1, outcome="failed", bytes_moved=5)
    run.reconfigurations.append(failed)
    figures = run_figures(run)
    assert (figures.completed, figures.aborted, figures.failed) == (1, 0, 1)
    assert figures.lost_s == pytest.approx(0.4)
    assert figures.pause_s == pytest.approx(0.1)
    assert figures.slowdown_s == pytest.approx(0.85)
    assert figures.cost_s == pytest.approx(1.25)
    assert (figures.bytes_moved, figures.bytes_local) == (3_000_000, 1_000_000)
    assert figures.bytes_between_nodes == 2_000_000
    assert figures.tokens == 5120
    assert figures.tokens_per_s == pytest.approx(5120 / 11.25)


def test_a_step_counts_once_and_one_that_was_not_recorded_is_told() -> None:
    figures = run_figures(records([step(0), step(1), step(1, started_s=105.0), step(4)]))
    assert (figures.steps, figures.missing_steps) == (3, 2)


def test_the_steps_before_the_first_recorded_one_are_not_missing() -> None:
    assert run_figures(records([step(7), step(8), step(10)])).missing_steps == 1


def test_a_notice_lasts_until_its_node_is_left_or_trains() -> None:
    """The lost node is one that no handoff has answered."""
    run = run_of_one_handoff()
    common = {"allocation": "8", "estimate_s": math.nan, "action": "", "returned_s": math.nan}
    given = [
        ("granted", "n2", 1, math.nan, math.nan, "in use"),
        ("preempted", "n1", 1, 130.0, 112.0, "in time"),
        ("lost", "n3", -1, math.nan, math.nan, "lost"),
    ]
    names = ("kind", "node", "generation", "deadline_s", "left_s", "outcome")
    for number, values in enumerate(given):
        notice = dict(zip(names, values, strict=True))
        run.notices.append(NoticeRecord(at_s=106.0 + number, **common, **notice))
    granted, preempted, lost = run_figures(run).notices
    assert (granted.left_s, preempted.left_s) == pytest.approx((3.65, 5.0))
    assert preempted.window_s == 23.0
    assert (granted.pause_s, granted.lost_steps) == pytest.approx((0.1, 0.8))
    assert all(map(math.isnan, (granted.window_s, lost.left_s, lost.pause_s, lost.lost_steps)))


def test_a_run_without_a_step_has_no_figures() -> None:
    figures = run_figures(records([]))
    assert (figures.steps, figures.missing_steps, figures.generations) == (0, 0, ())
    assert math.isnan(figures.goodput)
    assert math.isnan(figures.tokens_per_s)


def test_records_of_an_attempt_alone_are_no_error() -> None:
    figures = only(records([], [reconfiguration(first_step_ended_s=101.0)]))
    assert math.isnan(figures.lost_s)
    assert figures.reconfiguration_s == 1.0


def test_a_recovery_lasts_until_its_world_has_done_a_step() -> None:
    run = RunRecords(
        [
            *(step(n, generation=2) for n in range(5)),
            step(4, generation=3, started_s=111.0, ended_s=113.0, phase="first"),
            step(5, generation=3, started_s=113.0, ended_s=114.0),
        ],
        [],
        [],
        {},
        recoveries=[recovery()],
    )
    figures = run_figures(run)
    (found,) = figures.recoveries
    assert (found.let_go_s, found.refill_s, found.first_step_s) == (0.25, 0.75, 2.0)
    assert figures.steps == 6, "a step that is done again is one"
    assert found.steps_again == 1
    assert [world.layout for world in figures.generations] == ["tp1 pp1 dp2", "tp1 pp1 dp1"]


def test_a_loss_costs_until_it_is_known_too() -> None:
    """A worker stands still for a minute before it is missed; the next world is lost at once."""
    steps = [*(step(n, generation=2) for n in range(5)), step(4, generation=4, started_s=176.0)]
    first = recovery(noticed_s=165.0, halted_s=165.25, refilled_s=166.0)
    second = recovery(source_generation=3, generation=4, noticed_s=174.0, halted_s=174.5)
    run = RunRecords(steps, [], [], {}, recoveries=[first, replace(second, refilled_s=176.0)])
    figures = run_figures(run)
    assert [each.known_s for each in figures.recoveries] == [60.0, 8.0]
    assert [each.stood_s for each in figures.recoveries] == [61.0, 10.0]
    told = summary_lines(figures, run)["recovered"]
    assert told == "2 times from memory: 1:11 without a step, 1 done again"


def test_no_step_is_done_again_by_a_world_that_is_lost_before_its_first() -> None:
    """Each recovery has recorded how far back it goes; the way was gone once."""
    steps = [*(step(n, generation=2) for n in range(5)), step(4, generation=4, started_s=120.0)]
    lost = [recovery(), recovery(source_generation=3, generation=4, refilled_s=119.0)]
    figures = run_figures(RunRecords(steps, [], [], {}, recoveries=lost))
    assert [each.steps_again for each in figures.recoveries] == [0, 1]


def test_what_another_world_does_again_is_of_the_recovery_too() -> None:
    """It goes back by 15 steps; after five of them the run hands off. Then it begins from disk."""
    steps = [step(n, generation=2) for n in range(20)]
    steps += [step(5 + n, generation=3, started_s=130.0 + n) for n in range(5)]
    steps += [step(10 + n, generation=4, started_s=137.0 + n) for n in range(15)]
    steps += [step(22 + n, generation=6, started_s=200.0 + n) for n in range(5)]
    run = RunRecords(steps, [], [], {}, recoveries=[recovery(step=5, steps_redone=15)])
    figures = run_figures(run)
    assert [each.steps_again for each in figures.recoveries] == [15]
    assert (figures.steps, figures.steps_again) == (27, 18)
    assert summary_lines(figures, run)["steps"] == "27 in 1:45, 18 of them done again"


def test_steps_are_done_again_for_what_was_lost() -> None:
    """Two nodes in one recovery, and a third one later; not for a node that came meanwhile."""

    def notice(kind: str, node: str, at_s: float) -> NoticeRecord:
        nan, outcome = math.nan, "lost" if kind == "lost" else "in use"
        return NoticeRecord(kind, node, "main", at_s, nan, nan, "", -1, nan, nan, outcome)

    run = records([step(n) for n in range(10)])
    run.steps.extend(step(7 + n, generation=1, started_s=113.0 + n) for n in range(6))
    run.steps.extend(step(12 + n, generation=2, started_s=121.0 + n) for n in range(3))
    run.notices[:] = [
        notice("lost", "n2", 110.25),
        notice("lost", "n3", 110.5),
        notice("granted", "n4", 112.0),
        notice("lost", "n5", 119.5),
        notice("granted", "n6", 120.0),
    ]
    assert [each.repeated_steps for each in run_figures(run).notices] == [3, 3, 0, 1, 0]


# ---- a batch that grows


def growing() -> RunRecords:
    """Steps of 100 tokens a second: six of 100, then of 200 through a handoff at step 8, where
    the source trains three steps beside PREPARE, which last 2.5 s each."""
    steps = [step(n, tokens=100, started_s=100.0 + n) for n in range(6)]
    steps += [
        step(6 + n, tokens=200, started_s=106.0 + 2.5 * n, took_s=2.5, phase="prepare")
        for n in range(2)
    ]
    steps.append(step(8, generation=1, tokens=200, started_s=111.0, took_s=3.0, phase="first"))
    steps += [
        step(9 + n, generation=1, tokens=200 + 200 * n, started_s=114.0 + n, took_s=1.0 + n)
        for n in range(2)
    ]
    stops = {"source_last_step_ended_s": 111.0, "first_step_ended_s": 114.0}
    return records(steps, [reconfiguration(step=8, notice_s=106.0, **stops)])


def test_a_larger_batch_is_neither_slow_nor_lost() -> None:
    """Of the source's steps of 200 tokens none is undisturbed: they are worth twice one of 100."""
    figures = run_figures(growing())
    (attempt,) = figures.reconfigurations
    assert attempt.slowdown_s == pytest.approx(2 * 0.5)
    assert attempt.lost_s == pytest.approx(3.0 - 1.0)  # the target's median step of that size
    assert figures.goodput * figures.wall_s == pytest.approx(6 * 1 + 2 * 2 + 1 + 1 + 2)


def test_the_rate_of_a_world_is_that_of_its_steps_whatever_their_batch() -> None:
    first, second = run_figures(growing()).generations
    assert first.tokens_per_s == pytest.approx(100)
    assert second.tokens_per_s == pytest.approx(200)
