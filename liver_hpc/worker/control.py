"""A worker's boot, its control channel, and the threads that serve it."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import queue
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from liver_hpc.clock import SystemClock, process_age_s
from liver_hpc.config.load import load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.errors import ProtocolError
from liver_hpc.handoff.release import return_free_memory
from liver_hpc.handoff.session import WorkerContext
from liver_hpc.host.interfaces import address_towards
from liver_hpc.layout.coordinates import Layout, RankMap
from liver_hpc.protocol import messages as m
from liver_hpc.recipes.base import Recipe, load_recipe
from liver_hpc.rendezvous.channel import Channel, ChannelClosed, connect
from liver_hpc.run.directory import RunDirectory
from liver_hpc.run.secret import read_secret
from liver_hpc.worker.trainer import LeftWorld, Trainer
from liver_hpc.world import megatron
from liver_hpc.world.device import Device, Network
from liver_hpc.world.groups import install_sentinel
from liver_hpc.world.store import ControlStore
from liver_hpc.world.world import World

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_COORDINATOR_GONE = 4
"""Exit status of a worker whose control channel closed."""


@dataclass(frozen=True)
class Booted:
    """What a worker makes alone, before it meets anybody.

    timings_s: where the time from the start of the process to booted_s went.
    """

    run_directory: Path
    config: RunConfig
    recipe: Recipe
    device: Device
    clock: SystemClock
    booted_s: float
    timings_s: dict[str, float]


def boot(run_directory: Path, layout: Layout, device: Device) -> Booted:
    """Opens the data and rehearses one step of the coming layout. Not collective.

    Raises LiverError for a recipe whose model cannot be built or moved.
    """
    clock = SystemClock()
    imported_s, started_s = process_age_s(), clock.now_s()
    config = load_run(run_directory / "run.yaml")
    recipe = load_recipe(config)
    recipe.open(run_directory)
    opened_s = clock.now_s()
    # Megatron asks for a rank before the worker id is known.
    install_sentinel(0)
    megatron.prepare_process(config.train.seed)
    if config.handoff.warm_up:
        rank_map = RankMap(layout, tuple(range(layout.workers)))
        rehearsal = World(recipe, rank_map, 0, generation=-1, device=device)
        rehearsal.warm_up()
        rehearsal.close()
    return_free_memory()
    # What boot made stays as long as the process: later collections need not walk it.
    gc.freeze()
    booted_s = clock.now_s()
    timings_s = {
        "import": imported_s,
        "open": opened_s - started_s,
        "rehearsal": booted_s - opened_s,
    }
    return Booted(run_directory, config, recipe, device, clock, booted_s, timings_s)


class Worker:
    """The worker after its boot: the main thread trains while a control thread listens."""

    def __init__(self, booted: Booted, worker: int, address: tuple[str, int]) -> None:
        self._worker = worker
        self._booted = booted
        self._deadlines = booted.config.deadlines
        self._address = address
        self._secret = read_secret(booted.run_directory / "secret")
        self._channel = self._connect("the coordinator's control channel")
        self._first: queue.Queue[m.Begin | m.Prepare] = queue.Queue()
        install_sentinel(worker)
        self._trainer = Trainer(
            WorkerContext(
                worker=worker,
                config=booted.config,
                recipe=booted.recipe,
                device=booted.device,
                network=Network(booted.device, address_towards(address[0])),
                clock=booted.clock,
                send=self._send,
                open_store=self._open_store,
                checkpoints=RunDirectory(booted.run_directory).checkpoints_path,
            )
        )

    def run(self) -> NoReturn:
        """Serves until the coordinator says Exit, which ends the process."""
        now_s = self._booted.clock.now_s()
        self._send(
            m.Hello(
                worker=self._worker,
                pid=os.getpid(),
                host=socket.gethostname(),
                booted_s=now_s,
                boot_timings_s=self._booted.timings_s | {"meet": now_s - self._booted.booted_s},
            )
        )
        threading.Thread(target=self._serve_control, name="control", daemon=True).start()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
        # Without a deadline: the coordinator has one for every phase, and ends us when it passes.
        first = self._first.get()
        try:
            if isinstance(first, m.Begin):
                self._trainer.begin(first)
            else:
                self._trainer.join()
            self._trainer.train()
        except LeftWorld as left:
            log.info("%s", left)
        self._await_exit()

    def _await_exit(self) -> NoReturn:
        """Waits for the coordinator's Exit, upon which the control thread ends the process."""
        limit_s = self._deadlines.release_s + self._deadlines.exit_s
        threading.Event().wait(limit_s)
        log.error("waited %g s for the coordinator's Exit", limit_s)
        leave(EXIT_FAILED)

    def _connect(self, waits_for: str) -> Channel:
        return connect(self._address, self._secret, self._deadlines.control_s, waits_for)

    def _open_store(self) -> ControlStore:
        channel = self._connect("the coordinator's store")
        return ControlStore(channel, self._deadlines.prepare_s)

    def _send(self, message: m.FromWorker) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed as error:
            self._coordinator_gone(error)

    def _coordinator_gone(self, error: ChannelClosed) -> NoReturn:
        log.error("the coordinator is gone: %s", error)
        leave(EXIT_COORDINATOR_GONE)

    def _beat(self) -> None:
        """Sends heartbeats: a machine may vanish without closing its sockets."""
        pause = threading.Event()
        while not pause.wait(self._deadlines.heartbeat_s / 4):
            self._send(m.Heartbeat(worker=self._worker, step=self._trainer.step))

    def _serve_control(self) -> None:
        """The control thread; a worker that no longer hears the coordinator must not train on."""
        try:
            self._listen()
        except Exception:
            log.exception("the control thread failed")
            leave(EXIT_FAILED)

    def _listen(self) -> None:
        """Routes every message, and ends the process when told to."""
        while True:
            try:
                message = self._channel.receive()
            except ChannelClosed as error:
                self._coordinator_gone(error)
            if isinstance(message, m.Exit):
                log.info("exit: %s", message.reason)
                leave(0)
            elif isinstance(message, m.Stop):
                self._trainer.ask_to_stop(message)
            elif isinstance(message, m.Proceed):
                self._trainer.proceed.set()
            elif isinstance(message, m.Arm | m.Verdict | m.Abort | m.Resume):
                session = self._trainer.session
                if session is not None and session.generation == message.generation:
                    session.deliver(message)
            elif isinstance(message, m.Prepare):
                session = self._trainer.open_session(message)
                if not session.is_source:
                    self._first.put(message)
            elif isinstance(message, m.Begin):
                self._first.put(message)
            else:
                raise ProtocolError(f"worker {self._worker}: unexpected {message.type}")


def leave(status: int) -> NoReturn:
    """Ends the process at once; neither blocked collectives nor native threads hold it up."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its file is on a disk that is full
            stream.flush()
    os._exit(status)
