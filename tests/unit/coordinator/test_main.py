"""The coordinator's process: its files, its log, its signals."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import resource
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from liver_hpc.cli.client import request
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.slurm.run_job import OwnJob
from liver_hpc.config.load import dump_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator import main as module
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.main import run_coordinator
from liver_hpc.coordinator.performer import Services
from liver_hpc.coordinator.takeover import Left
from liver_hpc.errors import DeadlineError, LiverError
from liver_hpc.host.child import mark_of
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.status import StatusSnapshot
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.entries import Event, encode
from liver_hpc.run.epoch import Epoch, NotTakenOver, Superseded, last_sign
from liver_hpc.run.events import Memory, Node, StopSignalled
from liver_hpc.run.journal import Journal, JournalNews
from liver_hpc.run.outcome import Outcome, begin_again
from tests.fakes import JournalRecords, fewer, tiny_recipe, tiny_run
from tests.scripted_cluster import ScriptedCluster

SECRET = b"s" * 32
LIMIT_S = 10.0
pytestmark = pytest.mark.timeout(60)


def _write_run(directory: Path, **sections: Any) -> None:
    (directory / "run.yaml").write_text(dump_run(tiny_run(**sections)))


def _scripted(cluster: ScriptedCluster) -> Callable[[RunConfig, Path, bytes], Services]:
    def build(config: RunConfig, directory: Path, secret: bytes) -> Services:
        cluster.secret = cluster.rendezvous._secret = secret
        return Services(
            clock=SystemClock(),
            recipe=tiny_recipe(config),
            launcher=cluster.launcher,
            rendezvous=cluster.rendezvous,
            open_journal=JournalRecords().open,
        )

    return build


def _run(directory: Path, control: Control | None = None) -> Outcome:
    return run_coordinator(directory, control or Control(), _scripted(ScriptedCluster(SECRET)))


def test_it_stops_when_it_is_told_and_leaves_its_outcome(tmp_path: Path) -> None:
    _write_run(tmp_path)
    cluster, control = ScriptedCluster(SECRET), Control()

    def stop() -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "Begin")
        poll_until(lambda: bool(cluster.got(1, m.Begin)), deadline)
        control.say(StopSignalled("SIGTERM"))

    stopper = threading.Thread(target=stop)
    stopper.start()
    outcome = run_coordinator(tmp_path, control, _scripted(cluster))
    assert outcome == control.outcome == Outcome("stopped", "SIGTERM", 0)
    stopper.join(LIMIT_S)

    written = json.loads((tmp_path / "outcome.json").read_text())
    assert written == {"state": "stopped", "reason": "SIGTERM", "step": 0}
    assert not (tmp_path / "coordinator.json").exists()
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert "[gen 0] INFO stopping: SIGTERM" in (tmp_path / "logs/coordinator.log").read_text()


def test_the_process_may_have_as_many_connections_as_the_host_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        assert _run(tmp_path).state == "failed"
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 512
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_process_may_have_as_many_threads_as_the_host_allows(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (fewer(hard), hard))
    try:
        assert _run(tmp_path).state == "failed"
        assert resource.getrlimit(resource.RLIMIT_NPROC)[0] == hard
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


def test_the_process_reports_a_run_file_that_does_not_exist(tmp_path: Path) -> None:
    assert _run(tmp_path).state == "failed"
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["state"] == "failed"
    assert "run.yaml" in outcome["reason"]


# ---- how it ends


class Ends:
    """In the place of the coordinator: ends at once."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome
        self.core = self

    def __call__(self, *_: Any) -> Ends:
        return self

    def run(self) -> Outcome:
        return self._outcome

    def identity(self) -> str:
        return "told"


def test_an_outcome_that_cannot_be_written_is_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a full disk would cost the requeue."""
    requeue = Outcome("requeue", "its job is about to end", 7)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("liver_hpc.run.outcome.write_whole", full)
    monkeypatch.setattr(module, "Coordinator", Ends(requeue))
    _write_run(tmp_path)
    assert run_coordinator(tmp_path, Control(), lambda *_: cast(Any, None)) == requeue
    assert not (tmp_path / "outcome.json").exists()


def test_a_run_whose_directory_is_removed_does_not_restart_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would begin without a run file and a secret, again and again."""

    class Removed(Ends):
        def run(self) -> Outcome:
            shutil.rmtree(tmp_path / "run")
            return super().run()

    monkeypatch.setattr(module, "Coordinator", Removed(Outcome("restart", "worker 1 lost", 7)))
    (tmp_path / "run").mkdir()
    _write_run(tmp_path / "run")
    outcome = run_coordinator(tmp_path / "run", Control(), lambda *_: cast(Any, None))
    gone = tmp_path / "run" / "coordinators" / "1"
    why = f"worker 1 lost; its directory was removed or moved: {gone} is gone"
    assert outcome == Outcome("failed", why, 7)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("restarts", [2, 1, None])
@pytest.mark.parametrize("state", ["restart", "failed"])
def test_a_run_whose_job_was_queued_again_is_left_to_its_next_start(
    tmp_path: Path, state: str, restarts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where slurmd is gone, nobody ends the job's processes; no step begins on its nodes."""
    said = "exit 1" if restarts is None else f"echo JobId=77 JobState=PENDING Restarts={restarts}"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{said}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    ends = iter([state, "failed"])

    class Again(Ends):
        def run(self) -> Outcome:
            return Outcome(next(ends), "node n1 is gone", 7)

    monkeypatch.setattr(module, "Coordinator", Again(Outcome("", "", 0)))
    monkeypatch.setattr(Again, "memory", Memory(), raising=False)
    _write_run(tmp_path, cluster={"kind": "slurm", "slurm": {"components": [{"name": "main"}]}})
    OwnJob(job_id="77", restarts=1).note(tmp_path)
    run = partial(run_coordinator, tmp_path, Control(), lambda *_: cast(Any, None))
    if restarts == 2:
        with pytest.raises(Superseded, match="the job's next start takes over"):
            run()
        assert not (tmp_path / "outcome.json").exists()
    else:
        assert run() == Outcome("failed", "node n1 is gone", 7)


@pytest.mark.parametrize("gone", ["recipe", "checkpoint"])
def test_a_run_that_cannot_begin_again_has_done_its_steps_all_the_same(
    tmp_path: Path, gone: str
) -> None:
    """Whether nothing that decides is there yet, or it has not been told of the checkpoint."""
    _write_run(tmp_path)
    end = [{"type": "end", "state": "requeue", "reason": "", "step": 14}]
    (tmp_path / "journal.jsonl").write_bytes(
        encode(0, 1.0, {"type": "coordinator_started"})
        + encode(1, 2.0, {"type": "checkpoint_written", "step": 10})
        + encode(2, 3.0, {"type": "step_done", "step": 13, "generation": 0})
        + encode(3, 4.0, {"type": "tick"}, end)
    )

    def build(*parts: Any) -> Services:
        if gone == "recipe":
            raise LiverError("the recipe is gone")
        return _scripted(ScriptedCluster(SECRET))(*parts)

    outcome = run_coordinator(tmp_path, Control(), build)
    assert (outcome.state, outcome.step) == ("failed", 14)
    assert re.search(f"{gone}.* is gone", outcome.reason)


# ---- restarts


class Restarts:
    """A run in a thread, each start of it on a scripted cluster of its own."""

    def __init__(self, directory: Path, nodes: Sequence[Node], **sections: Any) -> None:
        _write_run(directory, **sections)
        self.run = RunDirectory(directory)
        self.clusters: list[ScriptedCluster] = []
        self._nodes = nodes
        self._thread = threading.Thread(
            target=run_coordinator, args=(directory, Control(), self._build), daemon=True
        )
        self._thread.start()

    def _build(self, config: RunConfig, directory: Path, secret: bytes) -> Services:
        cluster = ScriptedCluster(SECRET, self._nodes)
        services = _scripted(cluster)(config, directory, secret)
        self.clusters.append(cluster)
        return dataclasses.replace(services, pool=cluster.pool)

    def ask(self, message: m.FromOperator) -> m.Reply:
        return request(self.run, message)

    def status(self) -> StatusSnapshot:
        return StatusSnapshot.model_validate(self.ask(m.StatusRequest()).data)

    def await_status(self, start: int, condition: Callable[[StatusSnapshot], bool]) -> None:
        """Until the coordinator of this start says something that satisfies `condition`."""

        def holds() -> bool:
            if len(self.clusters) <= start or self.run.coordinator() is None:
                return False
            try:
                return condition(self.status())
            except LiverError:  # it ends, or begins
                return False

        deadline = Deadline.after(SystemClock(), LIMIT_S, f"the status of start {start}")
        poll_until(holds, deadline)

    def end(self) -> None:
        self.ask(m.StopRequest())
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()


def _trains(workers: int, generation: int = 0) -> Callable[[StatusSnapshot], bool]:
    def holds(status: StatusSnapshot) -> bool:
        settled = status.state == "training" and status.handoff is None
        return settled and len(status.workers) == workers and status.generation >= generation

    return holds


def _on(status: StatusSnapshot, workers: int) -> list[str]:
    """The nodes on which so many run, in a run of two."""
    lines = [line.split()[0] for line in status.nodes if f": {workers} of 1 " in line]
    return lines if len(lines) == 2 else []


def test_what_operators_asked_for_holds_after_a_restart_of_the_same_job(tmp_path: Path) -> None:
    nodes = [Node(f"n{number}", "main", slots=1) for number in (1, 2, 3, 4)]
    layouts = {n: [{"dp": n}] for n in (2, 3, 4)}
    restarts = Restarts(tmp_path, nodes, layouts=layouts, policy={"settle_s": 0.02, "retry_s": 0.3})
    restarts.await_status(0, _trains(4))
    restarts.ask(m.ResizeRequest(layout="dp=2"))
    restarts.await_status(0, _trains(2))
    restarts.await_status(0, lambda status: _on(status, 0) != [])
    used, free = (_on(restarts.status(), workers) for workers in (1, 0))
    restarts.ask(m.DrainRequest(node=free[0]))
    restarts.ask(m.DrainRequest(node=free[1]))
    # One worker is left then, for which there is no layout: to the disk, and again from there.
    restarts.clusters[0].pool.warn(used[1], window_s=600.0)

    restarts.await_status(1, _trains(2))
    second = restarts.clusters[1]
    assert sorted(request.seat.node for request in second.launched) == sorted(used)
    assert sorted(second.pool.avoided) == sorted(free)
    restarts.ask(m.DrainRequest(node=free[0], undo=True))
    second.pool.grant(Node("n5", "main", slots=1))  # room for four, but two are the bound
    restarts.await_status(1, lambda status: any("n5" in line for line in status.nodes))
    second.train(2)
    restarts.await_status(1, lambda status: status.step >= 2 and status.handoff is None)
    assert len(second.launched) == 2
    restarts.end()
    assert len(restarts.clusters) == 2


# ---- what earlier starts have left


def _stopped_at_once(directory: Path) -> Outcome:
    """A run in a directory of an earlier start, which is stopped before it launches anything."""
    control = Control()
    control.say(StopSignalled("test"))
    return _run(directory, control)


@pytest.mark.parametrize("again", [False, True])
def test_a_run_that_is_over_begins_again_only_where_it_is_to(tmp_path: Path, again: bool) -> None:
    """Its coordinator was killed before it could leave the outcome."""
    _write_run(tmp_path)
    journal = tmp_path / "journal.jsonl"

    def opened(tell: Callable[[JournalNews], None], epoch: Epoch) -> Journal:
        return Journal(journal, tell, epoch, 0)

    def build(config: RunConfig, directory: Path, secret: bytes) -> Services:
        services = _scripted(ScriptedCluster(SECRET))(config, directory, secret)
        return dataclasses.replace(services, open_journal=opened)

    stopped, other = Control(), Control()
    stopped.say(StopSignalled("first"))
    other.say(StopSignalled("second"))
    first = run_coordinator(tmp_path, stopped, build)
    assert first == Outcome("stopped", "first", 0)
    if again:
        begin_again(tmp_path)
    else:
        (tmp_path / "outcome.json").unlink()
    second = run_coordinator(tmp_path, other, build)
    assert second == (Outcome("stopped", "second", 0) if again else first)
    assert json.loads((tmp_path / "outcome.json").read_text()) == dataclasses.asdict(second)
    starts = journal.read_text().count('"event":{"type":"coordinator_started"')
    assert starts == (2 if again else 1)
    assert not (tmp_path / "again").exists()


class KilledAsItStops(Journal):
    """The journal of a coordinator that is no more once it has been told to stop."""

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        number = super().append(at_s, event, actions, said)
        if event["type"] == "stop_signalled":
            raise Superseded(0)
        return number


@pytest.mark.parametrize(
    "how",
    [
        "queued again",
        "resumed a day later",
        "resumed at once",
        "resumed at once, local",
        "resumed at once, local, an agent lives",
    ],
)
def test_what_a_start_was_told_that_is_gone_with_its_job_ends_no_other_one(
    tmp_path: Path, how: str
) -> None:
    """It was killed as it stopped, and with it all workers."""
    kind = "local" if "local" in how else "auto"
    _write_run(tmp_path, deadlines={"coordinator_s": 0.5}, cluster={"kind": kind})
    journal = tmp_path / "journal.jsonl"
    clusters = [ScriptedCluster(SECRET), ScriptedCluster(SECRET)]
    left, journals = iter(clusters), iter((KilledAsItStops, Journal))
    over = threading.Event()

    def stop(cluster: ScriptedCluster, control: Control, why: str) -> None:
        deadline = Deadline.after(SystemClock(), LIMIT_S, "Begin")
        with suppress(DeadlineError):
            poll_until(lambda: over.is_set() or bool(cluster.got(1, m.Begin)), deadline)
        control.say(StopSignalled(why))

    def build(config: RunConfig, directory: Path, secret: bytes) -> Services:
        return dataclasses.replace(
            _scripted(next(left))(config, directory, secret),
            open_journal=lambda tell, epoch: next(journals)(journal, tell, epoch, 0),
            attributes=module.attributes_of(config, directory),
        )

    if how == "queued again":
        OwnJob(job_id="77").note(tmp_path)
    control = Control()
    threading.Thread(target=stop, args=(clusters[0], control, "SIGTERM")).start()
    with pytest.raises(Superseded):
        run_coordinator(tmp_path, control, build)
    clusters[0].join(LIMIT_S)
    if how == "queued again":
        OwnJob(job_id="77", restarts=1).note(tmp_path)
    else:
        begin_again(tmp_path)
    if how == "resumed a day later":
        for path in (tmp_path / "coordinators").iterdir():
            os.utime(path, (0.0, time.time() - 86_400.0))
    control = Control()
    stopper = threading.Thread(target=stop, args=(clusters[1], control, "second"))
    stopper.start()
    with ExitStack() as living:
        if "lives" in how:
            mark = mark_of(str(tmp_path.resolve()), "a0")
            agent = living.enter_context(subprocess.Popen(["sleep", "60"], env={mark: "1"}))
            living.callback(agent.kill)
        outcome = run_coordinator(tmp_path, control, build)
    over.set()
    stopper.join(LIMIT_S)
    if how == "resumed at once" or "lives" in how:  # workers might have lived
        assert "worker 0 lost: it has not called" in outcome.reason
    else:
        assert outcome == Outcome("stopped", "second", 0)


def test_one_that_reads_for_long_shows_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("liver_hpc.run.epoch.SHOWN_EVERY_S", 0.01)
    signs = []

    def memory(_directory: Path) -> Memory:
        for _ in range(2):
            signs.append(last_sign(tmp_path))
            time.sleep(0.3)
        return Memory()

    monkeypatch.setattr("liver_hpc.coordinator.main._memory", memory)
    _write_run(tmp_path)
    (tmp_path / "journal.jsonl").touch()
    assert _stopped_at_once(tmp_path).state == "stopped"
    assert signs[0] != signs[1]


def test_who_takes_over_reads_no_other_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers wait for it, for so long and no longer."""
    _write_run(tmp_path)
    (tmp_path / "journal.jsonl").touch()
    left, ends, told = Left(cast(Any, None)), Ends(Outcome("stopped", "", 7)), list[Any]()

    def coordinator(*parts: Any) -> Ends:
        told.append(parts[-1])
        return ends

    monkeypatch.setattr(module, "_left", lambda *_: left)
    monkeypatch.setattr(module, "_memory", lambda _: pytest.fail("all starts are read"))
    monkeypatch.setattr(module, "Coordinator", coordinator)
    assert _run(tmp_path).step == 7
    assert told == [left]


def test_a_damaged_journal_is_kept_and_the_run_goes_on(tmp_path: Path) -> None:
    _write_run(tmp_path)
    (tmp_path / "journal.jsonl").write_text('{"n":0}\n')
    assert _stopped_at_once(tmp_path).state == "stopped"
    assert (tmp_path / "journal.1.jsonl").read_text() == '{"n":0}\n'
    assert "line 1 is damaged" in (tmp_path / "logs/coordinator.log").read_text()


def _stale(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """From now on the file system does not give the journal when it is opened that often, once;
    how often it was opened."""
    opened, real = list[str](), Path.open

    def stale(path: Path, *arguments: Any, **more: Any) -> Any:
        if path.name == "journal.jsonl":
            opened.append(path.name)
            if len(opened) == number:
                raise OSError(116, "Stale file handle")
        return real(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", stale)
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.0)
    return opened


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5])
def test_a_journal_that_is_not_to_be_had_for_a_moment_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It is not damaged, and what operators asked for stands in it."""
    _write_run(tmp_path)
    remember = {"type": "remember", "ceiling": 4, "drained": ["n2"]}
    (tmp_path / "journal.jsonl").write_bytes(
        encode(0, 1.0, {"type": "coordinator_started"})
        + encode(1, 2.0, {"type": "transports", "generation": 9}, [remember])
    )
    opened, told, made = _stale(monkeypatch, number), list[Any](), module.Coordinator

    def coordinator(*parts: Any) -> Any:
        told.append(parts[-1])
        return made(*parts)

    monkeypatch.setattr(module, "Coordinator", coordinator)
    assert _stopped_at_once(tmp_path).state == "stopped"
    assert told == [Memory(last_generation=9, ceiling=4, drained=("n2",))]
    assert len(opened) >= number
    assert not (tmp_path / "journal.1.jsonl").exists()


def test_how_a_run_has_ended_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write_run(tmp_path)
    end = {"type": "end", "state": "finished", "reason": "", "step": 7}
    (tmp_path / "journal.jsonl").write_bytes(
        encode(0, 1.0, {"type": "coordinator_started"}) + encode(1, 2.0, {"type": "tick"}, [end])
    )
    _stale(monkeypatch, 2)
    assert _run(tmp_path) == Outcome("finished", "", 7)


def test_a_journal_that_is_not_to_be_had_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_run(tmp_path, deadlines={"boot_s": 0.05})
    monkeypatch.setattr(module, "READ_AGAIN_S", 0.01)
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(NotTakenOver, match=r"journal\.jsonl cannot be read: Is a directory"):
        _run(tmp_path)
    assert (tmp_path / "journal.jsonl").exists()
    assert not (tmp_path / "outcome.json").exists()


@pytest.mark.parametrize("over", ["ended", "another job's", ""])
def test_what_goes_wrong_before_it_has_taken_over_ends_no_run_that_may_train(
    tmp_path: Path, over: str
) -> None:
    _write_run(tmp_path)
    OwnJob(job_id="78").note(tmp_path)
    job = {"job": "77"} if over == "another job's" else {}
    end = [{"type": "end", "state": "requeue", "reason": "", "step": 7}]
    (tmp_path / "journal.jsonl").write_bytes(
        encode(0, 1.0, {"type": "coordinator_started", "attributes": job})
        + encode(1, 2.0, {"type": "tick"}, end if over == "ended" else [])
    )

    def build(*_: Any) -> Services:
        raise LiverError("squeue does not answer")

    if over:
        assert run_coordinator(tmp_path, Control(), build).state == "failed"
    else:
        with pytest.raises(NotTakenOver, match="squeue does not answer"):
            run_coordinator(tmp_path, Control(), build)
    assert (tmp_path / "outcome.json").exists() == bool(over)
