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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from liver_hpc.clock import SystemClock
from liver_hpc.cluster.local import LocalLauncher
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordination.address import control_address
from liver_hpc.coordination.loop import Coordinator
from liver_hpc.coordination.run_files import COORDINATOR_FILE, OUTCOME_FILE, Outcome, open_log
from liver_hpc.coordination.services import Services
from liver_hpc.metrics.store import MetricsWriter
from liver_hpc.recipes.base import load_recipe
from liver_hpc.rendezvous.mpi import MpiFrontDesk
from liver_hpc.rendezvous.secret import create_secret, read_secret

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("liver-hpc", "torch", "megatron-core", "mpi4py", "numpy")

Build = Callable[[RunConfig, Path, bytes], Services]


def local_services(config: RunConfig, run_directory: Path, secret: bytes) -> Services:
    """Workers on this machine, MPI to meet, HDF5 to record."""
    return Services(
        clock=SystemClock(),
        recipe=load_recipe(config),
        launcher=LocalLauncher(run_directory, config.deadlines.exit_s),
        front_desk=MpiFrontDesk(
            run_directory,
            secret,
            host=control_address(config.network.interface),
            interface=config.network.interface,
        ),
        metrics=MetricsWriter(run_directory / "metrics.h5", config.metrics, _attributes(config)),
    )


def run_coordinator(run_directory: str, build: Build = local_services) -> int:
    """Runs the run in a directory to its end, and leaves `outcome.json` there; 0 unless it failed.

    Needs `run.yaml`; makes the secret where there is none. SIGTERM and SIGINT stop the run.
    """
    directory = Path(run_directory)
    with ExitStack() as stack:
        try:
            outcome = _run(directory, build, stack)
        except Exception as error:
            log.exception("the coordinator failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}", 0)
        (directory / COORDINATOR_FILE).unlink(missing_ok=True)
        outcome.write(directory)
        log.info("%s after %d steps: %s", outcome.state, outcome.step, outcome.reason)
    return 0 if outcome.state != "failed" else 1


def _run(directory: Path, build: Build, stack: ExitStack) -> Outcome:
    (directory / OUTCOME_FILE).unlink(missing_ok=True)
    config = load_run(directory / "run.yaml")
    secret_path = directory / "secret"
    secret = read_secret(secret_path) if secret_path.exists() else create_secret(secret_path)
    coordinator = Coordinator(config, directory, secret, build(config, directory, secret))
    log_path = directory / "logs" / "coordinator.log"
    stack.enter_context(_logging_to(log_path, coordinator.identity))
    stack.enter_context(_stopped_by_signals(coordinator))
    return coordinator.run()


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
def _stopped_by_signals(coordinator: Coordinator) -> Iterator[None]:
    """SIGTERM and SIGINT are requests to stop, as `liver stop` is."""

    def stop(number: int, frame: object) -> None:
        coordinator.stop(signal.Signals(number).name)

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
