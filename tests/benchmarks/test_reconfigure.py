"""The sweep: its file, the order and resumption of cells, figures from rows."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from benchmarks.harness import report
from benchmarks.reconfigure import __main__ as command
from benchmarks.reconfigure import array, links
from benchmarks.reconfigure.cells import Rows
from benchmarks.reconfigure.cells import measure as measure_cell
from benchmarks.reconfigure.figures import figures, fitted, measured, result
from benchmarks.reconfigure.live import rows as live_rows
from benchmarks.reconfigure.sweep import ArraySection, Cell, Sweep, cells, load_sweep
from liver_hpc.cli.check import check_run
from liver_hpc.errors import ConfigError, LiverError
from liver_hpc.host.process import CORES
from liver_hpc.run.records import RunRecords
from tests.unit.layout.models import gpt_recipe
from tests.unit.report.rows import crossing, reconfiguration, step

CONFIGS = Path(__file__).parents[2] / "configs" / "bench"
RESTART = "dist_checkpointing"
NODE = {"processor": "EPYC", "cores": 64, "memory_bytes": 2**40, "accelerators": "H100"}


@pytest.fixture
def sweep(tmp_path: Path) -> Sweep:
    loaded = load_sweep(CONFIGS / "local.yaml")
    return loaded.model_copy(update={"directory": tmp_path})


def row(**fields: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "size": "25m",
        "transition": "grow",
        "method": "live",
        "round": 0,
        "source": "tp1 pp1 dp2",
        "target": "tp2 pp1 dp2",
        "lost_s": 0.1,
        "median_step_s": 0.5,
        "slowdown_s": 1.0,
        "reconfiguration_s": 8.0,
        "detection_s": 0.0,
        "pause_s": 0.1,
        "bytes": 1000,
        "variant": "",
    }
    return values | fields


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_run_of_the_shipped_sweeps_passes_the_checks(path: Path) -> None:
    sweep = load_sweep(path)
    assert sweep.name == {"local": "reconfigure"}.get(path.stem, f"reconfigure-{path.stem}")
    assert sweep.slurm.gpus_per_node in (0, 8)
    assert sweep.slurm.parallel == 1
    for size, variant in {(cell.size, cell.variant) for cell in cells(sweep)}:
        config = sweep.run_config(size, variant)
        check_run(config, gpt_recipe(config), [])


@pytest.mark.parametrize("name", ["local.yaml", "sizes.yaml"])
def test_the_shipped_sizes_are_what_their_names_say(name: str) -> None:
    sweep = load_sweep(CONFIGS / name)
    for size in sweep.models:
        spec = gpt_recipe(sweep.run_config(size)).spec
        millions = sum(tensor.elements for tensor in spec.tensors) / 1e6
        assert millions == pytest.approx(float(size.removesuffix("m")), rel=0.05)


def test_five_transitions_are_claimed_five_times_each_and_interleaved(sweep: Sweep) -> None:
    assert sum(transition.claimed for transition in sweep.transitions) == 5
    found = list(cells(sweep))
    assert len(found) == len({cell.name for cell in found}) == 2 * 2 * 5
    kinds = [f"{cell.size}/{cell.method}" for cell in found]
    assert kinds[:4] == kinds[7:3:-1]
    assert [cell.round for cell in found[:8]] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_variants_are_overlaid_and_are_measured_with_their_methods(sweep: Sweep) -> None:
    values = sweep.model_dump(mode="json") | {
        "variants": [
            {"name": "all"},
            {"name": "cold", "run": {"handoff": {"warm_up": False}}, "methods": ["live"]},
        ]
    }
    sweep = Sweep.model_validate(values)
    found = [(cell.method, cell.variant) for cell in cells(sweep) if cell.size == "25m"]
    assert sorted({*found}) == [(RESTART, "all"), ("live", "all"), ("live", "cold")]
    assert len({cell.name for cell in cells(sweep)}) == 2 * 3 * 5
    assert sweep.run_config("25m", "all").handoff.warm_up
    cold = sweep.run_config("25m", "cold")
    assert not cold.handoff.warm_up
    assert cold.train == sweep.run_config("25m").train


def test_variants_have_names_of_their_own(sweep: Sweep) -> None:
    values = sweep.model_dump(mode="json") | {"variants": [{"name": "all"}, {"name": "all"}]}
    with pytest.raises(ValueError, match="known by their names"):
        Sweep.model_validate(values)


def test_a_variant_is_compared_with_the_first(sweep: Sweep) -> None:
    sweep = Sweep.model_validate(
        sweep.model_dump(mode="json") | {"variants": [{"name": "all"}, {"name": "not warm"}]}
    )
    rows = [
        row(variant=variant, transition=transition, lost_s=lost_s, method=method)
        for variant, more in (("not warm", 2.0), ("all", 1.0))
        for transition, base in (("grow", 0.5), ("shrink", 1.0))
        for method, lost_s in (("live", base * more), (RESTART, 10 * base * more**2))
    ]
    found = result(sweep, rows)
    assert found.figures["speedup_min"] == pytest.approx(10.0), "of the first variant"
    assert found.figures["lost_over_first_not_warm"] == pytest.approx(2.0)
    assert found.figures["cost_over_first_not_warm"] == pytest.approx((2 / 1.5 + 3 / 2) / 2)
    assert found.figures["restart_over_first_not_warm"] == pytest.approx(4.0)
    lines = [(line["transition"], line["variant"], line["method"]) for line in found.rows]
    assert lines[1:3] == [("grow", "all", RESTART), ("grow", "not warm", "live")]
    assert "lost_s not warm 25m grow live" in found.spread


def test_lost_time_over_bytes_is_a_line_through_three_sizes() -> None:
    rows = [
        row(size=size, bytes=gigabytes * 10**9, lost_s=0.25 + 0.5 * gigabytes)
        for size, gigabytes in (("6m", 1), ("25m", 2), ("100m", 4))
    ]
    assert fitted(measured(rows[:2])) == {}
    found = fitted(measured(rows))
    assert found["live_lost_s_fixed"] == pytest.approx(0.25)
    assert found["live_lost_s_per_gb"] == pytest.approx(0.5)
    assert found["live_lost_explained"] == pytest.approx(1.0)


def test_with_cores_apart_what_is_launched_finds_as_many_as_workers_are_at_once(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = load_sweep(CONFIGS / "apart.yaml").model_copy(update={"directory": sweep.directory})
    assert (sweep.most_at_once, apart.most_at_once) == (5, 2)
    assert load_sweep(CONFIGS / "local.yaml", cores="apart").cores == "apart"
    found: list[str | None] = []

    def measure(sweep: Sweep, cell: Cell) -> list[dict[str, Any]]:
        found.append(os.environ.get(CORES))
        return []

    monkeypatch.setattr("benchmarks.reconfigure.live.measure", measure)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {5, 2, 7})
    for each in (sweep, apart):
        measure_cell(each, Cell(size="25m", method="live", round=0))
    assert found == [None, "2,5"]
    assert CORES not in os.environ
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: {2})
    with pytest.raises(ConfigError, match="wanted 2 cores, got 1"):
        measure_cell(apart, Cell(size="25m", method="live", round=0))


def test_a_sweep_on_a_test_cluster_wants_to_be_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    with pytest.raises(ConfigError, match="runs inside the test cluster 'bench'"):
        links.nodes(load_sweep(CONFIGS / "links.yaml"))


@pytest.mark.parametrize("kind", ["auto", "slurm"])
def test_a_sweep_of_a_run_on_several_nodes_is_refused(sweep: Sweep, kind: str) -> None:
    """A restart would be on the machine that calls."""
    component = {"name": "main", "partition": "gpu", "nodes": 4, "workers_per_node": 1}
    run = {"cluster": {"kind": kind, "slurm": {"components": [component]}}}
    values = sweep.model_dump(mode="json")
    variants = [{"name": "here"}, {"name": "apart", "run": run}]
    for other in ({"run": values["run"] | run}, {"variants": variants}):
        with pytest.raises(ValueError, match="measures within one node"):
            Sweep.model_validate(values | other)


def test_a_task_whose_gpus_torch_does_not_see_measures_nothing(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Cell] = []
    monkeypatch.setattr(array, "measure", lambda _sweep, cell, _array: asked.append(cell))
    monkeypatch.setattr(array, "clean_environment", dict)
    cell = next(cells(sweep))
    array.run_cell(sweep.model_dump_json(), cell.model_dump_json())
    more = sweep.model_copy(update={"slurm": ArraySection(gpus_per_node=99)})
    with pytest.raises(ConfigError, match="wanted 99, torch sees "):
        array.run_cell(more.model_dump_json(), cell.model_dump_json())
    assert asked == [cell]


def test_a_task_does_not_measure_what_another_array_has_measured(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Cell] = []
    monkeypatch.setattr(array, "measure", lambda _sweep, cell, _array: asked.append(cell))
    monkeypatch.setattr(array, "clean_environment", dict)
    first, second = [*cells(sweep)][:2]
    Rows(sweep).keep(first, [row()])
    for cell in (first, second):
        array.run_cell(sweep.model_dump_json(), cell.model_dump_json())
    assert asked == [second]


def test_an_array_is_cancelled_when_the_call_that_waits_for_it_is_interrupted(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Executor:
        def __init__(self, folder: Path) -> None:
            self.paths = SimpleNamespace(folder=folder)

        def update_parameters(self, **_parameters: object) -> None: ...

        def map_array(self, *_calls: object) -> list[SimpleNamespace]:
            return [SimpleNamespace(job_id="7_0", paths=self.paths)]

    cancelled: list[str] = []

    class Commands:
        def __init__(self, *_limits: float) -> None: ...

        def jobs(self, _ids: list[str]) -> dict[str, object]:
            raise KeyboardInterrupt

        def cancel(self, job: str) -> None:
            cancelled.append(job)

    monkeypatch.setattr("submitit.SlurmExecutor", Executor)
    monkeypatch.setattr(array, "SlurmCommands", Commands)
    with pytest.raises(KeyboardInterrupt):
        array.measure_on_slurm(sweep, [next(cells(sweep))], lambda _cell: None)
    assert cancelled == ["7"]


def test_a_replacement_that_also_moves_is_refused(sweep: Sweep, tmp_path: Path) -> None:
    text = (
        (CONFIGS / "local.yaml").read_text().replace("{pp: 2, dp: 2}, replace", "{dp: 4}, replace")
    )
    path = tmp_path / "sweep.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="'replace' replaces a worker"):
        load_sweep(path)


@pytest.mark.parametrize(
    ("changed", "into", "said"),
    [
        ("repeats: 5", "repeats: 5\nrepeats: 1", "sweep.yaml:8: key 'repeats' is given twice"),
        ("event_s: 300", "event_s: 5:00", "event_s: wanted a number of seconds, got '5:00'"),
        ("repeats: 5", "repeats: 010", "repeats: wanted a whole number, got '010'"),
        ("repeats: 5", "reapeats: 5", "unknown key; did you mean 'repeats'?"),
        ("steps: 100000", "stpes: 100000", "run of 25m: train.steps: this key is required"),
        ("heads: 16", "heads: 15", "run of 100m: model: hidden 1024 is not a multiple of heads 15"),
        ("to: {tp: 2}}", "to: {dp: 8}}", "run of 100m: layouts.8.0 (tp1 pp1 dp8): 4 micro-batches"),
    ],
)
def test_what_is_wrong_is_told_with_its_file_before_anything_is_measured(
    changed: str, into: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_text((CONFIGS / "local.yaml").read_text().replace(changed, into))
    with pytest.raises(ConfigError, match=re.escape(said)) as raised:
        load_sweep(path)
    assert all(str(each).startswith(f"{path}:") for each in raised.value.args)


@pytest.mark.parametrize("data", [b"", b"- live", b"\xff", b"name: 2024-13-45", b"[" * 3000])
def test_what_is_no_sweep_is_an_error_that_names_the_file(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=re.escape(str(path))):
        load_sweep(path, cores="apart")


def test_a_node_that_has_not_a_gpu_for_each_worker_is_refused(sweep: Sweep) -> None:
    values = sweep.model_dump(mode="json") | {"slurm": {"gpus_per_node": 4}}
    with pytest.raises(ValueError, match=r"5 workers .* wanted 5 or more, got 4"):
        Sweep.model_validate(values)
    values["transitions"] = [each for each in values["transitions"] if not each["replace"]]
    assert Sweep.model_validate(values).most_at_once == 4


def test_measured_cells_are_skipped_and_a_failure_keeps_the_others(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measured_now: list[str] = []
    wanted = list(cells(sweep))

    def measure(sweep: Sweep, cell: Cell) -> None:
        if len(measured_now) == 3:
            raise LiverError("power cut")
        measured_now.append(cell.name)
        Rows(sweep).keep(cell, [row(size=cell.size, method=cell.method, round=cell.round)])

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "load_sweep", lambda *_: sweep)
    assert command.main([]) == 1
    assert measured_now == [cell.name for cell in wanted[:3]]
    monkeypatch.setattr(command, "measure", lambda sweep, cell: Rows(sweep).keep(cell, [row()]))
    json_path = tmp_path / "r.json"
    assert command.main(["--json", str(json_path)]) == 0
    assert json_path.exists()
    assert [len(Rows(sweep).of(cell) or []) for cell in wanted] == [1] * 20


def test_a_sweep_does_not_go_on_on_another_kind_of_machine(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(sweep: Sweep, cell: Cell) -> None:
        Rows(sweep).keep(cell, [row(size=cell.size, method=cell.method)])

    wanted = list(cells(sweep))
    monkeypatch.setattr(command, "measure", measure)
    measure(sweep, wanted[0])
    for module in ("cells", "__main__"):
        monkeypatch.setattr(f"benchmarks.reconfigure.{module}.machine_facts", lambda: NODE)
    with pytest.raises(LiverError, match=r"got EPYC.*H100: here; .* cores: 25m-live-0\.json; "):
        command.run(sweep, "local", Console(quiet=True))
    monkeypatch.setattr(command, "measure_on_slurm", lambda *_: measure(sweep, wanted[1]))
    monkeypatch.setattr(command, "load_sweep", lambda *_: sweep)
    monkeypatch.setattr(command, "cells", lambda sweep: wanted[:2])
    assert command.main(["--cluster", "slurm"]) == 1, "the nodes are of two kinds"
    Rows(sweep).path(wanted[0]).unlink()
    assert command.run(sweep, "local", Console(quiet=True)) == wanted[:2]
    assert Rows(sweep).check_machine(wanted) == NODE
    json_path = tmp_path / "r.json"
    monkeypatch.undo()
    report(result(sweep, [row()], NODE), json_path, Console(quiet=True))
    assert json.loads(json_path.read_text())["machine"] == NODE, "not what asked for it"


def test_attempts_that_fail_are_counted_also_where_the_next_one_does_not(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(size="25m", method="live", round=0)

    def fails(sweep: Sweep, cell: Cell) -> list[dict[str, Any]]:
        raise LiverError("a digest\nis wrong")

    def is_killed(sweep: Sweep, cell: Cell) -> list[dict[str, Any]]:
        raise SystemExit  # nothing of ours hears of it

    def is_refused(sweep: Sweep, cell: Cell) -> list[dict[str, Any]]:
        raise ConfigError("nothing was tried")

    def is_interrupted(sweep: Sweep, cell: Cell) -> list[dict[str, Any]]:
        raise KeyboardInterrupt

    for measure, error in (
        (is_interrupted, KeyboardInterrupt),
        (fails, LiverError),
        (is_killed, SystemExit),
        (is_refused, ConfigError),
    ):
        monkeypatch.setattr("benchmarks.reconfigure.live.measure", measure)
        with pytest.raises(error):
            measure_cell(sweep, cell)
    monkeypatch.setattr("benchmarks.reconfigure.live.measure", lambda *_: [row()])
    measure_cell(sweep, cell)
    rows = Rows(sweep)
    assert rows.failures(cells(sweep)) == 2
    found = result(sweep, rows.all_of([cell]), NODE, rows.failures([cell]))
    assert found.figures["failed_attempts"] == 2
    assert found.method["machine"] == "EPYC, 64 cores, H100"


@pytest.mark.parametrize("parallel", [0, 1, 4])
def test_the_result_says_how_many_tasks_of_an_array_ran_at_a_time(
    parallel: int, sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.reconfigure.live.measure", lambda *_: [row()])
    monkeypatch.setattr(array, "clean_environment", dict)
    cell = next(cells(sweep))
    if parallel:
        sweep = sweep.model_copy(update={"slurm": ArraySection(parallel=parallel)})
        array.run_cell(sweep.model_dump_json(), cell.model_dump_json())
    else:
        measure_cell(sweep, cell)
    words = result(sweep, Rows(sweep).all_of([cell])).method
    assert ("array" in words, "order" in words) == (parallel > 0, parallel < 2)
    assert f"{parallel} at a time" in words.get("array", "0 at a time")
    assert ("shared the storage" in words.get("array", "")) == (parallel > 1)


def test_the_result_names_the_nodes_that_compared_cells_were_on(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = iter(["n1", "n2", "n2", "n2"])
    monkeypatch.setattr("benchmarks.reconfigure.cells.socket.gethostname", lambda: next(hosts))
    for name, method in (("live", "live"), ("restarts", RESTART)):
        monkeypatch.setattr(
            f"benchmarks.reconfigure.{name}.measure",
            lambda _sweep, cell, method=method: [row(method=method, round=cell.round)],
        )
    wanted = [
        Cell(size="25m", method=method, round=number)
        for number in range(2)
        for method in ("live", RESTART)
    ]
    for cell in wanted:
        measure_cell(sweep, cell)
    found = result(sweep, Rows(sweep).all_of(wanted))
    assert [each["host"] for each in found.samples] == ["n1", "n2", "n2", "n2"]
    assert "cells were on n1, n2; in 1 of 2 rounds of a size" in found.method["nodes"]
    assert "nodes" not in result(sweep, Rows(sweep).all_of(wanted[2:])).method


def test_all_tasks_are_on_the_node_that_is_named(sweep: Sweep) -> None:
    assert "nodelist" not in array._parameters(sweep)
    one = sweep.model_copy(update={"slurm": ArraySection(node="n1")})
    assert array._parameters(one)["nodelist"] == "n1"


def test_rows_of_another_sweep_are_not_taken(sweep: Sweep) -> None:
    cell = next(cells(sweep))
    Rows(sweep).keep(cell, [row()])
    more = sweep.model_copy(update={"repeats": 7})
    other = sweep.model_copy(update={"settle_steps": 9})
    assert Rows(more).of(cell) is not None
    assert Rows(other).of(cell) is None


def test_rows_of_tasks_with_other_settings_are_not_taken(sweep: Sweep) -> None:
    cell = next(cells(sweep))
    Rows(sweep).keep(cell, [row()])
    for changes in ({"setup": ["module load nccl"]}, {"gpus_per_node": 8}, {"partition": "b"}):
        other = sweep.model_copy(update={"slurm": ArraySection.model_validate(changes)})
        assert Rows(other).of(cell) is None, changes
    quicker = sweep.model_copy(update={"slurm": ArraySection(parallel=4, timeout_min=60)})
    assert Rows(quicker).of(cell) is not None


def test_rows_of_other_code_are_not_taken(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = next(cells(sweep))
    Rows(sweep).keep(cell, [row()])
    monkeypatch.setattr("benchmarks.reconfigure.sweep.software_digest", lambda: "another")
    assert Rows(sweep).of(cell) is None


@pytest.mark.parametrize("cluster", ["local", "slurm"])
def test_a_sweep_whose_code_changes_meanwhile_is_no_result(
    sweep: Sweep, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(sweep: Sweep, *_: object) -> None:
        monkeypatch.setattr("benchmarks.reconfigure.sweep.software_digest", lambda: "another")
        for cell in cells(sweep):
            Rows(sweep).keep(cell, [row()])

    monkeypatch.setattr(command, "measure", measure)
    monkeypatch.setattr(command, "measure_on_slurm", measure)
    with pytest.raises(LiverError, match=r"no rows of 25m-live-0.*was the code changed"):
        command.run(sweep, cluster, Console(quiet=True))


def test_what_an_nfs_server_has_for_a_minute_is_not_missing(
    sweep: Sweep, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    cell = next(cells(sweep))

    class Waits:
        def wait(self, seconds: float) -> None:
            nonlocal now_s
            now_s += seconds

    looked: list[object] = []
    paths = SimpleNamespace(
        folder="folder", result_pickle=SimpleNamespace(exists=lambda: now_s >= 60.0)
    )
    job = SimpleNamespace(job_id="7_0", paths=paths, exception=lambda: None)
    monkeypatch.setattr(array, "SlurmCommands", lambda *_: SimpleNamespace(jobs=lambda _ids: {}))
    monkeypatch.setattr(array, "threading", SimpleNamespace(Event=Waits))
    monkeypatch.setattr(array, "look_anew", looked.append)
    done: list[Cell] = []
    assert array._await_all("7", {cell: job}, done.append) == []
    assert done == [cell]
    assert {*looked} == {"folder"}

    def look(directory: Path) -> None:
        assert directory == Rows(sweep).directory
        for each in cells(sweep):
            Rows(sweep).keep(each, [row()])

    monkeypatch.setattr(command, "measure_on_slurm", lambda *_: None)
    monkeypatch.setattr(command, "look_anew", look)
    command.run(sweep, "slurm", Console(quiet=True))


def test_figures_are_ratios_of_medians_and_the_least_of_them() -> None:
    rows = [
        row(lost_s=lost_s, round=i, transition=transition, reconfiguration_s=ready_s)
        for transition, base, ready_s in (("grow", 0.1, 12.0), ("shrink", 0.2, 4.0))
        for i, lost_s in enumerate([base, base * 3, base / 2])
    ]
    rows += [
        row(method=RESTART, lost_s=10.0 + i, round=i, transition=t, reconfiguration_s=16.0)
        for t in ("grow", "shrink")
        for i in range(3)
    ]
    rows += [
        row(method=f"{RESTART}, exists", lost_s=6.0, round=i, transition="grow") for i in range(3)
    ]
    found = figures(measured(rows))
    assert found["speedup_min"] == pytest.approx(11.0 / 0.2)
    assert found["speedup_median"] == pytest.approx((110 + 55) / 2)
    assert found["existing_speedup_min"] == pytest.approx(60.0)
    assert found["lost_steps_max_25m"] == pytest.approx(0.4)
    assert found["lost_steps_worst_25m"] == pytest.approx(1.2)
    assert found["cost_over_restart_median"] == pytest.approx((1.1 + 1.2) / 2 / 11.0)
    assert found["cost_over_restart_max"] == pytest.approx(1.2 / 11.0)
    assert found["reconfiguration_over_restart_median"] == pytest.approx(0.5)
    assert found["reconfiguration_over_restart_max"] == pytest.approx(0.75)


def test_the_spread_of_a_ratio_is_that_of_rounds_and_bills_come_first(sweep: Sweep) -> None:
    rows = [
        row(method=method, round=i, lost_s=lost_s, slowdown_s=0.0)
        for i, (live_s, restart_s) in enumerate([(0.1, 10.0), (0.2, 10.0), (0.1, 20.0)])
        for method, lost_s in (("live", live_s), (RESTART, restart_s))
    ]
    found = result(sweep, rows)
    assert found.figures["speedup_min"] == pytest.approx(100.0)
    spread = found.spread["speedup_min"]
    assert (spread.count, spread.low, spread.high) == (3, 50.0, 200.0)
    assert found.spread["cost_over_restart_max"].high == pytest.approx(0.02)
    assert next(iter(found.figures)) == "cost_over_restart_median"


def test_a_lost_time_that_is_noise_is_no_infinite_speedup() -> None:
    rows = [row(lost_s=-0.2), row(method=RESTART, lost_s=10.0)]
    assert figures(measured(rows))["speedup_min"] == pytest.approx(10.0 / 0.005)


def test_a_cost_below_zero_is_no_gain(sweep: Sweep) -> None:
    rows = [row(slowdown_s=-5.0), row(method=RESTART, lost_s=10.0)]
    found = result(sweep, rows)
    assert found.figures["cost_over_restart_median"] == pytest.approx(0.005 / 10.0)
    assert found.method["slowdown"].endswith("makes the cost too low: 25m grow live")
    assert "slowdown" not in result(sweep, [row()]).method


def test_the_result_counts_the_fewest_repeats(sweep: Sweep) -> None:
    found = result(sweep, [row(), row(round=1), row(method=RESTART)])
    assert found.repeats == 1
    assert [line["method"] for line in found.rows] == ["live", RESTART]


ASKED_S = [94.5 + 10 * generation for generation in range(1, 6)]


def live_records(count: int) -> RunRecords:
    steps, attempts = [], []
    for generation in range(count + 1):
        first = 10 * generation
        steps += [
            step(first + i, generation=generation, phase="first" if i == 0 and generation else "")
            for i in range(10)
        ]
        if generation:
            attempts.append(
                reconfiguration(
                    generation=generation,
                    source_generation=generation - 1,
                    source_last_step_ended_s=100.0 + first,
                    first_step_ended_s=101.25 + first,
                    notice_s=95.0 + first,
                )
            )
    return RunRecords(steps, attempts, [], {})


def test_rows_of_a_live_run_are_its_handoffs_in_order(sweep: Sweep) -> None:
    cell = Cell(size="25m", method="live", round=3)
    found = live_rows(sweep, cell, live_records(5), ASKED_S)
    assert [r["transition"] for r in found] == [t.name for t in sweep.transitions]
    assert {r["lost_s"] for r in found} == {0.25}
    assert {r["reconfiguration_s"] for r in found} == {6.25}
    assert {r["detection_s"] for r in found} == {0.5}


def test_rows_of_a_live_run_tell_where_the_lost_time_went(sweep: Sweep) -> None:
    records = live_records(5)
    records.crossings.append(
        crossing(generation=2, started_s=120.5, forward_backward_s=0.5, ended_s=121.25)
    )
    found = live_rows(sweep, Cell(size="25m", method="live", round=0), records, ASKED_S)
    assert "path_wire_s" not in found[0]
    assert found[1]["path_forward_backward_s"] == 0.5
    lines = {k: v for k, v in found[1].items() if k.startswith("path_") and "slow" not in k}
    assert math.fsum(lines.values()) == pytest.approx(found[1]["lost_s"] + 1.0)


def test_a_run_that_lacks_a_handoff_is_no_measurement(sweep: Sweep) -> None:
    with pytest.raises(LiverError, match="wanted 5 handoffs, got 4"):
        live_rows(sweep, Cell(size="25m", method="live", round=0), live_records(4), ASKED_S)
