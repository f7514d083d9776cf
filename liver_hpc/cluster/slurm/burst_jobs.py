"""Burst allocations as Slurm jobs: the requests of a BurstPolicy, submitted, watched, cancelled."""

from __future__ import annotations

import logging
import math
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from liver_hpc.clock import Clock
from liver_hpc.cluster.slurm.burst import BurstPolicy
from liver_hpc.cluster.slurm.commands import ControllerUnreachable, SlurmCommands, SlurmError
from liver_hpc.cluster.slurm.holdings import Allocation
from liver_hpc.cluster.slurm.reaper import SETTLE_S, cancel_all
from liver_hpc.cluster.slurm.replies import COMPLETING, JobInfo
from liver_hpc.cluster.slurm.script import BURST_SCRIPT, burst_options, burst_script
from liver_hpc.config.schema import BurstSection, RunConfig
from liver_hpc.host.child import Child, Command
from liver_hpc.run.epoch import newest_epoch
from liver_hpc.run.outcome import write_private_json

RECORD_FILE = "burst.json"
_SAVED_S = 60.0
"""What is noted of held jobs is never older."""
_LATE_S = 60.0
"""So long Slurm may take to carry out a request whose id never came."""
REJECTED_S = 1800.0
"""So long a node that has failed its health check is not asked for again."""

_NONE = BurstSection(partition="none", max_nodes=1)
"""In the place of a section that the run file has not; it is never opened."""

log = logging.getLogger(__name__)


class _Granted(BaseModel):
    """nodes: of a job that runs; since_s: for how long."""

    nodes: tuple[str, ...]
    since_s: float


class _Record(BaseModel):
    """burst.json: the name of the jobs that this coordinator asks for; what all coordinators of the
    run have used, of jobs that are over; those that run, as of `seen_s`."""

    job_name: str = ""
    node_hours: float = 0.0
    granted: dict[str, _Granted] = {}
    seen_s: float = 0.0

    @property
    def used_node_hours(self) -> float:
        """With those that ran when somebody last looked."""
        held = ((len(job.nodes), self.seen_s - job.since_s) for job in self.granted.values())
        return self.node_hours + sum(nodes * max(0.0, for_s) for nodes, for_s in held) / 3600

    @classmethod
    def read(cls, path: Path) -> _Record:
        """An empty one before there is a file, and for one that is damaged."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except ValidationError as error:
            log.warning("%s is ignored: %r", path, error)
            return cls()


class BurstJobs:
    """Used by the pool's watching thread alone, but for `want`.

    note: gets what an operator is to read. avoided: nodes that no request is to get; any thread may
    set it.
    """

    def __init__(
        self,
        config: RunConfig,
        commands: SlurmCommands,
        run_directory: Path,
        clock: Clock,
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._clock = clock
        self._rejected: dict[str, float] = {}  # nodes, and until when
        self._slurm = config.cluster.slurm
        self._burst = self._slurm.burst or _NONE
        self._slots = config.cluster.slots(self._burst)
        self._script = burst_script(config.cluster)
        self._commands = commands
        self._once = commands.once()
        self._run_directory = run_directory.absolute()
        self._record_path = run_directory / RECORD_FILE
        self.avoided: frozenset[str] = frozenset()
        self._earlier = _Record.read(self._record_path)
        self._nodes: dict[str, tuple[str, ...]] = {}  # of the jobs that run
        self._saved_s = -math.inf
        self.name = f"{self._run_directory.name}-burst-{secrets.token_hex(4)}"
        self.policy = BurstPolicy(
            self._burst,
            self._slots,
            clock,
            spent_node_hours=self._earlier.used_node_hours,
            shortest_min=math.floor(self._slurm.end_window_s / 60) + 1,
        )
        self._reaper: Child | None = None
        self._unsure_until_s = -math.inf  # Slurm may carry out a request whose id never came

    def open(self, adopt: bool) -> list[Allocation]:
        """Readies what the requests need. What a killed coordinator has asked for is cancelled, or,
        with `adopt`, goes on: what it held is returned, as it was noted; Slurm is not asked, and
        `observe` finds what has changed. Raises SlurmError, OSError."""
        script = self._run_directory / BURST_SCRIPT
        script.write_text(self._script, encoding="utf-8")
        script.chmod(0o700)
        held: list[Allocation] = []
        earlier = self._earlier
        if earlier.job_name and adopt:
            self.name = earlier.job_name
            self.may_come_late()
            self.policy.spent_node_hours = earlier.node_hours  # of those that are over
            for job, granted in earlier.granted.items():
                self.policy.granted(job, len(granted.nodes), granted.since_s)
                held.append(self._allocation(job, granted.nodes, None))
        elif earlier.job_name:
            self._commands.cancel_named(earlier.job_name)
        self.save()
        program = [sys.executable, "-P", "-m", "liver_hpc.cluster.slurm.reaper"]
        epoch = newest_epoch(self._run_directory)  # this coordinator's
        self._reaper = Child(
            Command(
                "the reaper of burst jobs",
                [*program, self.name, str(self._run_directory), str(epoch)],
                orphan_signal=None,
                stdin=subprocess.PIPE,
                log=self._run_directory / "logs" / "reaper.log",
                apart="session",
            )
        )
        return held

    def save(self) -> None:
        """Notes what has been used of the cap; a full disk must not cost a grant, or its end."""
        held = self.policy.held
        self._saved_s = self._clock.now_s()
        try:
            record = _Record(
                job_name=self.name,
                node_hours=self.policy.spent_node_hours,
                granted={
                    job: _Granted(nodes=self._nodes[job], since_s=grant.since_s)
                    for job, grant in held.items()
                    if job in self._nodes
                },
                seen_s=self._saved_s,
            )
            write_private_json(self._record_path, record.model_dump())
        except OSError as error:
            log.warning("%s: %s", self._record_path, error)

    def observe(self, jobs: Mapping[str, JobInfo]) -> list[Allocation]:
        """Takes in an answer about all pending requests; what was granted."""
        if (now_s := self._clock.now_s()) < self._unsure_until_s:
            jobs = {**jobs, **self._adopt()}
            self._unsure_until_s = min(self._unsure_until_s, now_s + _LATE_S)
        granted = []
        for job in list(self.policy.pending):
            info = jobs.get(job)
            if info is not None and info.ready:
                self.policy.granted(job, len(info.nodes))
                granted.append(self._allocation(job, info.nodes, info.ends_s))
            elif info is None or info.over:
                self.policy.ended(job, by_us=False)
                self._note(f"burst request {job} has ended without a grant")
            elif info.hopeless:
                self._once.cancel(job)
                self.policy.ended(job, by_us=False)
                self._note(f"burst request {job} was refused: {info.reason}")
        stale = self.policy.held and self._clock.now_s() - self._saved_s >= _SAVED_S
        if granted or stale:
            self.save()
        return granted

    def _allocation(self, job: str, nodes: tuple[str, ...], ends_s: float | None) -> Allocation:
        self._nodes[job] = nodes
        return Allocation(
            name=f"burst-{job}",
            job=job,
            nodes=nodes,
            slots=self._slots,
            gpus_per_node=self._burst.gpus_per_node,
            partition=self._burst.partition,
            burst=True,
            ends_s=ends_s,
        )

    def _adopt(self) -> dict[str, JobInfo]:
        """Requests that Slurm has, and this coordinator does not know."""
        known = self.policy.pending.keys() | self.policy.held.keys()
        found = {
            job: info
            for job, info in self._once.named(self.name).items()
            if job not in known and info.state != COMPLETING
        }
        for job in found:
            self.policy.submitted(job, self._burst.nodes_per_request)
            self._note(f"burst request {job} was taken after all")
        return found

    def may_come_late(self) -> None:
        """For a while after Slurm answers again, however long it is silent: a controller that was
        lost may also have forgotten that a request was withdrawn."""
        self._unsure_until_s = math.inf

    def ended(self, job: str, by_us: bool) -> None:
        """An allocation is no more; one that was no burst allocation is nothing here."""
        if job in self.policy.held:
            self.policy.ended(job, by_us)
            self._nodes.pop(job, None)
            self.save()

    def act(self) -> None:
        """Submits and cancels what the policy says. Raises ControllerUnreachable."""
        for job in self.policy.to_cancel():
            self._once.cancel(job)
            self.policy.ended(job, by_us=True)
        script, told = self._run_directory / BURST_SCRIPT, [str(self._run_directory)]
        for request in self.policy.to_submit():
            asked = burst_options(self._slurm, self._burst, request, self.name, self._run_directory)
            try:
                job = self._once.sbatch([*asked, *self._exclusion()], script, told)
            except ControllerUnreachable:
                self.may_come_late()
                raise
            except SlurmError as error:
                if error.code == 0:  # it is queued, whatever was printed
                    self.may_come_late()
                self.policy.refused()
                self._note(f"a request for {request.nodes} burst nodes was refused: {error}")
                return
            self.policy.submitted(job, request.nodes)
            log.info("asked for %d burst nodes: job %s", request.nodes, job)

    def reject(self, node: str) -> None:
        """The node is not well: no request gets it for REJECTED_S. From any thread."""
        # Another one: the thread that asks Slurm may be reading this.
        self._rejected = {**self._rejected, node: self._clock.now_s() + REJECTED_S}

    def _exclusion(self) -> list[str]:
        """sbatch's option for the nodes to avoid, and for those that the run file excludes."""
        now_s, rejected = self._clock.now_s(), self._rejected
        avoided = {*self.avoided, *(node for node, until_s in rejected.items() if now_s < until_s)}
        if not avoided:
            return []
        given = self._burst.options.get("exclude")
        return [f"--exclude={','.join([*sorted(avoided), *([str(given)] if given else [])])}"]

    def close(self) -> None:
        """Ends all burst jobs. Raises LiverError when that fails; the reaper does it then."""
        if self._reaper is None:
            return
        self.save()
        unsure = self._clock.now_s() < self._unsure_until_s
        cancel_all(self._commands, self.name, SETTLE_S if unsure else 0.0)
        self._reaper.end(0.0)
        self._reaper = None
