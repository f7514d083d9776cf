"""A run of thousands of workers on one machine: a real coordinator, and simulated agents."""

from __future__ import annotations

import json
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from benchmarks.control.agents import Crossing, play
from benchmarks.gpt_spec import gpt_spec
from benchmarks.models import layout_table
from benchmarks.planner.cases import MODEL, NODE_WORKERS, nodes_of
from liver_hpc.clock import Deadline, SystemClock, poll_until
from liver_hpc.cluster.launcher import LaunchedAgent, Launcher
from liver_hpc.cluster.pool import NodePool
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.loop import Coordinator
from liver_hpc.coordinator.performer import Services
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import Layout
from liver_hpc.layout.placement import first_rank_map, place
from liver_hpc.layout.plan import transfer_plan
from liver_hpc.protocol.messages import Reply, ResizeRequest, StopRequest
from liver_hpc.recipes.base import NoOptions, Recipe
from liver_hpc.rendezvous.base import Decide, Identity, Refusal, Rendezvous
from liver_hpc.rendezvous.channel import connect
from liver_hpc.run.actions import LaunchAgent
from liver_hpc.run.entries import Event
from liver_hpc.run.epoch import Epoch, claim_epoch
from liver_hpc.run.events import Memory, Node, NodeGranted, PoolEvent
from liver_hpc.run.journal import Journal, JournalNews
from liver_hpc.run.lifecycle import TRAINING
from liver_hpc.run.outcome import COORDINATOR_FILE

TP, PPS = 8, (16, 8)
SECRET = b"c" * 32
LIMIT_S = 180.0
SAMPLED = 7


def layouts_of(workers: int) -> tuple[Layout, Layout]:
    """The two that handoffs change between."""
    first, second = (Layout(TP, pp, workers // (TP * pp)) for pp in PPS)
    return first, second


def crossing_of(workers: int) -> Crossing:
    """As the plans of some workers say, of a 405B model: to how many peers they send in the mean,
    and what."""
    model, people = gpt_spec(MODEL, PPS), range(workers)
    source, target = layouts_of(workers)
    before = first_rank_map(source, people, nodes_of(people))
    after = place(model, before, target, people, nodes_of(people))
    step = (workers - 1) / (SAMPLED - 1)
    plans = [transfer_plan(model, before, after, round(at * step)) for at in range(SAMPLED)]
    peers = [len({move.receiver for move in plan.sends}) for plan in plans]
    return Crossing(max(1, round(sum(peers) / len(peers))), model.kinds)


class _NoModel(Recipe):
    """Has a spec, and nothing to train."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__(NoOptions(), config)
        self.spec = gpt_spec(MODEL, PPS)

    def hidden_shape(self) -> tuple[int, ...]:
        return (1, 1, MODEL.hidden)

    def build(self, context: object) -> NoReturn:
        raise NotImplementedError

    def batch(self, step: int) -> Sequence[Any]:
        raise NotImplementedError

    def loss(self, model: object, samples: Sequence[Any]) -> NoReturn:
        raise NotImplementedError


class _Nodes(NodePool):
    def __init__(self, count: int) -> None:
        self._count = count

    def start(
        self, tell: Callable[[PoolEvent], None], adopt: Collection[str] | None = None
    ) -> None:
        for number in range(self._count):
            tell(NodeGranted(Node(f"n{number}", "machine", slots=NODE_WORKERS)))


class _Launched(LaunchedAgent):
    """An agent that is simulated: it ends when the coordinator says so."""

    def __init__(self, launch: LaunchAgent, begin: Callable[[LaunchAgent], None]) -> None:
        super().__init__(launch.agent)
        self._launch, self._begin = launch, begin

    def start(self) -> None:
        self._begin(self._launch)

    def adopt(self, host: str, pid: int) -> bool:
        return False

    def kill(self) -> None:
        self.exit_code = 0

    def join(self, limit_s: float) -> bool:
        return True


class _Meeting(Rendezvous):
    """Agents meet as soon as they are launched, without MPI, one after the other; what they are
    told goes to the process that plays them."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell
        self._launched: queue.SimpleQueue[LaunchAgent | None] = queue.SimpleQueue()

    def launch(self, launch: LaunchAgent) -> None:
        self._launched.put(launch)

    def start(self, answer: Decide) -> None:
        threading.Thread(target=self._meet_all, args=(answer,), daemon=True).start()

    def _meet_all(self, answer: Decide) -> None:
        while (launch := self._launched.get()) is not None:
            who = Identity(agent=launch.agent, host=launch.agent, workers=len(launch.seat.slots))
            verdict = answer(who)
            if isinstance(verdict, Refusal):
                raise LiverError(f"agent {launch.agent} was refused: {verdict.reason}")
            self._tell((launch.agent, verdict))

    def check(self) -> None:
        pass

    def close(self) -> None:
        self._launched.put(None)


class _WatchedJournal(Journal):
    """The real one; says when an attempt has ended."""

    ended: queue.SimpleQueue[Event]

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        for action in actions:
            if action["type"] == "record" and action["table"] == "reconfigurations":
                self.ended.put(action["row"])
        return super().append(at_s, event, actions, said)


@dataclass(frozen=True)
class Handoff:
    """took_s: from the operator's request until the run is idle again. cpu_s: of the coordinator's
    process meanwhile."""

    took_s: float
    cpu_s: float


class ManyWorkers:
    """A run of so many workers that trains.

    boot_s: from the start of the coordinator until training began. agents: how many there are.
    """

    def __init__(self, directory: Path, workers: int) -> None:
        self.agents = workers // NODE_WORKERS
        self._directory, self._workers = directory, workers
        directory.mkdir(exist_ok=True)
        self._layouts = layouts_of(workers)
        self._ended: queue.SimpleQueue[Event] = queue.SimpleQueue()
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        arguments = (theirs, SECRET, self.agents, crossing_of(workers))
        self._player = context.Process(target=play, args=arguments, daemon=True)
        self._player.start()
        self._coordinator = self._made()
        self._thread = threading.Thread(target=self._coordinator.run, daemon=True)
        began_s = time.perf_counter()
        self._thread.start()
        late = Deadline.after(SystemClock(), LIMIT_S, f"{workers} workers to train")
        poll_until(lambda: self._coordinator.core.state is TRAINING, late)
        self.boot_s = time.perf_counter() - began_s
        where = json.loads((directory / COORDINATOR_FILE).read_text())
        self._port: int = where["port"]
        address = (where["host"], self._port)
        self._operator = connect(address, SECRET, LIMIT_S, "the coordinator")

    def _made(self) -> Coordinator:
        config = RunConfig.model_validate(
            {
                "name": "control",
                "recipe": "nobody:imports",
                "train": {"steps": 10**6, "global_batch": 4 * self._layouts[1].dp},
                "workers": {"initial": self._workers, "max": self._workers},
                "layouts": layout_table(self._layouts),
                "checkpoint": {"every_steps": None},
                "deadlines": {"exit_s": 5.0},
            }
        )
        meeting = _Meeting(self._line.send)
        services = Services(
            clock=SystemClock(),
            recipe=_NoModel(config),
            launcher=Launcher(lambda new: [_Launched(one, meeting.launch) for one in new]),
            rendezvous=meeting,
            pool=_Nodes(self.agents),
            open_journal=self._open_journal,
        )
        epoch = claim_epoch(self._directory)
        return Coordinator(config, epoch, SECRET, services, Control(), Memory())

    def _open_journal(self, tell: Callable[[JournalNews], None], epoch: Epoch) -> Journal:
        journal = _WatchedJournal(self._directory / "journal.jsonl", tell, epoch, 0)
        journal.ended = self._ended
        return journal

    def handoff(self) -> Handoff:
        """To the other layout. Raises LiverError where it does not succeed."""
        self._layouts = self._layouts[::-1]
        process = psutil.Process()
        began_s, used_s = time.perf_counter(), sum(process.cpu_times()[:2])
        self._ask(ResizeRequest(layout=str(self._layouts[0])))
        try:
            row = self._ended.get(timeout=LIMIT_S)
        except queue.Empty:
            raise LiverError(f"waited {LIMIT_S:g} s for the handoff to end") from None
        if row["outcome"] != "completed":
            raise LiverError(f"the handoff to {self._layouts[0]}: {row['detail']}")
        took_s, cpu_s = time.perf_counter() - began_s, sum(process.cpu_times()[:2]) - used_s
        return Handoff(took_s, cpu_s)

    def sockets(self) -> int:
        """Connections to the coordinator's port but for the operator's."""
        mine = psutil.Process().net_connections("tcp")
        ours = [one for one in mine if one.laddr.port == self._port]
        return len([one for one in ours if one.status == psutil.CONN_ESTABLISHED]) - 1

    def _ask(self, request: ResizeRequest | StopRequest) -> None:
        self._operator.send(request)
        reply = self._operator.receive(LIMIT_S)
        if not isinstance(reply, Reply) or not reply.ok:
            raise LiverError(f"the coordinator said {reply}")

    def close(self) -> None:
        """The run's end."""
        self._ask(StopRequest())
        self._thread.join(LIMIT_S)
        self._operator.close()
        self._player.join(LIMIT_S)
        if self._thread.is_alive() or self._player.exitcode != 0:
            raise LiverError(f"waited {LIMIT_S:g} s for the end of the run")
