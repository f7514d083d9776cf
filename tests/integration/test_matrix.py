"""The fault matrix on real processes: a phase of a handoff, whom it befalls, and what.

Two of three nodes train, and the worker of the second one is to be replaced by one on the third:
so there is one that stays, one that joins and one that leaves, each with an agent of its own. The
fault comes at the very entry of the journal that begins the phase. Whatever it was, training goes
on, in the old world, the new one, or one that is filled again; its losses are those of a run that
nothing has happened to, and nothing is left of it.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import pytest

from liver_hpc.cli.client import request
from liver_hpc.protocol.messages import ReplaceRequest
from liver_hpc.report.store import RunRecords
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import JOURNAL_FILE, read_entries
from liver_hpc.run.journal import Journal
from tests.integration.cut import cut_file
from tests.integration.nodes import on_nodes
from tests.integration.runs import (
    ENDLESS,
    processes_of,
    run_config,
    stop_and_read,
    tails,
    wait_until,
    watch,
    worst_difference,
)

pytestmark = pytest.mark.timeout(200)

STEP_S = "0.2"
HEARTBEAT_S, SHORT_S = 6.0, 2.0
"""How long silence is borne, and how long somebody stands still who is not to be lost."""
BOUND_S = 75.0
"""From the fault to the twelfth step of a world that is whole."""
AFTER = 12

PHASES = {
    "idle": "step_done",
    "PREPARE": "hello",
    "TRANSFER": "at_boundary",
    "vote:before": "vote",
    "vote:after": "vote",
    "RELEASE": "first_step",
    "ABORT": "aborted",
    "checkpoint": "step_done",
}
"""The first event of this type in the handoff begins it. `:after`, and a hello, which says which
process a worker is: once it is on the disk."""
ROLES = ("staying", "leaving", "joining")
FAULTS = (
    "worker killed",
    "worker stands still",
    "worker stands still for ever",
    "worker cut off",
    "agent killed",
    "agent stands still for ever",
    "node vanishes",
    "node stands still for ever",
)
IN_CI = ("vote:after", "staying", "agent killed")
"""For others: test_recovery.py; each fault in each phase, played: tests/unit/run/test_matrix.py."""


def cases() -> Iterator[object]:
    for case in product(PHASES, ROLES, FAULTS):
        if case[0] in ("idle", "checkpoint") and case[1] != "staying":
            continue  # nobody else is there
        marks = () if case == IN_CI else pytest.mark.long
        yield pytest.param(*case, marks=marks, id=", ".join(case))


# ---- who is struck


def pids(path: Path) -> dict[int, int]:
    """The processes of all workers that have come."""
    said = (entry.event for entry in read_entries(path / JOURNAL_FILE))
    hellos = (event for event in said if event["type"] == "hello")
    return {int(event["worker"]): int(event["pid"]) for event in hellos}


def struck(path: Path, worker: int, who: str) -> list[psutil.Process]:
    """The worker, its agent, or all that runs on its node."""
    process = psutil.Process(pids(path)[worker])
    if who == "worker":
        return [process]
    agents = [each for each in process.parents() if "--agent" in each.cmdline()]
    assert agents, f"{process.cmdline()} has no agent"
    agent = agents[-1]
    return [agent] if who == "agent" else [agent, *agent.children(recursive=True)]


def strike(path: Path, worker: int, fault: str) -> list[psutil.Process]:
    """Those that were struck, and may have to be woken in the end."""
    who, _, what = fault.partition(" ")
    if what == "cut off":
        cut = cut_file(path)
        cut.with_suffix(".new").write_text(str(pids(path)[worker]))
        cut.with_suffix(".new").rename(cut)
        return []
    number = signal.SIGKILL if what in ("killed", "vanishes") else signal.SIGSTOP
    hit = struck(path, worker, who)
    for process in hit:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
    if what == "stands still":
        threading.Timer(SHORT_S, wake, [hit]).start()
    return hit if number is signal.SIGSTOP else []


def wake(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.resume()


class Trap:
    """Strikes once, in the thread that writes the journal, when an entry of a type comes."""

    def __init__(self, event: str, after: bool, blow: Callable[[Path], None]) -> None:
        self._sought = re.compile(rb'\{"type":"%s"' % event.encode())
        self._after = after
        self._blow = blow
        self.armed = threading.Event()
        self.sprung_s = 0.0

    def plant(self, monkeypatch: pytest.MonkeyPatch) -> None:
        write = Journal._write

        def writing(journal: Journal, data: bytes) -> None:
            springs = self.armed.is_set() and self._sought.search(data) is not None
            if springs and not self._after:
                self._spring(journal)
            write(journal, data)
            if springs and self._after:
                self._spring(journal)

        monkeypatch.setattr(Journal, "_write", writing)

    def _spring(self, journal: Journal) -> None:
        self.armed.clear()
        self._blow(journal._path.parent)
        self.sprung_s = time.monotonic()


# ---- the cases


@pytest.mark.parametrize(("phase", "role", "fault"), [*cases()])
def test_training_goes_on_whatever_befalls_whom_in_which_phase(
    phase: str,
    role: str,
    fault: str,
    tmp_path: Path,
    quiet: RunRecords,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LIVER_TEST_STEP_S", STEP_S)
    if phase == "ABORT":
        # A joiner with whom the reason may lie would have gone.
        monkeypatch.setenv("LIVER_TEST_FAULT", "0:REFUSE" if role == "joining" else "2:FLIP")
    hit: list[psutil.Process] = []
    worker = {"staying": 0, "leaving": 1, "joining": 2}[role]
    after = phase.endswith(":after") or PHASES[phase] == "hello"
    trap = Trap(PHASES[phase], after, lambda path: hit.extend(strike(path, worker, fault)))
    trap.plant(monkeypatch)
    run = begin(tmp_path, phase)
    if phase == "checkpoint":
        watch(run, lambda status: status.step == 4, 60.0)
    trap.armed.set()
    if phase not in ("idle", "checkpoint"):
        request(run, ReplaceRequest(replace=1))
    wait_until(lambda: trap.sprung_s > 0, 60.0, f"{phase}: {tails(run)}")
    ends_well(run, trap.sprung_s, quiet, hit)


def begin(tmp_path: Path, phase: str) -> RunDirectory:
    """A run on three nodes, of which two train."""
    config = run_config(
        tmp_path,
        ENDLESS,
        layouts={1: [{"dp": 1}], 2: [{"dp": 2}]},
        workers={"max": 2},
        snapshots={"every_steps": 1},
        checkpoint={"every_steps": 5 if phase == "checkpoint" else None},
        recipe="tests.integration.cut:CutGPT",
        deadlines={"heartbeat_s": HEARTBEAT_S, "transfer_s": 8.0, "exit_s": 3.0},
        policy={"settle_s": 0.5, "retry_s": 2.0},
    )
    run, _, _ = on_nodes(config, n1=1, n2=1, n3=1)
    watch(run, lambda status: status.step >= 3, 90.0)
    return run


def ends_well(
    run: RunDirectory, struck_s: float, quiet: RunRecords, hit: list[psutil.Process]
) -> None:
    done = []

    def whole(status: object) -> bool:
        """Who was to be lost is, and a world has trained on for a while."""
        settled = status.handoff is None and status.state == "training"
        waited = time.monotonic() - struck_s > HEARTBEAT_S + 2.0
        if not (settled and waited):
            done.clear()
        else:
            done.append(status.step)
        return bool(done) and status.step >= done[0] + AFTER

    watch(run, whole, BOUND_S)
    records = stop_and_read(run)
    wake(hit)
    newest = {each.step: (each.loss, each.grad_norm) for each in records.steps}
    assert sorted(newest) == list(range(len(newest)))
    assert worst_difference([newest[step] for step in sorted(newest)], quiet_of(quiet)) <= 1e-4
    made = [each for each in records.reconfigurations if each.outcome == "completed"]
    assert all(each.digest_equal for each in made)
    assert all(each.steps_redone <= 1 for each in records.recoveries)
    wait_until(lambda: not processes_of(run), 20.0, f"the end of {processes_of(run)}")
    print(f"{time.monotonic() - struck_s:.1f} s from the fault to the end of the run")


def quiet_of(records: RunRecords) -> list[tuple[float, float]]:
    return [(each.loss, each.grad_norm) for each in records.steps]
