"""One launch of an agent: its workers boot, it meets the coordinator for them, they work, they end.

Nothing here waits. What is to be waited for is registered with the agent's selector, or done in a
thread whose news the agent brings back; `look` then says what follows from what has happened.
"""

from __future__ import annotations

import logging
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from liver_hpc.clock import Clock, Deadline
from liver_hpc.cluster.launcher import EXIT_BOOT
from liver_hpc.config.schema import DeadlineSection
from liver_hpc.errors import LiverError, MeetingError
from liver_hpc.host.child import kill_at_last
from liver_hpc.host.warm import WarmProcess
from liver_hpc.node.workers import BootError, NodeWorkers, WorkerPlan
from liver_hpc.protocol.messages import WorkerEnded
from liver_hpc.rendezvous.base import Answer, Identity
from liver_hpc.rendezvous.local import Said
from liver_hpc.rendezvous.mpi.joiner import RendezvousLost, StuckInMpi, joiner_process, meet
from liver_hpc.rendezvous.mpi.process import MpiProcess

EXIT_FAILED = 1
"""The agent itself failed; its log says how."""
EXIT_STUCK = 81
"""A call of MPI's did not come back by the deadline."""
EXIT_RENDEZVOUS_LOST = 82
"""The rendezvous ended in the middle of the meeting."""
EXIT_NOT_MET = 88
"""The rendezvous refused the agent, or did not answer in time."""

_CODES = {BootError: EXIT_BOOT, StuckInMpi: EXIT_STUCK, RendezvousLost: EXIT_RENDEZVOUS_LOST}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Around:
    """What the launches of an agent share.

    in_thread: does something, of which the launch is told. tell: what the coordinator is to know.
    relay: what a worker says to the coordinator. cold: the warm process is of no use any more, and
    why.
    """

    agent: str
    limits: DeadlineSection
    secret: bytes
    clock: Clock
    selector: selectors.BaseSelector
    in_thread: Callable[[str, str, Callable[[], Answer]], None]
    tell: Callable[[WorkerEnded], None]
    relay: Callable[[int, Said], None]
    cold: Callable[[str], None]


class Launch:
    """From start to end. `error` says why its workers never got to work."""

    def __init__(self, plan: WorkerPlan, around: Around) -> None:
        self.plan = plan
        self.error = ""
        self._around = around
        self.workers = NodeWorkers(
            plan, around.selector, self._worker_ended, around.relay, around.cold
        )
        self._joiner: MpiProcess | None = None  # once its workers are started
        self._meets = False
        self._met = False
        self._code: int | None = None  # once it is to end: where that is not its workers' own
        boot_s = around.limits.boot_s
        self._deadline: Deadline | None = Deadline.after(around.clock, boot_s, "workers to boot")

    # ---- what the agent does with it

    @property
    def waits_to_start(self) -> bool:
        return self._joiner is None and self._code is None

    def start(self, warm: WarmProcess | None) -> None:
        """Starts its workers, and beside them who is to meet for them. Raises LiverError."""
        try:
            self.workers.start(warm)
            self._joiner = joiner_process()
        except OSError as error:  # no descriptor, or no directory for logs
            raise LiverError(f"launch {self.plan.launch}: {error}") from error

    def remaining_s(self) -> float | None:
        """How long there is nothing to look at, unless something happens."""
        return None if self._deadline is None else self._deadline.remaining_s()

    def look(self) -> int | None:
        """Goes on as far as it can; the exit code once nothing of it runs. Raises BootError."""
        if self._code is not None:
            return self._code if self._ended() else None
        if not self._meets:
            self._look_at_boot()
        elif self._met and self.workers.all_over():
            return self.end(0.0)
        return None

    def met(self, news: Answer | LiverError) -> None:
        """What has come of the meeting. Raises LiverError where it failed."""
        if self._code is not None:
            return  # it ends
        if isinstance(news, LiverError):
            raise news
        log.info("met the rendezvous: workers %s", list(news.worker_ids))
        self._met = True
        self.workers.hand_out(news)

    def fail(self, error: LiverError) -> None:
        """It cannot go on; nothing new to one that ends already."""
        if self._code is not None:
            return
        log.error("%s", error)
        self.error = str(error)
        other = EXIT_NOT_MET if isinstance(error, MeetingError) else EXIT_FAILED
        self.stop(_CODES.get(type(error), other))

    def stop(self, code: int, at_once: bool = False) -> None:
        """It ends with this code, unless it is to end with another one already."""
        if self._code is None:
            self.workers.tell_to_end()
            self._code = code
        limit_s = 0.0 if at_once else self._around.limits.exit_s
        self._deadline = Deadline.after(self._around.clock, limit_s, "workers to end")

    def end(self, exit_s: float) -> int:
        """Its exit code; nothing of it runs any more but what is stuck in the kernel. Waits, for
        at most `exit_s`."""
        self.workers.end(exit_s)
        if self._joiner is not None:
            kill_at_last(self._joiner)
        return self.workers.worst() if self._code is None else self._code

    # ---- on its way

    def _look_at_boot(self) -> None:
        joiner = self._joiner
        late = list(range(len(self.plan.slots))) if joiner is None else self.workers.booting()
        if joiner is not None and not late:
            log.info("all %d workers have booted", len(self.plan.slots))
            self._meets, self._deadline = True, None
            self._around.in_thread(self.plan.launch, "meet", partial(self._meet, joiner))
        elif self._deadline is not None and self._deadline.expired():
            raise BootError(
                self.plan.launch,
                f"waited {self._deadline.limit_s:g} s for workers {late} of agent "
                f"{self.plan.launch} to boot; see {self.plan.log_of(late[0])}",
            )

    def _meet(self, joiner: MpiProcess) -> Answer:
        plan, around = self.plan, self._around
        identity = Identity(agent=plan.launch, host=socket.gethostname(), workers=len(plan.slots))
        meet_s = around.limits.meet_s
        turn_s = around.limits.boot_s + meet_s  # at a start all agents may come at once
        return meet(joiner, plan.run_directory, identity, around.secret, turn_s, meet_s)

    def _ended(self) -> bool:
        assert self._deadline is not None
        living = self.workers.living()
        if living and not self._deadline.expired():
            return False
        limit_s, polite = self._deadline.limit_s, self.workers.polite.name
        for worker in living if limit_s else ():
            log.warning("%s has not ended %g s after %s", worker, limit_s, polite)
        self.end(0.0)
        return True

    def _worker_ended(self, worker: int, how: str) -> None:
        self._around.tell(WorkerEnded(agent=self._around.agent, worker=worker, how=how))
