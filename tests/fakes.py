"""In-memory twins for the tests: faults to order, and workers that follow a script."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NoReturn

import pytest

from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import LiverError
from liver_hpc.layout.coordinates import RankMap
from liver_hpc.layout.tensors import EXP_AVG, PARAMETER, ModelSpec, TensorSpec
from liver_hpc.protocol import messages as m
from liver_hpc.protocol.attempt import Phase
from liver_hpc.recipes.base import NoOptions, Recipe
from liver_hpc.report.store import RecordsFold
from liver_hpc.run.entries import Entry, Event, decode, encode
from liver_hpc.run.epoch import Epoch
from liver_hpc.run.events import JournalFailed
from liver_hpc.run.journal import Journal, JournalNews, Written
from liver_hpc.run.records import (
    NoticeRecord,
    ReconfigurationRecord,
    RunRecords,
    StepRecord,
    StragglerRecord,
)

FULL_DIGEST = 0x1234_5678_9ABC_DEF0
WRONG_DIGEST = "000000ff"
"""How the digest begins that a worker gets wrong: each in its own way."""


@contextmanager
def threads_refused(name: str = "") -> Iterator[None]:
    """No thread can be started meanwhile whose name begins so."""
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        begin(thread)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield


def fewer(limit: int) -> int:
    """Than a limit of `resource`, and more than a test needs."""
    return 60_000 if limit == resource.RLIM_INFINITY else limit - 1


class Fault(StrEnum):
    DIE = "die"  # the process ends without a word
    FAIL = "fail"  # says Failed
    VOTE_NO = "vote no"
    WRONG_DIGEST = "wrong digest"
    SILENT = "silent"  # goes on living, answers nothing more


class FaultInjector:
    """Faults to happen, each once, when a worker reaches a phase."""

    def __init__(self) -> None:
        self._faults: dict[tuple[int, Phase], Fault] = {}

    def fail_at(self, worker: int, phase: Phase, fault: Fault = Fault.DIE) -> None:
        self._faults[worker, phase] = fault

    def take(self, worker: int, phase: Phase) -> Fault | None:
        return self._faults.pop((worker, phase), None)


@dataclass
class WorkerScript:
    """The messages of one worker, as a pure function of those it gets.

    What really takes training to happen (the boundary, the first step) happens at once.
    """

    worker: int
    faults: FaultInjector
    kept_groups: int = 1
    spec: str = "spec"
    buffers: tuple[m.ClassDigest, ...] = ()
    step: int = 0
    generation: int = -1
    source: RankMap | None = None
    target: RankMap | None = None
    world: RankMap | None = None
    world_generation: int = -1
    at_boundary: bool = False
    shared_groups: bool = False
    bounded: bool = False
    mute: bool = False
    dead: bool = False
    received: list[m.ToWorker] = field(default_factory=list)

    def receive(self, message: m.ToWorker) -> list[m.FromWorker]:
        self.received.append(message)
        if self.dead:
            return []
        if isinstance(message, m.Exit):
            self.dead = True
            return []
        answers = self._answer(message)
        return [] if self.mute or self.dead else answers

    def _answer(self, message: m.ToWorker) -> list[m.FromWorker]:
        match message:
            case m.Begin():
                self.world, self.world_generation = message.rank_map.rank_map(), message.generation
            case m.Prepare():
                self.generation, self.bounded = message.generation, message.bounded
                self.source, self.target = message.source.rank_map(), message.target.rank_map()
                return self._prepared()
            case m.Arm():
                self.shared_groups = message.shared_groups
                return self._stopped_at_boundary()
            case m.Boundary() if self.bounded:
                return self._transferred()
            case m.Verdict():
                self.step = message.scalars.step
                return self.first_step()
            case m.Abort():
                return [self.aborted_message(message.generation)]
            case m.Resume(rebuild_generation=int() as generation):
                self.world_generation = generation
            case m.Stop():
                return [m.Finished(worker=self.worker, step=self.step)]
        return []

    def _fault(self, phase: Phase) -> list[m.FromWorker] | None:
        """What a fault of this phase makes of the answer; None = no fault."""
        fault = self.faults.take(self.worker, phase)
        if fault is Fault.DIE:
            self.dead = True
            return []
        if fault is Fault.SILENT:
            self.mute = True
            return []
        if fault is Fault.FAIL:
            failed = m.Failed(worker=self.worker, generation=self.generation, reason="told to")
            return [failed]
        if fault is not None:
            return self._bad_vote(phase, fault)
        return None

    def _bad_vote(self, phase: Phase, fault: Fault) -> list[m.FromWorker]:
        vote = self._good_vote()
        if fault is Fault.VOTE_NO:
            return [vote.model_copy(update={"ok": False, "reason": "told to"})]
        side = "sent" if vote.sent else "received"
        first = getattr(vote, side)[0]
        values = f"{WRONG_DIGEST}{self.worker:08x}{first.values[16:]}"
        wrong = first.model_copy(update={"values": values})
        return [vote.model_copy(update={side: (wrong, *getattr(vote, side)[1:])})]

    def aborted_message(self, generation: int) -> m.Aborted:
        """Says whether it stood at the boundary, where it shares groups."""
        trains = self.source is not None and self.worker in self.source.workers
        rebuild = self.at_boundary and self.shared_groups and trains
        self.at_boundary = False
        return m.Aborted(worker=self.worker, generation=generation, rebuild=rebuild)

    def _peers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """To whom this worker sends, and from whom it receives: every worker of the source sends to
        every other of the target."""
        assert self.source is not None
        assert self.target is not None
        sends, gets = self.source.workers, self.target.workers
        to = tuple(w for w in gets if w != self.worker) if self.worker in sends else ()
        of = tuple(w for w in sends if w != self.worker) if self.worker in gets else ()
        return to, of

    def _prepared(self) -> list[m.FromWorker]:
        faulty = self._fault(Phase.PREPARE)
        if faulty is not None:
            return faulty
        prepared = m.Prepared(
            worker=self.worker,
            generation=self.generation,
            timings_s={"groups": 0.5},
            bytes_out=10,
            bytes_in=10,
            bytes_local=5,
            bytes_to=dict.fromkeys(self._peers()[0], 10),
            kept_groups=self.kept_groups,
        )
        return [prepared]

    def _stopped_at_boundary(self) -> list[m.FromWorker]:
        faulty = self._fault(Phase.ARMED)
        if faulty is not None:
            return faulty
        stopped: list[m.FromWorker] = []
        self.at_boundary = True
        if self.source is not None and self.worker in self.source.workers:
            scalars = m.ScalarState(
                step=self.step,
                consumed_samples=8 * self.step,
                optimizer_step=self.step,
                loss_scale=1.0,
                seed=1234,
            )
            stopped.append(
                m.AtBoundary(
                    worker=self.worker,
                    generation=self.generation,
                    scalars=scalars,
                    last_step_ended_s=100.0 + self.worker,
                )
            )
        return stopped if self.bounded else stopped + self._transferred()

    def _transferred(self) -> list[m.FromWorker]:
        faulty = self._fault(Phase.TRANSFER)
        return [self._good_vote()] if faulty is None else faulty

    def _good_vote(self) -> m.Vote:
        sent, received = (
            tuple(
                m.PairDigests(kinds=(kind,), peers=peers, values=f"{FULL_DIGEST:016x}" * len(peers))
                for kind in (PARAMETER, EXP_AVG)
                if peers
            )
            for peers in self._peers()
        )
        return m.Vote(
            worker=self.worker,
            generation=self.generation,
            ok=True,
            spec=self.spec,
            sent=sent,
            received=received,
            buffers=self.buffers,
            started_s=101.0 + self.worker,
        )

    def first_step(self) -> list[m.FromWorker]:
        assert self.source is not None
        assert self.target is not None
        faulty = self._fault(Phase.RELEASE)
        if faulty is not None:
            return faulty
        self.world, self.world_generation = self.target, self.generation
        if self.worker not in self.target.workers:
            return [self._released()]
        first_step = m.FirstStep(
            worker=self.worker,
            generation=self.generation,
            started_s=101.5 + self.worker,
            ended_s=102.5 + self.worker,
        )
        return [first_step, self._released()]

    def _released(self) -> m.Released:
        return m.Released(
            worker=self.worker,
            generation=self.generation,
            file_descriptors=20 + self.worker,
            resident_bytes=1000 + self.worker,
            released_s=103.0,
        )


class TinyRecipe(Recipe):
    """Two layers of one matrix each; has tensors, but nothing to train."""

    def __init__(self, options: Any, config: RunConfig) -> None:
        super().__init__(options, config)
        tensors = tuple(TensorSpec(f"layers.{n}.weight", (8, 4), 0) for n in range(2))
        self.spec = ModelSpec(
            tensors, {"pp1": (((0, 1),),), "pp2": (((0,),), ((1,),))}, parameter_bytes=4
        )

    def hidden_shape(self) -> tuple[int, ...]:
        return (1, 1, 4)

    def build(self, context: object) -> NoReturn:
        raise NotImplementedError

    def batch(self, step: int) -> Sequence[Any]:
        return self.sample_numbers(step)

    def loss(self, model: object, samples: Sequence[Any]) -> NoReturn:
        raise NotImplementedError


def tiny_run(**sections: Any) -> RunConfig:
    """A run of two workers that may become 1, 2 or 4; `sections` replace or add to it."""
    values: dict[str, Any] = {
        "name": "tiny",
        "recipe": "tests.fakes:TinyRecipe",
        "train": {"steps": 60, "global_batch": 8},
        "workers": {"initial": 2, "max": 4},
        "layouts": {
            1: [{}],
            2: [{"dp": 2}, {"tp": 2}, {"pp": 2}],
            4: [{"tp": 2, "dp": 2}],
            8: [{"dp": 8}],
        },
    }
    return RunConfig.model_validate({**values, **sections})


def tiny_recipe(config: RunConfig) -> TinyRecipe:
    return TinyRecipe(NoOptions(), config)


class MemoryJournal(Journal):
    """A journal without a disk: `fail` and `recover` are what a disk does."""

    def __init__(self, tell: Callable[[JournalNews], None]) -> None:
        self._tell = tell
        self.error = ""
        self._closed = False
        self._lines: list[bytes] = []

    @property
    def entries(self) -> list[Entry]:
        """All that was appended, as a reader would get it."""
        return [*decode(self._lines, "memory, line")]

    def append(
        self, at_s: float, event: Event, actions: Sequence[Event] = (), said: int = 0
    ) -> int:
        if self._closed:
            raise LiverError(f"the journal is closed: {event.get('type')} came too late")
        number = len(self._lines)
        self._lines.append(encode(number, at_s, event, actions, said))
        if not self.error:
            self._tell(Written(number))
        return number

    def fail(self, reason: str) -> None:
        """From now on nothing is written."""
        self.error = reason
        self._tell(JournalFailed(reason))

    def recover(self) -> None:
        """All that waits is written."""
        self.error = ""
        self._tell(Written(len(self._lines) - 1))

    def close(self, limit_s: float) -> None:
        self._closed = True


class JournalRecords:
    """What a journal in memory holds, and some of its records."""

    def __init__(self) -> None:
        self.journal: MemoryJournal | None = None

    def open(self, tell: Callable[[JournalNews], None], epoch: Epoch) -> MemoryJournal:
        """For `Services.open_journal`."""
        self.journal = MemoryJournal(tell)
        return self.journal

    @property
    def entries(self) -> list[Entry]:
        return self.journal.entries if self.journal is not None else []

    @property
    def records(self) -> RunRecords:
        fold = RecordsFold()
        for entry in self.entries:
            fold.take(entry)
        return fold.records

    @property
    def steps(self) -> list[StepRecord]:
        return self.records.steps

    @property
    def reconfigurations(self) -> list[ReconfigurationRecord]:
        return self.records.reconfigurations

    @property
    def notices(self) -> list[NoticeRecord]:
        return self.records.notices

    @property
    def stragglers(self) -> list[StragglerRecord]:
        return self.records.stragglers
