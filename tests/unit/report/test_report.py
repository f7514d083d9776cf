"""The report: strict JSON for programs, tables that fit for people."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys

import pytest
from rich.console import Console

from liver_hpc.report.report import print_report, report_json
from liver_hpc.run.records import RunRecords
from tests.unit.report.rows import baseline, evaluation, reconfiguration, step
from tests.unit.report.run_of_everything import everything

PROMISED = """
    generation source target notice pause_s cost_s lost_s lost_steps slowdown_s reconfiguration_s
    bytes_moved bytes_local digest_equal outcome
"""


def five_handoffs() -> RunRecords:
    """A run as the demo does it, with one attempt that was aborted."""
    shapes = [
        ("tp1 pp1 dp2", "tp2 pp1 dp2", "resize to tp2 pp1 dp2 (step 10)"),
        ("tp2 pp1 dp2", "tp1 pp2 dp2", "resize to tp1 pp2 dp2 (step 20)"),
        ("tp1 pp2 dp2", "tp1 pp2 dp2", "replace worker 3 (operator)"),
        ("tp1 pp2 dp2", "tp2 pp1 dp1", "resize to tp2 pp1 dp1 (step 40)"),
        ("tp2 pp1 dp1", "tp1 pp1 dp2", "resize to tp1 pp1 dp2 (step 50)"),
    ]
    steps, attempts = [step(n) for n in range(10)], []
    for generation, (source, target, notice) in enumerate(shapes, start=1):
        aborted = generation == 3
        start_s = 100.0 + 10 * generation
        attempts.append(
            reconfiguration(
                generation=generation,
                source_generation=2 if generation == 4 else generation - 1,
                source=source,
                target=target,
                notice=notice,
                outcome="aborted" if aborted else "completed",
                detail="PREPARE: joiner 7 lost: [Errno 104] reset" if aborted else "",
                notice_s=start_s - 4,
                source_last_step_ended_s=math.nan if aborted else start_s,
                first_step_ended_s=math.nan if aborted else start_s + 1.125,
                pause_s=math.nan if aborted else 0.081,
                bytes_moved=415 * 2**20,
                bytes_local=138 * 2**20,
            )
        )
        if not aborted:
            phases = ["first", "release", *[""] * 8]
            steps += [
                step(10 * generation + n, generation=generation, phase=phase)
                for n, phase in enumerate(phases)
            ]
    attributes = {"name": "demo", "host": "a-node-with-a-long-name", "config": "x: 1\n" * 200}
    return RunRecords(steps, attempts, [baseline(), baseline(method="torch_dcp")], attributes)


def printed(records: RunRecords, columns: int) -> str:
    text = io.StringIO()
    print_report(records, Console(file=text, width=columns))
    return text.getvalue()


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the tests themselves run in."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


# ---- JSON


def test_json_has_what_is_promised_and_is_strict() -> None:
    document = json.loads(json.dumps(report_json(five_handoffs()), allow_nan=False))
    assert {"steps", "reconfigurations", "baselines"} <= document.keys()
    assert len(document["steps"]) == 50
    assert len(document["reconfigurations"]) == 5
    for attempt in document["reconfigurations"]:
        assert set(PROMISED.split()) <= attempt.keys()
    first, aborted = document["reconfigurations"][0], document["reconfigurations"][2]
    assert first["lost_s"] == pytest.approx(0.125)
    assert first["lost_steps"] == pytest.approx(0.125)
    assert first["reconfiguration_s"] == pytest.approx(5.125)
    assert first["phases"]["boot_s"] is None
    assert (aborted["outcome"], aborted["pause_s"], aborted["lost_s"]) == ("aborted", None, 0.0)
    assert document["summary"]["completed"] == 4
    assert document["attributes"]["name"] == "demo"
    assert document["baselines"][0]["method"] == "dist_checkpointing"


def test_a_figure_that_is_no_number_becomes_null() -> None:
    records = RunRecords([step(0, loss=math.nan, grad_norm=math.inf)], [], [], {})
    (row,) = report_json(records)["steps"]
    assert (row["loss"], row["grad_norm"], row["step_s"]) == (None, None, 1.0)


def test_the_last_and_the_least_validation_loss_are_told() -> None:
    losses = {10: 4.5, 20: 4.0, 30: 4.25}
    records = RunRecords([step(n) for n in range(31)], [], [], {})
    records.evaluations.extend(evaluation(step=n, loss=loss) for n, loss in losses.items())
    (line,) = [x for x in printed(records, 100).splitlines() if x.startswith("validation")]
    assert line.split(maxsplit=1)[1] == (
        "loss 4.2500 after 30 steps, least 4.0000 after 20; 3 evaluations in 0.8 s"
    )
    document = report_json(records)
    assert [row["loss"] for row in document["evaluations"]] == [*losses.values()]
    assert document["summary"]["evaluation_s"] == pytest.approx(0.75)
    assert "validation" not in printed(five_handoffs(), 100)


def test_a_handoff_that_failed_is_none_that_was_aborted() -> None:
    records = five_handoffs()
    assert "4 completed, 1 aborted " in printed(records, 100)
    records.reconfigurations.append(reconfiguration(generation=9, outcome="failed"))
    assert "4 completed, 1 aborted, 1 failed " in printed(records, 100)


def test_how_many_steps_came_to_no_number_is_told_in_a_line() -> None:
    bad = [step(2, loss=math.nan), step(3, grad_norm=math.inf), step(2, loss=math.nan)]
    lines = printed(RunRecords([step(1), *bad], [], [], {}), 80).splitlines()
    (line,) = [line for line in lines if line.startswith("not finite")]
    assert line.endswith("loss or gradient norm of 2 steps, first of step 2")
    assert "not finite" not in printed(RunRecords([step(1)], [], [], {}), 80)


def test_an_empty_run_has_a_document() -> None:
    document = report_json(RunRecords([], [], [], {}))
    assert (document["steps"], document["reconfigurations"], document["baselines"]) == ([], [], [])
    assert document["summary"]["goodput"] is None


# ---- tables


@pytest.mark.parametrize("columns", [80, 100, 120, 200])
def test_no_figure_is_cut_off(columns: int) -> None:
    text = printed(five_handoffs(), columns)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= columns
    for figure in ("0.081", "0.125", "5.125", "415.0 MiB", "138.0 MiB", "completed", "aborted"):
        assert figure in text
    assert "generation 3 aborted: PREPARE: joiner 7 lost: [Errno 104] reset" in text
    for name in ("dist_checkpointing", "torch_dcp", "demo on a-node-with-a-long-name"):
        assert name in text


def test_the_critical_path_stands_in_the_report() -> None:
    lines = printed(everything(), 120).splitlines()
    head = next(n for n, line in enumerate(lines) if "Where the lost time went" in line)
    rows = [line.split() for line in lines[head:]]
    (row,) = [row for row in rows if row[:2] == ["3", "1.000"]]
    # boundary, checkpoint, wire, pack, digest, other, forward backward, optimizer, votes, update
    assert row[2:6] == ["0.000", "0.125", "0.062", "0.000"]
    assert row[6:11] == ["0.062", "0.500", "0.031", "0.094", "0.375"]
    assert row[11:] == ["1.250", "-0.125", "0", "0", "1"]
    path = report_json(everything())["reconfigurations"][2]["path"]
    assert path["lines"]["wire_s"] == 0.125
    assert (path["last_to_vote"], path["last_to_end"]) == (0, 1)


@pytest.mark.parametrize("columns", [30, 45, 60])
def test_in_a_narrow_terminal_nothing_is_cut_off_either(columns: int) -> None:
    text = printed(five_handoffs(), columns)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= columns
    for figure in ("0.081", "0.125", "5.125", "415.0 MiB", "138.0 MiB", "completed", "aborted"):
        assert figure in text
    listed = [line.split() for line in text.splitlines() if line.startswith("slowdown s")]
    assert len(listed) == 5


def test_in_120_columns_a_reconfiguration_is_one_line() -> None:
    lines = printed(five_handoffs(), 120).splitlines()
    (line,) = [line for line in lines if "415.0 MiB" in line and line.split()[0] == "1"]
    assert line.split() == [
        *("1", "dp2", "tp2", "dp2", "0.081", "0.125", "0.000", "0.125", "0.125", "5.125"),
        *("415.0", "MiB", "138.0", "MiB", "yes", "completed"),
    ]


@pytest.mark.parametrize("columns", [80, 120])
def test_the_largest_layouts_and_figures_fit(columns: int) -> None:
    records = five_handoffs()
    large = reconfiguration(
        generation=100,
        source="tp16 pp16 dp128",
        target="tp16 pp8 dp256",
        notice="resize to tp16 pp8 dp256 (operator)",
        bytes_moved=1023 * 2**40,
        bytes_local=1023 * 2**40,
        pause_s=12345.6,
        source_last_step_ended_s=100.0,
        first_step_ended_s=9999.0,
    )
    records.reconfigurations.append(large)
    text = printed(records, columns)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert max(map(len, text.splitlines())) <= columns
    for figure in ("tp16 pp16 dp128", "tp16 pp8 dp256", "1023.0 TiB", "12346"):
        assert figure in text


def test_a_digest_that_differs_stands_out() -> None:
    records = RunRecords([step(0)], [reconfiguration(digest_equal=False)], [], {})
    assert "NO" in printed(records, 120).split()


def test_a_median_of_disturbed_steps_is_marked_and_explained() -> None:
    steps = [step(0), step(1, generation=1, phase="first"), step(2, generation=1, phase="release")]
    times = {"source_last_step_ended_s": 101.0, "first_step_ended_s": 103.0}
    text = printed(RunRecords(steps, [reconfiguration(**times)], [], {}), 120)
    assert "1.000*" in text
    assert "* no undisturbed step to take the median of" in text


def test_a_long_failure_is_shortened() -> None:
    records = RunRecords([], [reconfiguration(outcome="aborted", detail="why " * 500)], [], {})
    text = printed(records, 80)
    assert len(text) < 3000
    assert text.rstrip().endswith("why ...")


def test_rows_that_were_lost_are_told() -> None:
    text = printed(RunRecords([step(0), step(9)], [], [], {}), 80)
    assert "2 in 10 s, 8 more were not recorded" in text


def test_an_empty_run_has_a_report() -> None:
    text = printed(RunRecords([], [], [], {}), 80)
    assert "0 completed" in text


def test_texts_are_not_read_as_markup() -> None:
    attributes = {"name": "[bold]run[/]", "host": "here"}
    attempt = reconfiguration(outcome="aborted", detail="[red]gone[/nothing]", notice="[x]")
    text = printed(RunRecords([], [attempt], [], attributes), 120)
    for part in ("[bold]run[/] on here", "[red]gone[/nothing]", "[x]"):
        assert part in text


# ---- what it takes to import


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("derive", ["torch", "h5py", "rich", "numpy"]),
        ("report", ["torch", "h5py", "numpy"]),
        ("store", ["torch", "rich"]),
    ],
)
def test_a_module_loads_only_what_it_needs(module: str, absent: list[str]) -> None:
    code = f"import sys, liver_hpc.report.{module}; print({absent!r} & sys.modules.keys())"
    code = code.replace(repr(absent), repr(set(absent)))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "set()"
