"""The coordinator: one event loop that starts a run, changes its shape, and ends it.

Connections are served in threads that only put events into the inbox; everything else happens in
the loop. `run_coordinator` is the process: it needs nothing but the run directory.
"""

from __future__ import annotations

import logging
import os
import platform
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

from liver_hpc.clock import Deadline, SystemClock
from liver_hpc.cluster.launcher import Launcher, lives_here, local_launcher
from liver_hpc.cluster.network import control_address
from liver_hpc.cluster.pool import NodePool
from liver_hpc.cluster.slurm.commands import SlurmCommands
from liver_hpc.cluster.slurm.holdings import own_allocations
from liver_hpc.cluster.slurm.launcher import slurm_launcher
from liver_hpc.cluster.slurm.pool import SlurmPool
from liver_hpc.cluster.slurm.run_job import OwnJob
from liver_hpc.cluster.slurm.squeue import Squeue
from liver_hpc.config.load import dump_run, load_run
from liver_hpc.config.schema import RunConfig
from liver_hpc.coordinator.connections import Control
from liver_hpc.coordinator.derivation import checked_recipe, task_words
from liver_hpc.coordinator.loop import Coordinator, new_core
from liver_hpc.coordinator.performer import Services
from liver_hpc.coordinator.takeover import Left, what_is_left
from liver_hpc.coordinator.tracking import tracked
from liver_hpc.errors import ConfigError
from liver_hpc.host.process import collect_seldom, raise_descriptor_limit, raise_soft_limits
from liver_hpc.recipes.base import Recipe
from liver_hpc.recipes.specs import versions_of
from liver_hpc.rendezvous.mpi.network import MpiNetwork
from liver_hpc.rendezvous.mpi.service import MpiRendezvous
from liver_hpc.report.store import write_metrics
from liver_hpc.run.actions import Ending
from liver_hpc.run.codec import memory_of
from liver_hpc.run.entries import (
    JOURNAL_FILE,
    Entry,
    JournalUnread,
    last_end,
    last_start,
    read_entries,
    steps_done,
)
from liver_hpc.run.epoch import NotTakenOver, Superseded, claim_epoch
from liver_hpc.run.events import Memory
from liver_hpc.run.journal import Journal, continue_in_copy
from liver_hpc.run.machine import Run
from liver_hpc.run.outcome import (
    AGAIN_FILE,
    COORDINATOR_FILE,
    OUTCOME_FILE,
    Outcome,
    begin_again,
    open_log,
)
from liver_hpc.run.secret import create_secret, read_secret

log = logging.getLogger(__name__)

RECORDED_PACKAGES = ("liver-hpc", "torch", "megatron-core", "mpi4py", "numpy")
READ_AGAIN_S = 1.0
"""So long after a journal could not be read it is tried again."""

T = TypeVar("T")
Build = Callable[[RunConfig, Path, bytes], Services]


def services_of(config: RunConfig, run_directory: Path, secret: bytes) -> Services:
    """What the run file's cluster calls for, MPI to meet, a journal to record."""
    network, kind = config.network, config.cluster.kind
    if kind == "slurm":
        launcher, pool, recipe = _on_slurm(config, run_directory)
    else:
        exit_s = config.deadlines.exit_s
        stay = config.workers.warm
        in_job = "SLURM_JOB_ID" in os.environ
        launcher, pool = local_launcher(run_directory, exit_s, stay=stay, in_job=in_job), NodePool()
        task = local_launcher(run_directory, exit_s, task=task_words(run_directory))
        recipe = checked_recipe(config, run_directory, task)
    mpi = MpiNetwork(control_address(network, kind), network.interface, network.mpi_netmod)
    return Services(
        clock=SystemClock(),
        recipe=recipe,
        launcher=launcher,
        pool=pool,
        rendezvous=MpiRendezvous(run_directory, secret, mpi),
        open_journal=partial(Journal, run_directory / JOURNAL_FILE),
        attributes=attributes_of(config, run_directory),
    )


def _on_slurm(config: RunConfig, run_directory: Path) -> tuple[Launcher, NodePool, Recipe]:
    """Workers on the nodes of the Slurm job that this process runs in, and on burst nodes."""
    slurm = config.cluster.slurm
    commands = SlurmCommands(slurm.command_s, slurm.unreachable_s)
    own = own_allocations(os.environ, config, commands.hostnames, commands.nodes_of)
    squeue = Squeue(commands, slurm.command_s)
    pool = SlurmPool(config, commands, squeue, own, run_directory, SystemClock())
    task = slurm_launcher(
        run_directory, config, squeue, lambda node: own[0], task=task_words(run_directory)
    )
    recipe = checked_recipe(config, run_directory, task, own[0].nodes[0])
    return slurm_launcher(run_directory, config, squeue, pool.use), pool, recipe


def run_coordinator(directory: Path, control: Control, build: Build = services_of) -> Outcome:
    """Runs the run in a directory to its end; how it ended, which `outcome.json` there says too,
    unless the disk is full.

    Needs `run.yaml`; makes the secret where there is none; goes on with workers that a killed
    coordinator has left in the same start of its job, or from a checkpoint that it finds. Raises
    Superseded where another coordinator has taken over, and leaves all to that one; NotTakenOver
    where it could not take over itself, and leaves all to the next one.
    """
    raise_descriptor_limit()
    raise_soft_limits()
    collect_seldom()
    with ExitStack() as stack:
        try:
            outcome = _run(directory, build, control, stack)
        except (Superseded, NotTakenOver) as error:
            log.warning("%s", error)
            raise
        except Exception as error:
            log.exception("the coordinator failed")
            outcome = Outcome("failed", f"{type(error).__name__}: {error}", 0)
        if outcome.state == Ending.FAILED and not outcome.step:  # it may have known of none yet
            outcome = replace(outcome, step=steps_done(directory / JOURNAL_FILE))
        log.info("%s after %d steps: %s", outcome.state, outcome.step, outcome.reason)
        try:
            (directory / COORDINATOR_FILE).unlink(missing_ok=True)
            outcome.write(directory)
        except OSError as error:
            log.error("the outcome cannot be written: %s", error)
        control.outcome = outcome  # from now on whoever is short of time may go
        write_metrics(directory)
    return outcome


def _run(directory: Path, build: Build, control: Control, stack: ExitStack) -> Outcome:
    """One coordinator after the other, for as long as one ends to restart from the disk."""
    coordinator: Coordinator | None = None
    journal = directory / JOURNAL_FILE

    def identity() -> str:
        return coordinator.core.identity() if coordinator is not None else "start"

    with _left_to_the_next(journal):
        if (directory / OUTCOME_FILE).exists():
            begin_again(directory)
        config = load_run(directory / "run.yaml")
        secret_path = directory / "secret"
        secret = read_secret(secret_path) if secret_path.exists() else create_secret(secret_path)
        stack.enter_context(_logging_to(directory / "logs" / "coordinator.log", identity))
        epoch = claim_epoch(directory)
        silence_s = epoch.silence_s()  # before it shows itself
        begins = stack.enter_context(ExitStack())
        begins.enter_context(epoch.shown())
        continue_in_copy(journal, epoch)
        patience_s = config.deadlines.boot_s
        again = (directory / AGAIN_FILE).exists()
        gone = again and silence_s > config.deadlines.successor_s
        over = None if again else _told(journal, _ended, patience_s)
        if over is not None:
            return over
        services = build(config, directory, secret)
        find = partial(_left, partial(new_core, config, services), _here(directory))
        left = None if gone else _told(journal, find, patience_s)
        if left is not None and again and config.cluster.kind == "local":
            left = left if lives_here(directory, left.nodes) else None
        # Whoever trains on waits for what is read: what all starts have left, only without any.
        before = left or _told(journal, _memory, patience_s) or Memory()
        # It reads the journal, which must be one that can be gone on with.
        watched = stack.enter_context(tracked(config, directory, control.note))
        services = watched(services)
        coordinator = Coordinator(config, epoch, secret, services, control, before)
        (directory / AGAIN_FILE).unlink(missing_ok=True)
    while True:
        begins.close()  # from now on it shows itself
        outcome = coordinator.run()
        if outcome.state in ("restart", "failed") and _is_queued_again(config, directory):
            log.info("the job has been queued again after step %d: %s", outcome.step, outcome)
            raise Superseded(epoch.number, "the job's next start takes over")
        if outcome.state != "restart":
            return outcome
        with suppress(OSError):
            if epoch.is_removed():  # and with it what a start reads
                why = f"{outcome.reason}; {epoch.removed_text}"
                return Outcome(Ending.FAILED, why, outcome.step)
        log.info("restarts after step %d: %s", outcome.step, outcome.reason)
        services, memory = watched(build(config, directory, secret)), coordinator.core.memory
        coordinator = Coordinator(config, epoch, secret, services, control, memory)


def _is_queued_again(config: RunConfig, directory: Path) -> bool:
    """Whether Slurm has queued the run's job again under its processes, as it does with a node
    whose slurmd is silent: no step begins in it any more, and its next start goes on."""
    job = OwnJob.noted(directory) if config.cluster.kind == "slurm" else None
    return job is not None and job.is_queued_again(config.cluster.slurm.command_s)


@contextmanager
def _left_to_the_next(journal: Path) -> Iterator[None]:
    """Whatever goes wrong before a coordinator is there ends no run that another one may take over:
    one whose last start has not ended, as far as its journal can be read. Raises NotTakenOver."""
    try:
        yield
    except Superseded:
        raise
    except Exception as error:
        if _is_over(journal):
            raise
        log.exception("the coordinator failed")
        raise NotTakenOver(f"{type(error).__name__}: {error}") from error


def _is_over(journal: Path) -> bool:
    """Whether nobody is known to train on."""
    try:
        journal.stat()
        if last_end(journal) is not None:
            return True
        begun = next(last_start(journal), None)
        return begun is not None and not _is_of(begun, _here(journal.parent))
    except FileNotFoundError:
        return True
    except (OSError, JournalUnread):
        return False
    except ConfigError:
        return True  # and it cannot be gone on with


def _told(journal: Path, read: Callable[[Path], T | None], limit_s: float) -> T | None:
    """What a journal says, None where there is none. Where its file system does not give it just
    now it is asked again, for as long as agents wait for a coordinator that reads: it is no reason
    to begin again what trains on. Raises JournalUnread, OSError."""
    limit = Deadline.after(SystemClock(), limit_s, "the journal")
    while True:
        try:
            journal.stat()  # whether it exists says no to whatever error there is
            return read(journal)
        except FileNotFoundError:
            return None
        except (OSError, JournalUnread) as error:
            if limit.expired():
                raise
            log.warning("the journal is read again: %s", error)
            threading.Event().wait(READ_AGAIN_S)


def _ended(journal: Path) -> Outcome | None:
    """How the run has ended under a coordinator that was killed before it could leave that. Raises
    JournalUnread."""
    try:
        end = last_end(journal)
    except JournalUnread:
        raise
    except ConfigError:
        return None  # and it cannot be gone on with
    if end is None or end["state"] in (Ending.REQUEUE, Ending.RESTART):
        return None
    return Outcome(end["state"], end["reason"], end["step"])


def _left(new_core: Callable[[], Run], here: Mapping[str, str], journal: Path) -> Left | None:
    """What a coordinator has left that was killed, and that can be gone on with. Raises
    JournalUnread."""
    try:
        start = last_start(journal)
        begun = next(start, None)
        if begun is None or not _is_of(begun, here):
            return None
        return what_is_left(chain([begun], start), new_core)
    except JournalUnread:
        raise
    except ConfigError as error:
        log.error("no coordinator can take over, the run begins again: %s", error)
        return None


def _memory(journal: Path) -> Memory:
    """What the starts in other processes have left. What cannot be gone on with is kept under
    another name: a damaged journal. Raises JournalUnread."""
    try:
        return memory_of(read_entries(journal))
    except JournalUnread:
        raise
    except ConfigError as error:
        _set_aside(journal, str(error))
        return Memory()


def _set_aside(path: Path, why: str) -> None:
    number = 1
    while (kept := path.with_suffix(f".{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
    log.error("%s is kept as %s: %s", path, kept.name, why)


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
        with suppress(OSError):  # what is left cannot be written: the disk is full
            handler.close()


def _here(directory: Path) -> dict[str, str]:
    """What ends all that a start of the run has begun when it ends itself: the start of the Slurm
    job, which notes itself before it coordinates, so that a coordinator in any step of it knows the
    same one; and that of this machine."""
    noted = OwnJob.noted(directory)
    here = {} if noted is None else {"job": noted.start}
    with suppress(OSError):
        here["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return here


def _is_of(begun: Entry, here: Mapping[str, str]) -> bool:
    """Whether who was begun by a start may live here, as far as its first entry says."""
    of = begun.event.get("attributes", {})
    return all(of.get(name, value) == value for name, value in here.items())


def attributes_of(config: RunConfig, directory: Path) -> dict[str, str]:
    """Facts about a run that belong beside its figures."""
    here = _here(directory)
    if config.cluster.kind == "slurm":  # whose coordinators may be of several machines
        here.pop("boot", None)
    return {
        **here,
        "name": config.name,
        "config": dump_run(config),
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "cpus": str(os.cpu_count()),
        **versions_of(RECORDED_PACKAGES),
    }
