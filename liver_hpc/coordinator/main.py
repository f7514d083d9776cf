"""The coordinator: one event loop that starts a run, changes its shape, and ends it.

Connections are served in threads that only put events into the inbox; everything else happens in
the loop. `run_coordinator` is the process: it needs nothing but the run directory.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.launcher import Launcher
from liver_hpc.cluster.local import LocalLauncher
from liver_hpc.cluster.pool import FixedPool, NodePool
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.address import control_address
from liver_hpc.coordinator.journal_metrics import JournalMetrics
from liver_hpc.coordinator.loop import Coordinator
from liver_hpc.coordinator.services import Services
from liver_hpc.host.descriptors import raise_descriptor_limit
from liver_hpc.recipes.base import load_recipe
from liver_hpc.rendezvous.mpi.service import DeskPlace, MpiRendezvous
from liver_hpc.run.outcome import COORDINATOR_FILE, OUTCOME_FILE, Outcome, open_log
from liver_hpc.run.secret import create_secret, read_secret

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("liver-hpc", "torch", "megatron-core", "mpi4py", "numpy")
MOST_FRUITLESS_LIVES = 3
"""So often a run may begin again from a checkpoint without having done a step."""

Build = Callable[[RunConfig, Path, bytes], Services]


class Control:
    """How the process around a coordinator speaks to it; from any thread or signal handler.

    What is said before the coordinator stands is said to it as soon as it does.
    """

    def __init__(self) -> None:
        self._coordinator: Coordinator | None = None
        self._stop = ""
        self._end: tuple[str, float] | None = None

    def stop(self, why: str) -> None:
        """The run is to stop at its next step boundary."""
        self._stop = why
        if self._coordinator is not None:
            self._coordinator.stop(why)

    def end_near(self, reason: str, deadline_s: float) -> None:
        """The coordinator's allocation ends at `deadline_s` (epoch): state to disk, and again."""
        self._end = (reason, deadline_s)
        if self._coordinator is not None:
            self._coordinator.end_near(reason, deadline_s)

    @property
    def steps_done(self) -> int:
        """Of the coordinator that stands; 0 while there is none."""
        return self._coordinator.steps_done if self._coordinator is not None else 0

    def attach(self, coordinator: Coordinator | None) -> None:
        self._coordinator = coordinator
        if coordinator is not None and self._stop:
            coordinator.stop(self._stop)
        if coordinator is not None and self._end is not None:
            coordinator.end_near(*self._end)


def services_of(config: RunConfig, run_directory: Path, secret: bytes) -> Services:
    """What the run file's cluster calls for, MPI to meet, a journal to record."""
    clock, reserve_bytes = SystemClock(), config.metrics.reserve_bytes
    launcher, pool = (_on_slurm if config.cluster.kind == "slurm" else _here)(config, run_directory)
    return Services(
        clock=clock,
        recipe=load_recipe(config),
        launcher=launcher,
        pool=pool,
        rendezvous=MpiRendezvous(run_directory, secret, _desk_place(config)),
        metrics=JournalMetrics(run_directory, reserve_bytes, _attributes(config), clock),
    )


def _desk_place(config: RunConfig) -> DeskPlace:
    network = config.network
    host = control_address(network, config.cluster.kind)
    return DeskPlace(host, network.interface, network.mpi_netmod)


def _here(config: RunConfig, run_directory: Path) -> tuple[Launcher, NodePool]:
    """Workers on this machine."""
    return LocalLauncher(run_directory, config.deadlines.exit_s), FixedPool()


def _on_slurm(config: RunConfig, run_directory: Path) -> tuple[Launcher, NodePool]:
    """Workers on the nodes of the Slurm job that this process runs in, and on burst nodes."""
    from liver_hpc.cluster.slurm.allocation import OwnAllocation
    from liver_hpc.cluster.slurm.commands import SlurmCommands
    from liver_hpc.cluster.slurm.launcher import SlurmLauncher
    from liver_hpc.cluster.slurm.pool import SlurmPool

    slurm = config.cluster.slurm
    commands = SlurmCommands(slurm.command_s, slurm.unreachable_s)
    allocation = OwnAllocation.from_environment(os.environ, config, commands)
    pool = SlurmPool(config, commands, allocation, run_directory, SystemClock())
    return SlurmLauncher(run_directory, config, commands, pool.place_of), pool


def run_coordinator(
    run_directory: str, build: Build = services_of, control: Control | None = None
) -> int:
    """Runs the run in a directory to its end, and leaves `outcome.json` there; 0 unless it failed.

    Needs `run.yaml`; makes the secret where there is none; goes on from a checkpoint that it finds.
    In a process's main thread SIGTERM and SIGINT stop the run; elsewhere only `control` does.
    """
    directory = Path(run_directory)
    raise_descriptor_limit()
    with ExitStack() as stack:
        try:
            outcome = _live(directory, build, control or Control(), stack)
        except Exception as error:
            log.exception("the coordinator failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}", 0)
        (directory / COORDINATOR_FILE).unlink(missing_ok=True)
        outcome.write(directory)
        log.info("%s after %d steps: %s", outcome.state, outcome.step, outcome.reason)
    return 0 if outcome.state != "failed" else 1


def _live(directory: Path, build: Build, control: Control, stack: ExitStack) -> Outcome:
    """One coordinator after the other, for as long as one ends to begin again from the disk."""
    (directory / OUTCOME_FILE).unlink(missing_ok=True)
    config = load_run(directory / "run.yaml")
    secret_path = directory / "secret"
    secret = read_secret(secret_path) if secret_path.exists() else create_secret(secret_path)
    coordinator: Coordinator | None = None

    def identity() -> str:
        return coordinator.identity() if coordinator is not None else "start"

    stack.enter_context(_logging_to(directory / "logs" / "coordinator.log", identity))
    if threading.current_thread() is threading.main_thread():
        stack.enter_context(_stopped_by_signals(control))
    fruitless, last_step = 0, -1
    while True:
        memory = coordinator.memory if coordinator is not None else None
        coordinator = Coordinator(config, directory, secret, build(config, directory, secret))
        if memory is not None:
            coordinator.recall(memory)
        control.attach(coordinator)
        outcome = coordinator.run()
        control.attach(None)
        fruitless = fruitless + 1 if outcome.step <= last_step else 0
        last_step = max(last_step, outcome.step)
        if outcome.state != "restart":
            return outcome
        if fruitless >= MOST_FRUITLESS_LIVES:
            reason = f"began again {fruitless} times in vain: {outcome.reason}"
            return Outcome("failed", reason, outcome.step)
        log.info("begins again after step %d: %s", outcome.step, outcome.reason)


@contextmanager
def _logging_to(path: Path, identity: Callable[[], str]) -> Iterator[None]:
    """The package's log lines go to `path` for a while."""
    package = logging.getLogger("liver_hpc")
    handler, level = open_log(path, identity), package.level
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    try:
        yield
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        handler.close()


@contextmanager
def _stopped_by_signals(control: Control) -> Iterator[None]:
    """SIGTERM and SIGINT are requests to stop, as `liver stop` is."""

    def stop(number: int, frame: object) -> None:
        control.stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _attributes(config: RunConfig) -> dict[str, str]:
    """Facts about a run that belong beside its figures."""
    versions = {}
    for package in RECORDED_PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "name": config.name,
        "config": dump_run(config),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        **versions,
    }
