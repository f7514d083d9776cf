"""The recovery's benchmark: what a loss costs by a run's records, and what is claimed of trials."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness import loss_difference
from benchmarks.peers.events import KILL, Change, Step
from benchmarks.recovery import torchft
from benchmarks.recovery.__main__ import main, result
from benchmarks.recovery.bills import Bill, bill, median_step_s
from benchmarks.recovery.copies import WITH, WITHOUT, Block, told_intervals
from benchmarks.recovery.trials import (
    CASES,
    DISK,
    KILLED,
    MEMORY,
    SILENT,
    TORCHFT,
    Trial,
    Trials,
    whole_s,
)
from benchmarks.summary.words import FIGURES
from liver_hpc.errors import LiverError
from liver_hpc.run.records import NoticeRecord, RecoveryRecord, RunRecords
from tests.unit.report.rows import step

STRUCK_S = 104.5
RECOVERY = RecoveryRecord(
    generation=1,
    source_generation=0,
    source="tp1 pp1 dp2",
    target="tp1 pp1 dp1",
    lost="1",
    reason="test",
    step=3,
    steps_redone=2,
    rounds=1,
    noticed_s=104.75,
    halted_s=105.0,
    refilled_s=105.5,
)
OLD = [step(number) for number in range(5)]  # the last one is in the middle when it is struck


def test_a_loss_costs_what_passes_until_a_step_more_is_done_than_before() -> None:
    """Steps 3 and 4 are done again; between 4 and 5 a second goes into a checkpoint."""
    new = [step(number, started_s=103.0 + number, generation=1) for number in (3, 4)]
    new += [step(number, started_s=104.0 + number, generation=2) for number in (5, 6)]
    records = RunRecords([*OLD, *new], [], [], {}, recoveries=[RECOVERY])
    assert bill(records, STRUCK_S) == Bill(
        noticed_s=0.25, back_s=110.0 - STRUCK_S - 1.0, steps_redone=2, generation=1
    )


def test_a_run_is_whole_again_once_it_has_grown_back_or_begins_again() -> None:
    new = [step(number, started_s=103.0 + number, generation=1) for number in (3, 4, 5)]
    back = [step(6, started_s=109.0, generation=3)]
    recovered = RunRecords([*OLD, *new, *back], [], [], {}, recoveries=[RECOVERY])
    assert whole_s(recovered, STRUCK_S) == 110.0 - STRUCK_S
    assert whole_s(replace(recovered, steps=[*OLD, *new]), STRUCK_S) is None
    nan = math.nan
    restart = NoticeRecord("restart", "", "", 105.0, nan, nan, "", -1, nan, nan, "to disk")
    began_again = RunRecords([*OLD, *new], [], [], {}, notices=[restart])
    assert whole_s(began_again, STRUCK_S) == 107.0 - STRUCK_S


def test_there_is_no_bill_before_that_step() -> None:
    again = [step(number, started_s=103.0 + number, generation=1) for number in (3, 4)]
    assert bill(RunRecords([*OLD, *again], [], [], {}, recoveries=[RECOVERY]), STRUCK_S) is None
    with pytest.raises(LiverError, match="before the loss"):
        bill(RunRecords([], [], [], {}), STRUCK_S)


def test_what_was_noticed_before_the_loss_was_another_one() -> None:
    early = replace(RECOVERY, noticed_s=104.0)
    new = [step(5, started_s=106.0, generation=1)]
    with pytest.raises(LiverError, match="noticed"):
        bill(RunRecords([*OLD, *new], [], [], {}, recoveries=[early, RECOVERY]), STRUCK_S)


def test_medians_are_of_undisturbed_steps_and_losses_are_compared_beyond_the_loss() -> None:
    disturbed = step(9, took_s=9.0, phase="prepare")
    assert median_step_s([*OLD, disturbed]) == 1.0
    with pytest.raises(LiverError, match="undisturbed"):
        median_step_s([disturbed])
    assert loss_difference({0: 2.0, 1: 2.0, 2: 9.0}, {0: 2.0, 1: 4.0}, beyond=1) == 0.5
    with pytest.raises(LiverError, match="from step 2 on"):
        loss_difference({0: 2.0, 2: 9.0}, {0: 2.0}, beyond=2)


def trial(method: str, lost_s: float, case: str = "worker", **fields: object) -> Trial:
    given = {"fault": KILLED, "noticed_s": 0.5, "steps_redone": 1, **fields}
    return Trial(
        size="25m",
        case=case,
        method=method,
        source="",
        target="",
        let_go_s=math.nan,
        refill_s=math.nan,
        lost_s=lost_s,
        bare_s=lost_s + 0.5,
        whole_s=2 * lost_s,
        median_step_s=1.0,
        difference=1e-7,
        left=0,
        **given,  # type: ignore[arg-type]
    )


def test_the_worst_case_is_claimed_with_the_largest_detection() -> None:
    trials = [
        *(trial(MEMORY, 1.0), trial(DISK, 10.0, steps_redone=9)),
        *(trial(MEMORY, 3.0), trial(DISK, 10.0)),
        *(trial(MEMORY, 4.0, "node"), trial(DISK, 10.0, "node", noticed_s=0.75)),
        trial(MEMORY, 99.0, fault=SILENT, noticed_s=1.5),
    ]
    blocks = {WITH: [Block(10, 10.2, 3.0)], WITHOUT: [Block(5, 5.0, math.nan)]}
    figures = result(trials, blocks).figures
    assert figures["recovery_s_of_worker_25m"] == 2.0
    assert figures["bare_over_restart"] == 0.45
    assert figures["recovery_whole_s_of_worker_25m"] == 4.0
    assert figures["recovery_over_restart_of_worker_25m"] == pytest.approx(0.2)
    assert figures["recovery_over_restart"] == 0.4
    assert figures["recovery_s"] == 4.0
    assert (figures["detection_killed_s"], figures["detection_silent_s"]) == (0.75, 1.5)
    assert figures["detection_s"] == 1.5
    assert figures["steps_rolled_back_max"] == 1, "from memory"
    assert figures["copies_overhead_percent"] == pytest.approx(2.0)
    assert figures["copies_every_steps"] == 3
    assert set(FIGURES["recovery"]) <= set(figures)


def test_torchft_stands_beside_the_case_that_it_knows() -> None:
    nan = math.nan
    unknown = {"noticed_s": nan, "difference": nan}
    trials = [trial(MEMORY, 1.0), trial(DISK, 10.0), replace(trial(TORCHFT, 2.0), **unknown)]
    blocks = {WITH: [Block(10, 10.2, 3.0)], WITHOUT: [Block(5, 5.0, math.nan)]}
    silent = trial(MEMORY, 99.0, fault=SILENT, noticed_s=1.5)
    figures = result([*trials, silent], blocks).figures
    assert figures["torchft_s_of_worker_25m"] == 2.0
    assert figures["recovery_over_torchft_of_worker_25m"] == 0.5
    assert (figures["detection_killed_s"], figures["max_relative_difference"]) == (0.5, 1e-7)


def test_a_kill_costs_torchft_what_passes_until_the_other_does_a_step() -> None:
    """From 10.5 on; the step that was under way counted for nobody."""
    old = [Step(number, 1, 2, 8.0 + number, 9.0 + number, 4.0) for number in range(2)]
    new = [Step(2 + number, 2, 1, 12.0 + number, 13.0 + number, 4.0) for number in range(3)]
    assert torchft.lost_s([*old, *new], Change(KILL, 2, 1, 10.5)) == 13.0 - 10.5 - 1.0


def test_the_interval_is_what_a_worker_has_said_last(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert told_intervals(tmp_path) == []
    for worker in range(2):
        text = "INFO snapshots every 4 steps: one takes 0.07\nINFO snapshots every 3 steps: one"
        (tmp_path / "logs" / f"worker-{worker}.log").write_text(text, encoding="utf-8")
    assert told_intervals(tmp_path) == [4, 3]


def test_a_size_that_there_is_not_is_refused_before_another_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "lose", lambda *_, **__: pytest.fail("was measured"))
    assert main(["--sizes", "25m", "1b"]) == 1
    assert "--sizes: wanted some of ['25m', '100m'], got ['1b']" in capsys.readouterr().err


def test_no_repeats_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trials, "lose", lambda *_, **__: pytest.fail("was measured"))
    with pytest.raises(SystemExit):
        main(["--repeats", "0"])
    assert "wanted a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_runs_are_of_the_models_of_the_sweep(tmp_path: Path) -> None:
    trials = Trials(tmp_path)
    assert trials.sizes == ["25m", "100m"]
    for case in CASES:
        config = trials.run_config("100m", [case.layout, case.left], {})
        assert config.model["hidden"] == 1024
        assert config.workers.initial == case.layout.workers
        assert config.allowed_layouts(case.left.workers) == [case.left]
