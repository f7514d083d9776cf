"""Whole runs on a test cluster: submitted, watched from the control host, and what they leave."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from liver_hpc.cli.main import EXIT_BAD_INPUT
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.errors import DeadlineError
from liver_hpc.report.store import read_run
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.records import NoticeRecord, ReconfigurationRecord, RunRecords
from slurm.testbed.hosts import environment, in_control
from tests.cluster.harness import REPOSITORY, SlurmCluster, command_line
from tests.integration.runs import SCHEDULE, TINY_MODEL, processes_of, tails

BOOT_S = 120.0
"""How long workers may take from their launch to their first step, on a machine that is busy."""
GONE_S = 30.0
"""What a run leaves has to be gone so soon after its end, however it ended."""

ENDLESS = 100_000
FEED = "tests.cluster.status_feed"
_FEED_S = 0.2

RUN_FILE: dict[str, Any] = {
    "recipe": "tests.integration.random_tokens:RandomTokenGPT",
    "model": TINY_MODEL,
    # 12 samples: the same batch for one to four workers.
    "train": {"steps": ENDLESS, "global_batch": 12, "micro_batch": 1},
    "schedule": SCHEDULE,
    "handoff": {"staging_bytes": 1 << 20, "bucket_bytes": 1 << 17},
    "policy": {"settle_s": 1.0, "retry_s": 1.0},
    "checkpoint": {"every_steps": 20},
    "deadlines": {"coordinator_s": 10.0},
}
LAYOUTS = {1: [{"dp": 1}], 2: [{"dp": 2}], 3: [{"dp": 3}], 4: [{"tp": 2, "dp": 2}]}
MAIN = {"name": "main", "partition": "stable", "nodes": 1}
SPARE = {"name": "spare", "partition": "stable", "nodes": 1}
SLURM = {"components": [MAIN, SPARE], "poll_s": 0.5, "command_s": 20.0, "end_window_s": 20.0}
BURST = {"partition": "preempt", "max_nodes": 1, "time_min": 20, "backoff_s": 1.0}

Status = dict[str, Any]


def wait_for(condition: Callable[[], bool], limit_s: float, waits_for: str) -> None:
    poll_until(condition, Deadline.after(SystemClock(), limit_s, waits_for), interval_s=0.1)


@dataclass(frozen=True)
class Jobs:
    """Other people's jobs, and what Slurm says."""

    cluster: SlurmCluster

    def occupy(self, node: str) -> str:
        """A stable job on a node, for which Slurm takes it from a preemptible one; its id."""
        words = ("sbatch", "--parsable", "--partition=stable", f"--nodelist={node}")
        options = ("--job-name=other", "--output=/dev/null", "--wrap=exec sleep 3000")
        return self.cluster.run(*words, *options).strip()

    @contextmanager
    def occupying(self, node: str) -> Iterator[str]:
        """The same, until the block's end."""
        job = self.occupy(node)
        try:
            yield job
        finally:
            self.end(job)

    def runs(self, job: str) -> bool:
        return "RUNNING" in self.cluster.run("squeue", "-h", "-j", job, "-o", "%T")

    def end(self, job: str) -> None:
        self.cluster.run("scancel", job)

    def update(self, *words: str) -> None:
        self.cluster.run("scontrol", "update", *words)

    def of_runs(self) -> list[str]:
        """Jobs that are not other people's, with their states."""
        listed = self.cluster.run("squeue", "-h", "-o", "%j %i %T").splitlines()
        return [line for line in listed if not line.startswith("other ")]

    def steps(self) -> list[str]:
        return self.cluster.run("squeue", "-h", "--steps", "-o", "%i %j").splitlines()


class SlurmRun:
    """One run. `status` is the last that the coordinator said; empty while there is none."""

    def __init__(self, cluster: SlurmCluster, name: str, sections: dict[str, Any]) -> None:
        self.slurm = sections["cluster"]["slurm"]
        self.cluster = cluster
        self.jobs = Jobs(cluster)
        self.file = cluster.shared / f"{name}.yaml"
        directory = {"name": name, "runs_directory": str(cluster.shared / "runs")}
        self.file.write_text(yaml.safe_dump({**RUN_FILE, **directory, **sections}))
        self.directory = RunDirectory(Path())
        self.job = ""
        self.status: Status = {}
        self._feed: subprocess.Popen[str] | None = None

    # ---- submission

    def submit(self) -> None:
        """By `liver submit`."""
        printed = self.liver("submit", "--no-follow", "--config", str(self.file), limit_s=120.0)
        self._submitted(Path(printed.splitlines()[-1]))
        self.job = self.directory.job_id() or ""

    def submit_script(self, *options: str) -> None:
        """By `sbatch slurm/liver.sbatch`, with these options of sbatch."""
        words = ("sbatch", "--parsable", *options, "slurm/liver.sbatch", str(self.file))
        self.job = self.cluster.run(*words).strip()
        path = self.cluster.shared / "runs" / f"{self.file.stem}-{self.job}"
        wait_for((path / "run.yaml").exists, BOOT_S, f"job {self.job} to make its run")
        self._submitted(path)

    def _submitted(self, path: Path) -> None:
        self.directory = RunDirectory((REPOSITORY / path).resolve())
        command = [sys.executable, "-m", FEED, str(self.directory.path)]
        self._feed = subprocess.Popen(
            in_control(self.cluster.place, [*command, str(_FEED_S)]),
            cwd=REPOSITORY,
            env=environment(self.cluster.place),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._feed is not None
        assert self._feed.stdout is not None
        for line in self._feed.stdout:
            self.status = json.loads(line)
        self.status = {}

    def close(self) -> None:
        if self._feed is not None:
            self._feed.kill()
            self._feed.wait(10.0)

    # ---- the command line

    def liver(self, *words: str, limit_s: float = 60.0) -> str:
        return self.cluster.run(sys.executable, "-m", "liver_hpc", *words, limit_s=limit_s)

    def refused(self, *words: str) -> str:
        """What a command complains of whose input is bad."""
        line = ("exec", "--", sys.executable, "-m", "liver_hpc", *words)
        done = self.cluster.attempt(command_line(self.cluster.name, *line), 60.0)
        assert done.returncode == EXIT_BAD_INPUT, done.stdout + done.stderr
        return done.stderr

    def stop(self, *options: str) -> str:
        """Ends the run by `liver stop`; what that says."""
        said = self.liver("stop", str(self.directory.path), *options)
        assert "stopped" in said, said
        return said

    def resume(self) -> str:
        """By `liver submit --resume`; what that says."""
        words = ("submit", "--no-follow", "--resume", str(self.directory.path))
        said = self.liver(*words, limit_s=120.0)
        self.job = self.directory.job_id() or ""
        return said

    # ---- waiting

    def wait(self, what: str, until: Callable[[Status], bool], limit_s: float) -> Status:
        """The first status that satisfies `until`. Fails at once when the run has ended."""
        seen: Status = {}

        def holds() -> bool:
            seen.clear()
            seen.update(self.status)
            outcome = self.directory.outcome()
            assert outcome is None, f"waiting for {what}: {outcome}\n{tails(self.directory)}"
            return bool(seen) and until(seen)

        try:
            wait_for(holds, limit_s, what)
        except DeadlineError as error:
            raise AssertionError(f"{error}; {seen}\n{tails(self.directory)}") from error
        return seen

    def wait_workers(self, number: int, or_more: bool = False) -> Status:
        """Until so many train, no handoff is in progress, and some steps are done so."""
        since: list[int] = []

        def steady(status: Status) -> bool:
            workers = len(status["workers"])
            fits = workers == number or (or_more and workers > number)
            if not fits or status["handoff"] or status["loss"] is None:
                since.clear()
                return False
            since.append(status["step"])
            return bool(status["step"] >= since[0] + 3)

        return self.wait(f"{number} workers", steady, BOOT_S)

    def wait_steps(self, number: int) -> None:
        """Until so many more steps are done."""
        first = self.wait("a status", lambda status: True, BOOT_S)["step"]
        self.wait(f"{number} steps", lambda status: status["step"] >= first + number, 60.0)

    def wait_phase(self, *phases: str) -> Status:
        """Until a handoff is in one of these phases."""

        def there(status: Status) -> bool:
            return bool(status["handoff"]) and status["handoff"]["phase"] in phases

        return self.wait(f"{phases}", there, BOOT_S)

    def wait_notices(self, kind: str, number: int) -> list[NoticeRecord]:
        """Those of a kind, once so many are over."""
        try:
            wait_for(lambda: len(self.notices(kind)) >= number, 30.0, f"{number} notices: {kind}")
        except DeadlineError as error:
            raise AssertionError(f"{error}; {self.records().notices}\n{self.log()}") from error
        return self.notices(kind)

    def wait_log(self, text: str, limit_s: float = 60.0) -> None:
        """Until the coordinator's log has it."""
        try:
            wait_for(lambda: text in self.log(), limit_s, f"{text!r} in the log")
        except DeadlineError as error:
            raise AssertionError(f"{error}\n{tails(self.directory)}") from error

    # ---- what is known of it

    def nodes_of(self, allocation: str) -> list[str]:
        """Nodes that came with allocations whose names begin like this."""
        lines = [line.split() for line in self.status.get("nodes", ())]
        return [name for name, held_by, *_ in lines if held_by.startswith(f"({allocation}")]

    @staticmethod
    def holds(status: Status, node: str) -> bool:
        return any(line.split()[0] == node for line in status["nodes"])

    def goes_on(self) -> bool:
        """Whether a coordinator has ended for the run to go on when its job is queued again."""
        last = self.directory.last_outcome()
        return last is not None and last.goes_on(self.directory.config())

    def speaker(self) -> str:
        """Which coordinator speaks for the run now; empty while there is none."""
        address = self.directory.coordinator()
        return f"{address.hostname}:{address.pid}" if address is not None else ""

    def log(self) -> str:
        """What its coordinators have noted."""
        path = self.directory.path / "logs" / "coordinator.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    def records(self) -> RunRecords:
        return read_run(self.directory.path)

    def notices(self, kind: str) -> list[NoticeRecord]:
        return [notice for notice in self.records().notices if notice.kind == kind]

    def attempts(self, outcome: str) -> list[ReconfigurationRecord]:
        return [r for r in self.records().reconfigurations if r.outcome == outcome]

    def processes(self) -> list[psutil.Process]:
        """Those of all its nodes: namespaces hide nothing from outside. Not the feed."""
        found = processes_of(self.directory) + processes_of(RunDirectory(self.file))
        return [each for each in found if FEED not in _words(each)]

    def kill_all(self) -> None:
        """SIGKILL of whatever there is of it."""
        for each in self.processes():
            with suppress(psutil.NoSuchProcess):
                each.kill()

    def kill_coordinator(self, and_its_parent: bool = True) -> None:
        """SIGKILL, as from a kernel that has run out of memory; of what would start another one,
        too."""
        known = [each for each in self.processes() if _coordinates(each)]
        pids = {each.pid for each in known}
        for each in known:
            with suppress(psutil.NoSuchProcess):
                if and_its_parent or each.ppid() in pids:
                    each.kill()

    def nothing_is_left(self, limit_s: float = GONE_S) -> None:
        """No job, allocation, step or process; the feed, which is the test's own, goes, too."""
        self.close()

        def left() -> list[str]:
            found = [f"job {line}" for line in self.jobs.of_runs()]
            found += [f"step {line}" for line in self.jobs.steps() if "liver" in line]
            return found + [str(process) for process in self.processes()]

        try:
            wait_for(lambda: not left(), limit_s, "the run to be gone")
        except DeadlineError as error:
            raise AssertionError(f"{error}: {left()}\n{tails(self.directory)}") from error


@contextmanager
def slurm_run(
    cluster: SlurmCluster,
    name: str,
    burst_nodes: int = 1,
    more: dict[str, Any] | None = None,
    health_check: str | None = None,
    **slurm: Any,
) -> Iterator[SlurmRun]:
    """A run that is not submitted yet: two nodes of its own, and so many burst nodes.

    more: further sections of the run file. `slurm` are keys of its section `cluster.slurm`.
    """
    most = 2 + burst_nodes
    burst = {**BURST, "max_nodes": burst_nodes} if burst_nodes else None
    section = {**SLURM, "burst": burst, **slurm}
    sections = {
        "workers": {"initial": 2, "max": most},
        "layouts": {workers: layouts for workers, layouts in LAYOUTS.items() if workers <= most},
        "cluster": {"kind": "slurm", "workers_per_node": 1, "timeout_min": 20, "slurm": section},
    }
    sections["cluster"]["health_check"] = health_check
    run = SlurmRun(cluster, name, sections | (more or {}))
    try:
        yield run
    finally:
        run.close()
        empty(cluster)


def empty(cluster: SlurmCluster) -> None:
    """Ends what is left on a cluster, as that of a test that failed."""
    ping = cluster.attempt(command_line(cluster.name, "exec", "--", "scontrol", "ping"), 30.0)
    if ping.returncode != 0:
        cluster.testbed("start-controller")
    cluster.run("scancel", "--user=root")
    wait_for(lambda: not cluster.run("squeue", "-h"), 2 * GONE_S, f"{cluster.name} to be empty")


def _words(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return " ".join(process.cmdline())
    return ""


def _coordinates(process: psutil.Process) -> bool:
    words = _words(process)
    return "submitit.core._submit" in words or "liver_hpc run" in words


def each_step_once(records: RunRecords) -> list[float]:
    """The losses of a run in which no step was missed or done twice."""
    assert [record.step for record in records.steps] == list(range(len(records.steps)))
    return [record.loss for record in records.steps]


def longest_gap_s(records: RunRecords) -> float:
    """The longest time between the end of a step and the start of the next one."""
    pairs = zip(records.steps, records.steps[1:], strict=False)
    return max((later.started_s - earlier.ended_s for earlier, later in pairs), default=0.0)
