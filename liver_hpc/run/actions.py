"""What a run's core asks for; the coordinator performs it in order, once it is in the journal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from liver_hpc.layout.coordinates import Layout
from liver_hpc.protocol.actions import Send as Send
from liver_hpc.protocol.events import Requested
from liver_hpc.run.events import Seat
from liver_hpc.run.records import Row


@dataclass(frozen=True)
class LaunchAgent:
    """Start an agent with a worker for each slot; they rehearse `layout`."""

    agent: str
    seat: Seat
    layout: Layout


@dataclass(frozen=True)
class Launch:
    """Start these agents; where that fails, say so with `LaunchFailed`."""

    agents: tuple[LaunchAgent, ...]


@dataclass(frozen=True)
class StartAgent:
    """Start an agent without a launch, for those that come, unless one stays on the node."""

    agent: str
    node: str


@dataclass(frozen=True)
class Admit:
    """An agent at the rendezvous is expected; its workers get these ids."""

    agent: str
    workers: tuple[int, ...]


@dataclass(frozen=True)
class TurnAway:
    """An agent at the rendezvous is not expected."""

    agent: str
    reason: str


@dataclass(frozen=True)
class EndAgent:
    """Ask an agent to end its workers and itself."""

    agent: str
    reason: str


@dataclass(frozen=True)
class KillAgent:
    """End an agent by force: its time to end by itself, if it had any, is over."""

    agent: str


@dataclass(frozen=True)
class Disconnect:
    """Close a worker's channel: the run knows it no longer."""

    worker: int


@dataclass(frozen=True)
class Answer:
    """The reply to the operator's request `number`. stops_within_s: of one to stop, how long
    that may take."""

    number: int
    ok: bool
    text: str
    stops_within_s: float | None = None


@dataclass(frozen=True)
class WantWorkers:
    """How many workers the run could use on burst nodes, held or not."""

    workers: int


@dataclass(frozen=True)
class GiveBack:
    """No process of the run is on the node any more."""

    node: str


@dataclass(frozen=True)
class Avoid:
    """An operator wants the run off this node."""

    node: str


@dataclass(frozen=True)
class Readmit:
    """The operator wants the run off this node no longer."""

    node: str


@dataclass(frozen=True)
class ForgetGeneration:
    """No group of this generation's world is built from the store any more."""

    generation: int


@dataclass(frozen=True)
class Remember:
    """What a restart is to know; see `events.Memory`."""

    ceiling: int | None
    drained: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """One row of a table of the metrics."""

    row: Row


@dataclass(frozen=True)
class RecordAll:
    """Rows of one table of the metrics, of many workers or of their pairs: at least one."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class AttemptBegins:
    """A handoff is in progress from here on, until its row is recorded; notice_s: when the reason
    for it came."""

    requested: Requested
    notice_s: float


@dataclass(frozen=True)
class StepPhase:
    """The step that was just done was no undisturbed one; see `records.StepRecord.phase`."""

    phase: str


@dataclass(frozen=True)
class Note:
    """Something that an operator would want to see."""

    text: str


@dataclass(frozen=True)
class Log:
    """A line for the log alone."""

    text: str


class Ending(StrEnum):
    """How a start of the run ended."""

    STOPPED = "stopped"
    REQUEUE = "requeue"  # state on disk; the job is to be queued again
    RESTART = "restart"  # state on disk; begun again within the same job
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class End:
    """The run, or this start of it, is over."""

    state: Ending
    reason: str
    step: int


Action = (
    Launch
    | StartAgent
    | Admit
    | TurnAway
    | EndAgent
    | KillAgent
    | Send
    | Disconnect
    | Answer
    | WantWorkers
    | GiveBack
    | Avoid
    | Readmit
    | ForgetGeneration
    | Remember
    | Record
    | RecordAll
    | AttemptBegins
    | StepPhase
    | Note
    | Log
    | End
)
