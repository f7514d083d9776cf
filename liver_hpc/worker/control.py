"""A worker's boot, its control channel, and the threads that serve it."""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import NoReturn

from liver_hpc.clock import SystemClock, process_age_s
from liver_hpc.errors import DeadlineError, ProtocolError, told_of
from liver_hpc.handoff.session import Session
from liver_hpc.host.interfaces import address_towards
from liver_hpc.host.process import quiet_thread
from liver_hpc.layout.coordinates import Coordinate, Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.recipes.specs import load_workers_recipe
from liver_hpc.rendezvous.channel import ChannelClosed
from liver_hpc.rendezvous.local import Way, WorkersEnd
from liver_hpc.run.directory import RunDirectory
from liver_hpc.worker.holder import LeftWorld
from liver_hpc.worker.standing import main_thread_stands
from liver_hpc.worker.trainer import Trainer
from liver_hpc.world import draws, megatron, rehearsed
from liver_hpc.world.code import code_of
from liver_hpc.world.context import FAILURES, WorkerContext
from liver_hpc.world.device import Device
from liver_hpc.world.groups import install_sentinel
from liver_hpc.world.network import Network
from liver_hpc.world.store import ControlStore
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_AGENT_GONE = 4
"""Exit status of a worker whose agent has closed its line."""

_CLOCK = SystemClock()
"""A warm process's for all that it forks: their times are compared, and the machine's clock may
have been set, or the machine have slept, since the first of them."""


class Worker:
    """Made, it has booted: alone, before it meets anybody. Once told who it is, its main thread
    trains while a control thread listens.

    Raises LiverError for a recipe whose model cannot be built or moved.
    """

    _worker: int
    _line: WorkersEnd
    _trainer: Trainer

    def __init__(self, run_directory: Path, layout: Layout, device: Device) -> None:
        """Opens the data and rehearses one step of the coming layout. Not collective."""
        self._clock = clock = _CLOCK
        imported_s, started_s = process_age_s(), clock.now_s()
        self._run = RunDirectory(run_directory)
        self._config = config = self._run.config()
        self._device = device
        self._recipe = recipe = load_workers_recipe(config, run_directory)
        recipe.open(run_directory)
        opened_s = clock.now_s()
        # Megatron asks for a rank before the worker id is known.
        install_sentinel(0)
        megatron.prepare_process(config.train.seed)
        self._worker = 0
        self._rehearse(layout, stage=0)
        # What boot made stays as long as the process: later collections need not walk it.
        gc.freeze()
        self._ways_in: queue.Queue[m.Begin | m.Refill | m.Rehearse | Session] = queue.Queue()
        self._booted_s = clock.now_s()
        self._timings_s = {
            "import": imported_s,
            "open": opened_s - started_s,
            "rehearsal": self._booted_s - opened_s,
        }

    def serve(self, worker: int, coordinator: str, line: WorkersEnd) -> NoReturn:
        """Serves the coordinator, on the host `coordinator`, at the other end of the line until it
        says Exit, which ends the process."""
        self._worker, self._line = worker, line
        install_sentinel(worker)
        self._trainer = Trainer(
            WorkerContext(
                worker=worker,
                config=self._config,
                recipe=self._recipe,
                device=self._device,
                network=Network(self._device, address_towards(coordinator)),
                clock=self._clock,
                send=self._send,
                open_store=self._open_store,
                checkpoints=self._run.checkpoints_place,
            )
        )
        now_s = self._clock.now_s()
        self._send(
            m.Hello(
                worker=worker,
                pid=os.getpid(),
                host=socket.gethostname(),
                booted_s=now_s,
                boot_timings_s=self._timings_s | {"meet": now_s - self._booted_s},
                code=code_of(self._recipe, self._device),
            )
        )
        quiet_thread(self._serve_control, "control")
        self._train()
        # Upon the coordinator's Exit the control thread ends the process.
        limit_s = self._config.deadlines.release_s + self._config.deadlines.word_s
        threading.Event().wait(limit_s)
        log.error("waited %g s for the coordinator's Exit", limit_s)
        leave(EXIT_FAILED)

    def _train(self) -> None:
        """Returns once this worker has nothing to train any more; a world that has failed, as a
        peer's end has it fail, is let go for the next one."""
        while True:
            left, why = None, ""
            try:
                self._come_in()
                self._trainer.train()
            except LeftWorld as error:
                log.info("%s", error)
                left = error.generation
            except FAILURES as error:
                if not self._trainer.can_let_go:
                    raise
                log.info("the world has failed", exc_info=error)
                why = told_of(error)
            else:
                return
            # No traceback holds any more what is let go.
            if left is None:
                self._trainer.let_go(why)
            elif not self._trainer.linger(left):
                return

    def _come_in(self) -> None:
        """Returns once this worker has a world; a joiner whose attempt was called off waits for the
        next one. Without a deadline: the coordinator has one for every phase, and ends us when it
        passes."""
        while True:
            match self._ways_in.get():
                case m.Begin() as begin:
                    self._trainer.begin(begin)
                    return
                case m.Refill() as refill:
                    self._trainer.refill(refill)
                    return
                case m.Rehearse() as rehearse:
                    self._rehearse_all(Layout.parse(rehearse.layout))
                case session:
                    if self._trainer.join(session):
                        return

    def _rehearse_all(self, layout: Layout) -> None:
        """Rehearses the seats of a layout that differ, until somebody wants this worker."""
        for stage in sorted({0, layout.pp // 2, layout.pp - 1}):
            if self._ways_in.empty():
                self._rehearse(layout, stage)
                log.info("rehearsed stage %d of %s", stage, layout)

    def _rehearse(self, layout: Layout, stage: int) -> None:
        """Rehearses a step of a stage's first seat. Not collective: nobody has the other seats."""
        handoff = self._config.handoff
        if not rehearsed.wanted(handoff, self._device.torch_device):
            return
        seat = layout.rank(Coordinate(0, stage, 0))
        workers = (self._worker if rank == seat else -1 - rank for rank in range(layout.workers))
        rank_map = RankMap(layout, tuple(workers))
        world = World(self._recipe, rank_map, self._worker, generation=-1, device=self._device)
        with draws.only_of_torch("as it computes, or reads samples"):
            world.warm_up(handoff.warm_up_again)
        world.close()
        self._device.return_free_memory()

    def _open_store(self) -> ControlStore:
        return ControlStore(self._line.ask, self._config.deadlines.prepare_s)

    def _send(self, message: m.FromWorker) -> None:
        self._line.send(message, Way.LATER if isinstance(message, m.Progress) else Way.ONCE)

    def _serve_control(self) -> None:
        """The control thread; a worker that is out of its agent's sight must not train on."""
        try:
            while True:
                self._listen()
        except ChannelClosed as error:
            log.error("the agent is gone: %s", error)
            leave(EXIT_AGENT_GONE)
        except Exception:
            log.exception("the control thread failed")
            leave(EXIT_FAILED)

    def _listen(self) -> None:
        """Routes a message, and ends the process when told to; a heartbeat while there is none, for
        a machine may vanish without closing its sockets."""
        try:
            message = self._line.receive(self._config.deadlines.heartbeat_s / 4)
        except DeadlineError:
            stands, waits = main_thread_stands(self._device)
            beat = m.Heartbeat(
                worker=self._worker,
                step=self._trainer.step,
                stands=stands,
                waits=waits,
                forward=self._trainer.forward_times(),
            )
            self._line.send(beat, Way.LATER)
            return
        if isinstance(message, m.Exit):
            log.info("exit: %s", message.reason)
            leave(0)
        elif isinstance(message, m.Stop):
            self._trainer.ask_to_stop(message)
        elif isinstance(message, m.Proceed):
            self._trainer.proceed.set()
        elif isinstance(message, m.Arm | m.Boundary | m.Verdict | m.Abort | m.Resume):
            session = self._trainer.session
            if session is not None and session.generation == message.generation:
                session.deliver(message)
        elif isinstance(message, m.Prepare):
            session = self._trainer.open_session(message)
            if not session.is_source:
                self._ways_in.put(session)
        elif isinstance(message, m.Halt):
            self._trainer.halt(message)
        elif isinstance(message, m.Begin | m.Refill | m.Rehearse):
            self._ways_in.put(message)
        else:
            raise ProtocolError(f"worker {self._worker}: unexpected {message.type}")


def leave(status: int) -> NoReturn:
    """Ends the process at once; neither blocked collectives nor native threads hold it up."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)
