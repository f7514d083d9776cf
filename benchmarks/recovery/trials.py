"""One trial: a run that loses a worker or a node, and goes on from memory or from disk."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import loss_difference, losses
from benchmarks.live_runs import LiveRun
from benchmarks.models import layout_table
from benchmarks.processes import outliving, send_signal
from benchmarks.reconfigure.sweep import load_sweep, overlaid
from benchmarks.recovery import torchft
from benchmarks.recovery.bills import bill, median_step_s
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.report.derive import run_figures
from liver_hpc.run.entries import JOURNAL_FILE, steps_done
from liver_hpc.run.records import RunRecords

MODELS = Path("configs/bench/local.yaml")
EVENT_S = 300.0
HEARTBEAT_S = 2.0
WARM_STEPS = 6
"""Done before the loss. The last one is lost with it: its snapshot, or its checkpoint, is begun
when the step is reported."""
AFTER_STEPS = 4
QUIET_STEPS = 30
_POLL_S = 0.5
_STEP_POLL_S = 0.01

MEMORY, DISK, TORCHFT = "recovery", "restart", "torchft"
KILLED, SILENT = "killed", "silent"
DP1, DP2, TP2, TP2_DP2 = map(Layout.parse, ("dp1", "dp2", "tp2", "tp2 dp2"))


@dataclass(frozen=True)
class Case:
    """What is lost of which world. left: the layout of those that are left. nodes: how many stand
    for the machine; 1: a worker is lost, else one of them."""

    name: str
    layout: Layout
    left: Layout
    nodes: int = 1


CASES = (
    Case("worker_of_dp2", DP2, DP1),
    Case("worker_of_tp2_dp2", TP2_DP2, TP2),
    Case("node_of_tp2_dp2", TP2_DP2, TP2, nodes=2),
)


@dataclass(frozen=True)
class Trial:
    """One loss. lost_s: what it took of training: until a step more was done than before, less one
    that is undisturbed. bare_s: the same, less one that nobody takes a snapshot beside. whole_s:
    until the end of the first step in the layout that there was.
    source, target: layouts. difference: largest, relative, of a loss against the undisturbed run's.
    left: processes after the run's end."""

    size: str
    case: str
    method: str
    fault: str
    source: str
    target: str
    noticed_s: float
    let_go_s: float
    refill_s: float
    lost_s: float
    bare_s: float
    whole_s: float
    median_step_s: float
    steps_redone: int
    difference: float
    left: int


@dataclass(frozen=True)
class Quiet:
    """An undisturbed run of one layout. bare_step_s: without snapshots."""

    median_step_s: float
    bare_step_s: float
    losses: Mapping[int, float]


class Trials:
    """Makes them, of models by their names; everything lies under `directory`, for a while."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sweep = load_sweep(MODELS)
        self._quiet: dict[tuple[str, Layout], Quiet] = {}

    @property
    def sizes(self) -> list[str]:
        return list(self._sweep.models)

    def run_config(
        self, size: str, layouts: list[Layout], sections: Mapping[str, Any]
    ) -> RunConfig:
        """The first of the layouts is begun with."""
        values = {
            "name": f"recovery-{size}",
            "runs_directory": str(self._directory / "runs"),
            "model": self._sweep.models[size],
            "workers": {"initial": layouts[0].workers, "max": layouts[0].workers},
            "layouts": layout_table(layouts),
            "cluster": {"kind": "local"},
            # Who is stopped for ever is killed at the end.
            "deadlines": {"exit_s": 3.0},
        }
        data = {"data": {"directory": str(self._directory / "data")}}
        for other in (self._sweep.run, data, sections):
            values = overlaid(values, other)
        return RunConfig.model_validate(values)

    # ---- undisturbed runs

    def quiet(self, size: str, layout: Layout) -> Quiet:
        """Of the layout that is left after a loss, with the same snapshots, and without any, for
        its time alone; measured once."""
        if (size, layout) not in self._quiet:
            with_, without = (
                self._run(self.run_config(size, [layout], sections), _reach_end)[0]
                for sections in (_SECTIONS[MEMORY], {})
            )
            times_s = median_step_s(with_.steps), median_step_s(without.steps)
            self._quiet[size, layout] = Quiet(*times_s, losses(with_))
        return self._quiet[size, layout]

    # ---- losses

    def lose(self, size: str, case: Case, method: str, fault: str = KILLED) -> Trial:
        """Raises LiverError where the run does not go on as it should, DeadlineError where that
        takes too long."""
        if method == TORCHFT:
            return self._lose_of_torchft(size, case)
        quiet = self.quiet(size, case.left)
        sections = {**_SECTIONS[method], "cluster": _cluster(case)}
        if fault == SILENT:
            sections["deadlines"] = {"heartbeat_s": HEARTBEAT_S}
        struck_s = 0.0

        def strike(run: LiveRun) -> None:
            nonlocal struck_s
            run.reach(WARM_STEPS - 1)
            victims = _victims(run, case)
            done = run.reach(WARM_STEPS)
            struck_s = _strike(victims, fault)
            _await_bill(run, struck_s, done)

        config = self.run_config(size, [case.layout, case.left], sections)
        records, left = self._run(config, strike)
        found, back_s = bill(records, struck_s), whole_s(records, struck_s)
        assert found is not None
        assert back_s is not None
        begun = [step for step in records.steps if step.generation == found.generation]
        recovered = next(iter(run_figures(records).recoveries), None)
        median_s = quiet.median_step_s if recovered is not None else median_step_s(begun)
        return Trial(
            size=size,
            case=case.name,
            method=method,
            fault=fault,
            source=str(case.layout),
            target=str(case.layout) if recovered is None else recovered.record.target,
            noticed_s=found.noticed_s,
            let_go_s=math.nan if recovered is None else recovered.let_go_s,
            refill_s=math.nan if recovered is None else recovered.refill_s,
            lost_s=found.back_s - median_s,
            bare_s=found.back_s - (median_s if recovered is None else quiet.bare_step_s),
            whole_s=back_s,
            median_step_s=median_s,
            steps_redone=found.steps_redone,
            difference=loss_difference(losses(records), quiet.losses, begun[-1].step),
            left=left,
        )

    def _lose_of_torchft(self, size: str, case: Case) -> Trial:
        """Of which only what it took is known."""
        config = self.run_config(size, [case.layout, case.left], {})
        took_s = torchft.lose(config, self._directory, WARM_STEPS, AFTER_STEPS, EVENT_S)
        times_s = dict.fromkeys(
            ("noticed_s", "let_go_s", "refill_s", "bare_s", "whole_s"), math.nan
        )
        return Trial(
            size=size,
            case=case.name,
            method=TORCHFT,
            fault=KILLED,
            source=str(case.layout),
            target=str(case.left),
            lost_s=took_s,
            median_step_s=math.nan,
            steps_redone=0,
            difference=math.nan,
            left=0,
            **times_s,
        )

    def _run(self, config: RunConfig, act: Callable[[LiveRun], None]) -> tuple[RunRecords, int]:
        """The records of a run to which something was done, and how many processes outlive it."""
        with LiveRun(config, EVENT_S, _STEP_POLL_S) as run:
            act(run)
        path = run.run.path
        left = outliving(str(path))
        records = run.records()
        shutil.rmtree(path)
        return records, left


_SECTIONS: Mapping[str, Mapping[str, Any]] = {
    MEMORY: {"snapshots": {"every_steps": 1}},
    DISK: {"checkpoint": {"every_steps": 1}},
}


def _cluster(case: Case) -> dict[str, Any]:
    return {} if case.nodes == 1 else {"workers_per_node": case.layout.workers // case.nodes}


def _reach_end(run: LiveRun) -> None:
    run.reach(QUIET_STEPS)


# ---- the loss


def _victims(run: LiveRun, case: Case) -> list[psutil.Process]:
    """The last worker; or its agent, the first to go, with all that it has started."""
    pids = run.worker_pids()
    worker = psutil.Process(pids[max(pids)])
    agent = worker.parent()
    if case.nodes == 1 or agent is None:
        return [worker]
    return [agent, *agent.children(recursive=True)]


def _strike(victims: list[psutil.Process], fault: str) -> float:
    """By signals that none of them can see; returns when, in epoch seconds."""
    signum = signal.SIGKILL if fault == KILLED else signal.SIGSTOP
    struck_s = time.time()
    send_signal(victims, signum)  # some may have followed their agent
    return struck_s


def _await_bill(run: LiveRun, struck_s: float, done: int) -> None:
    """Until some steps more than `done` have been done by the world that goes on, whichever it is,
    and the run has grown back. Before that nothing but the journal's end is read: what reads all
    of it takes time of the cores that are measured."""
    deadline = Deadline.after(SystemClock(), EVENT_S, f"{run.run} to train on after a loss")

    def trains_on() -> bool:
        if (outcome := run.run.outcome()) is not None:
            raise LiverError(f"{run.run} ended after a loss: {outcome}; {run.run.where_logs_are()}")
        if steps_done(run.run.path / JOURNAL_FILE) < done + AFTER_STEPS:
            return False
        records = run.records()
        if bill_now := (bill(records, struck_s) if _noticed(records) else None):
            beyond = [step for step in records.steps if step.generation >= bill_now.generation]
            trained_on = len(beyond) > bill_now.steps_redone + AFTER_STEPS
            return trained_on and whole_s(records, struck_s) is not None
        return False

    poll_until(trains_on, deadline, _POLL_S)


def whole_s(records: RunRecords, struck_s: float) -> float | None:
    """From the signal to the end of the first step in the layout that there was: of a run that
    begins again, the first at all. None where it has not come to that."""
    found = bill(records, struck_s)
    if found is None:
        return None
    since = found.generation + 1 if records.recoveries else found.generation
    return next((s.ended_s - struck_s for s in records.steps if s.generation >= since), None)


def _noticed(records: RunRecords) -> bool:
    return bool(records.recoveries) or any(each.kind == "restart" for each in records.notices)
